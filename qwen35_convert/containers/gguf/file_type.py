"""Whether `general.file_type` names the types that a file stores, where no recipe says it.

Nothing is computed from it, but people and tools are shown it as the file's quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from formats.family.roles import ROLES
from formats.gguf.checkpoint import first_file
from formats.gguf.file import GgufFile
from formats.gguf.names import FUSED_EXPERTS
from quant.mix.identify import GUESSED, exact_mixes, may_be_called
from quant.mix.tensors import Facts, MixTensor
from qwen35_convert.containers.gguf.keys import kind_problem
from qwen35_convert.failure import Failure

KEY = "general.file_type"
KIND = "uint32"


def file_type_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the file type, if it is that of other types; a file may have none."""
    file = first_file(artifact)
    number = stated_type(file)
    if isinstance(number, Failure):
        yield number
    elif number is not None and (problem := _problem(artifact, number)):
        yield Failure(file.path.name, f"{KEY} is {number}, {problem}")


def stated_type(file: GgufFile) -> int | Failure | None:
    """Return the number of a file's type, None if it has none; a failure for one of no number."""
    pair = file.kv.get(KEY)
    if pair is None:
        return None
    wrong = kind_problem(pair, KIND)
    return Failure(file.path.name, wrong) if wrong else int(pair.value)


def _problem(artifact: Checkpoint, number: int) -> str | None:
    tensors, infos, config = _tensors(artifact), artifact.infos(), artifact.config
    types = {tensor.name: infos[tensor.name].dtype for tensor in tensors}
    facts = Facts(
        num_layers=len(config.layer_types),
        num_experts=config.sizes.get("E", 0),
        gqa=config.sizes["NH"] // config.sizes["NKV"],
        tied=artifact.layout.tied,
        imatrix=False,
    )
    fused = any(tensor.name.endswith("." + FUSED_EXPERTS) for tensor in tensors)
    exact = {} if fused else exact_mixes(types, tensors, facts)
    if exact:
        known = " or ".join(f"{number} ({mix})" for mix, number in exact.items())
        return None if number & ~GUESSED in exact.values() else f"expected {known}, its types"
    free = {types[tensor.name] for tensor in tensors if not ROLES[tensor.role].gguf_f32}
    right = may_be_called(number, free)
    return None if right else f"expected that of its types: {', '.join(sorted(free))}"


def _tensors(artifact: Checkpoint) -> list[MixTensor]:
    """Return the tensors that are in place, in the order of the file."""
    infos, weights = artifact.infos(), dict[str, list[str]]()
    roles = {atom.stored: atom.role for atom in artifact.layout.atoms.values()}
    for atom in artifact.layout.atoms.values():
        weights.setdefault(atom.stored, []).append(atom.name)
    return [
        MixTensor(name, roles[name], infos[name].shape, tuple(weights[name]))
        for name in infos
        if name in weights
    ]
