"""What a config of GPTQ, AWQ or AutoRound says, held against the packed weights.

    lists     `dynamic` (GPTQ) and `modules_to_not_convert` (AWQ) leave modules alone. vLLM takes a
              linear for quantised by its header, but experts by these lists; of AWQ, linears by
              a list that is not empty. gptqmodel takes all linears that it would quantise, which
              are those of the decoder's layers, by the rules
    sym       engines do not read zero points of symmetric weights
    desc_act  without it vLLM does not read which group a column is in

Bits and groups are compared where weights are recognised. AutoRound's lists are not judged: its
engines take what they do not name from the tensors.

Source: vLLM's `GPTQMarlinConfig` and `AWQMarlinConfig` at 0.26 and 0.33.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.names import optional_part
from formats.family.packings import PACKINGS, left_alone, promised
from formats.family.roles import ROLES
from formats.quant_methods import AWQ, GPTQ
from formats.side_names import CONFIG
from quant.errors import QuantError
from quant.fourbit.columns import groups_of
from quant.fourbit.parts import ORDER, SCALE, ZERO
from quant.fourbit.qweight import Gptq, Turned
from quant.opening import open_value
from quant.stored import Value
from qwen35_convert.containers.safetensors.gptq_rules import EXPERTS
from qwen35_convert.containers.safetensors.ignored_modules import modules_of
from qwen35_convert.containers.safetensors.quantization_config import module_of
from qwen35_convert.containers.safetensors.quantization_table import Row, odd_rows
from qwen35_convert.failure import Failure

# Hub's name and vLLM's of the same module.
HUB_INNER, VLLM_INNER = "model.language_model.", "language_model.model."
INSIDE = "modules_in_block_to_quantize"
SWITCH: Row = ((None, True, False), "expected true or false")
FIELDS: dict[str, Row] = {
    "sym": SWITCH,
    "desc_act": SWITCH,
    "pack_dtype": ((None, "int32", "torch.int32"), "but words of 32 bits are stored"),
}
# What vLLM takes no default for, by each of its names.
NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    GPTQ: (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    AWQ: (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)),
}
Leaves = Callable[[str, Mapping[str, Any]], bool]


def _gptq_leaves(module: str, block: Mapping[str, Any]) -> bool:
    return left_alone(module, block.get("dynamic"))


def _awq_leaves(module: str, block: Mapping[str, Any]) -> bool:
    """Compare parts of names, as vLLM does."""
    listed = block.get("modules_to_not_convert")
    return isinstance(listed, list) and any(str(entry) in module for entry in listed)


LISTS: dict[str, tuple[str, Leaves]] = {
    GPTQ: ("dynamic", _gptq_leaves),
    AWQ: ("modules_to_not_convert", _awq_leaves),
}


def packed_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield modules that a list or a field makes something else of than what is stored."""
    block = artifact.config.quantization or {}
    method = str(block.get("quant_method"))
    if method not in PACKINGS or not any(a.quantized for a in artifact.layout.atoms.values()):
        return
    yield from (
        Failure(CONFIG, f"quantization_config: {problem}") for problem in _odd(artifact, block)
    )
    if method in LISTS:
        yield from _other_forms(artifact, method)
        yield from _listed(artifact, block, *LISTS[method])
    for atom in artifact.layout.atoms.values():
        if isinstance(atom.form, Gptq):
            yield from _unread(open_value(artifact, atom), atom, block)


def _odd(artifact: Checkpoint, block: Mapping[str, Any]) -> Iterator[str]:
    """Yield fields that engines obey beside bits and groups, and that are not so."""
    fields = {key: value for key, value in block.items() if key in FIELDS}
    yield from odd_rows(fields, FIELDS, ())
    for names in NEEDED.get(str(block.get("quant_method")), ()):
        if all(block.get(name) is None for name in names):
            yield f"{names[0]} is absent, which vLLM needs"
    for field, kind in (("dynamic", dict), ("modules_to_not_convert", list)):
        if not isinstance(block.get(field), (kind, type(None))):
            yield f"{field} is {block[field]!r:.120}, which engines cannot read"
    forms = block.get("format"), block.get("checkpoint_format")
    if None not in forms and len(set(map(str, forms))) > 1:
        yield f"format is {forms[0]!r}, but checkpoint_format is {forms[1]!r}"
    if block.get("lm_head") and "lm_head" not in _quantised(artifact):
        yield "lm_head is true, but the head is not quantised: vLLM looks for its codes"
    inside = _flat(block.get(INSIDE))
    out = [m for m in _quantised(artifact) if not any(name in m for name in inside)]
    if inside and out:
        yield f"{INSIDE} leaves out {out[0]}, which is quantised"


def _flat(names: Any) -> list[str]:
    """Return the names in a list, or in a list of lists."""
    if isinstance(names, list):
        return [name for part in names for name in _flat(part)]
    return [] if names is None else [str(names)]


def _quantised(artifact: Checkpoint) -> list[str]:
    return [module for module, quantized in modules_of(artifact).items() if quantized]


def _other_forms(artifact: Checkpoint, method: str) -> Iterator[Failure]:
    for atom in artifact.layout.atoms.values():
        if atom.quantized and not isinstance(atom.form, Turned):
            yield Failure(atom.stored, f"is {atom.scheme}, but quant_method is {method!r}")


def _listed(
    artifact: Checkpoint, block: Mapping[str, Any], field: str, leaves: Leaves
) -> Iterator[Failure]:
    readers = _readers(artifact, block)
    for module, quantized in modules_of(artifact).items():
        left = [leaves(name, block) for name in _names(module)]
        if quantized and all(left):
            yield Failure(module, f"is quantised, but {field} in config.json leaves it alone")
        elif not quantized and module in readers and not any(left):
            problem = f"is not quantised, but {field} in config.json does not leave it alone"
            yield Failure(module, f"{problem}: {readers[module]} looks for its codes")


def _readers(artifact: Checkpoint, block: Mapping[str, Any]) -> dict[str, str]:
    """Return which engine takes a module for quantised where no list leaves it alone.

    `modules_in_block_to_quantize` is for linears: vLLM asks it for no experts.
    """
    inside, gptq = _flat(block.get(INSIDE)), block.get("quant_method") == GPTQ
    linears = "gptqmodel" if gptq else "vLLM" if block.get(LISTS[AWQ][0]) else None
    readers = {}
    for atom in artifact.layout.atoms.values():
        if EXPERTS in atom.weight:
            readers[module_of(atom.weight)] = "vLLM"
        elif linears and ROLES[atom.role].linear and not optional_part(atom.name):
            module = module_of(atom.weight)
            if not inside or any(name in module for name in inside):
                readers[module] = linears
    return readers


def _names(module: str) -> list[str]:
    """Return a module's names in engines; vLLM asks for all experts of a layer at once."""
    head, experts, _ = module.partition(EXPERTS)
    name = f"{head}.experts" if experts else module
    names = [name]
    if name.startswith(HUB_INNER):
        names.append(VLLM_INNER + name.removeprefix(HUB_INNER))
    return names


def _unread(value: Value, atom: Atom, block: Mapping[str, Any]) -> Iterator[Failure]:
    """Yield zero points and groups of columns that engines do not read by what the config says."""
    promise = promised(module_of(atom.weight), block)
    stored = dict(
        zip((part.key for part in value.scheme.parts("", (8, 8))), atom.parts, strict=True)
    )
    if promise.get("sym") is True and bool(value.shared[ZERO].data.any()):
        yield Failure(stored[ZERO], "has zero points, but sym is true: engines do not read them")
    if promise.get("desc_act") is False and ORDER in stored and _moved(value):
        problem = "says that columns are in another order, but desc_act is false"
        yield Failure(stored[ORDER], f"{problem}: vLLM does not read it")


def _moved(value: Value) -> bool:
    """Whether columns are in another order; groups that are not there are named elsewhere."""
    order, groups = value.shared[ORDER].data, value.shared[SCALE].data.shape[1]
    try:
        return groups_of(order, len(order), groups) is not None
    except QuantError:
        return False
