"""The structure of an artifact, judged by its headers and config alone.

Census: every FP8 tensor has its one scale of the right grid and every scale its weight (the layout
recogniser says so); the config, its list of unquantised modules and the tensors agree, under each
engine's own rules; protected tensors are not quantised; fused groups share a scheme.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.names import holders
from formats.family.roles import ROLES
from formats.json_file import read_object
from formats.quant_methods import COMPRESSED, MODELOPT
from formats.safetensors.file import SafetensorsFile
from formats.safetensors.index import INDEX
from formats.safetensors.methods import BESIDE
from quant.registry import SCHEMES
from quant.stored import scheme_of
from qwen35_convert.containers.safetensors.config import CLASSES
from qwen35_convert.containers.safetensors.config_rules import places
from qwen35_convert.containers.safetensors.engine_fields import field_failures
from qwen35_convert.containers.safetensors.ignored_modules import list_failures
from qwen35_convert.containers.safetensors.namespace import namespace_failures
from qwen35_convert.containers.safetensors.packed_fields import packed_failures
from qwen35_convert.failure import Failure

TIE = "tie_word_embeddings"


def structure_failures(artifact: Checkpoint) -> list[Failure]:
    """Return everything that headers and config show to be wrong."""
    failures: list[Failure] = []
    for check in (
        namespace_failures,
        _names,
        _config_block,
        field_failures,
        list_failures,
        packed_failures,
        _part_names,
        _protected,
        _groups,
        _fused_parts,
        _config_fields,
        _index,
    ):
        failures += check(artifact)
    return failures


def _names(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield what a conversion renames or leaves out, and an engine does not."""
    layout = artifact.layout
    for name in layout.buffers:
        yield Failure(name, "is a buffer, not a tensor of the Qwen3.5 family; do not store it")
    for name, original in layout.copies.items():
        yield Failure(name, f"is not a tensor of the Qwen3.5 family, which has {original} for it")
    wrapped = [name for name in artifact.infos() if holders(name) or _is_repeated(name)]
    if wrapped:
        names = ", ".join(holders(wrapped[0])) or "language_model twice"
        others = f", and so do {len(wrapped) - 1} others" if wrapped[1:] else ""
        yield Failure(wrapped[0], f"is under {names}{others}: no engine looks for it there")


def _is_repeated(name: str) -> bool:
    return name.split(".").count("language_model") > 1


def _config_block(artifact: Checkpoint) -> Iterator[Failure]:
    quantized = any(atom.quantized for atom in artifact.layout.atoms.values())
    if quantized and artifact.config.quantization is None:
        yield Failure("config.json", "has no quantization_config, but quantised tensors are stored")
    if not quantized and artifact.config.quantization is not None:
        file = next((name for name in BESIDE if name in artifact.beside), "config.json")
        yield Failure(file, "has a quantization_config, but no tensor is quantised")


def _part_names(artifact: Checkpoint) -> Iterator[Failure]:
    """Hold parts to their names, of which each dialect has its own."""
    method = (artifact.config.quantization or {}).get("quant_method")
    official, dialect = method == "fp8", MODELOPT if method == MODELOPT else COMPRESSED
    for atom in artifact.layout.atoms.values():
        if not atom.quantized:
            continue
        scheme = SCHEMES.get(atom.scheme)
        if official and (scheme is None or scheme.config_block([]) is None):
            continue  # engines read one scale for a tensor under either name
        stored = scheme_of(atom).beside_others().in_dialect(dialect)
        named = scheme if official and scheme else stored
        for part, name in zip(named.parts(atom.weight, (1, 1)), atom.parts, strict=True):
            if part.info.name != name:
                problem = f"is named for another format, expected {part.info.name}"
                yield Failure(name, problem)


def _protected(artifact: Checkpoint) -> Iterator[Failure]:
    for atom in artifact.layout.atoms.values():
        if ROLES[atom.role].protected and atom.quantized:
            yield Failure(atom.stored, f"is {atom.scheme}, but {atom.role} is never quantised")


def _groups(artifact: Checkpoint) -> Iterator[Failure]:
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for atom in artifact.layout.atoms.values():
        if atom.group:
            groups[atom.group].setdefault(atom.scheme, atom.stored)
    for members in groups.values():
        if len(members) > 1:
            (one, first), (two, second) = list(members.items())[:2]
            yield Failure(first, f"is {one}, but {second}, which engines fuse with it, is {two}")


def _fused_parts(artifact: Checkpoint) -> Iterator[Failure]:
    """Hold parts that a fused matrix shares against each other: engines take one for all."""
    shared: dict[tuple[str, str], tuple[str, list[float]]] = {}
    for atom in artifact.layout.atoms.values():
        parts = scheme_of(atom).parts("", (1, 1)) if atom.quantized else ()
        for part, name in zip(parts, atom.parts, strict=False):
            if not part.fused:
                continue
            content = artifact.load(name, artifact.read(name), ...).tolist()
            first, expected = shared.setdefault((atom.matrix, part.key), (name, content))
            if name != first and content != expected:
                problem = f"is not that of {first}: engines run both with one global scale"
                yield Failure(name, problem)


def _config_fields(artifact: Checkpoint) -> Iterator[Failure]:
    config, layout = artifact.config, artifact.layout
    # A config that promises an MTP head which is gone as a whole is a note of the layout: every
    # model that transformers saved is one.
    if layout.form.mtp_layers not in (0, config.mtp_layers):
        yield Failure(
            "config.json",
            f"mtp_num_hidden_layers is {config.mtp_layers}, "
            f"but {layout.form.mtp_layers} MTP layers are stored",
        )
    for flag, value in config.tie_flags.items():
        if value != layout.tied and not layout.headless:
            yield Failure(
                "config.json",
                f"{flag} is {str(value).lower()}, "
                f"but lm_head is {'absent' if layout.tied else 'stored'}",
            )
    for prefix, part in places(config):
        if part.get(TIE, "absent") is None:
            right = f"expected {str(layout.tied).lower()} or no such field"
            problem = f"is null, {right}: transformers takes no null"
            yield Failure("config.json", f"{prefix}{TIE} {problem}")
    expected = CLASSES[config.moe, layout.kind == "hub", layout.headless]
    names, kind = config.raw.get("architectures") or [None], config.raw.get("model_type")
    if (names, kind) != ([expected[0]], expected[1]) and layout.kind in ("hub", "text"):
        got = ", ".join(map(str, names)) if isinstance(names, list) else f"no list but {names!r}"
        yield Failure(
            "config.json",
            f"architectures names {got:.200} and model_type {kind}, "
            f"but the tensors are those of {expected[0]} and {expected[1]}",
        )


def _index(artifact: Checkpoint) -> Iterator[Failure]:
    for stray in artifact.strays:
        yield Failure(INDEX, stray)
    for name, file in artifact.files.items():
        assert isinstance(file, SafetensorsFile), "only safetensors have an index"
        form = file.header.metadata.get("format", "pt")
        if form != "pt":
            yield Failure(name, f"has metadata format: {form}, expected pt")
    path = artifact.folder / INDEX
    if path.is_file():
        yield from _total(artifact, read_object(path).get("metadata"))
    elif len(artifact.files) > 1:
        yield Failure(
            INDEX, f"is missing: without it transformers finds none of {len(artifact.files)} files"
        )


def _total(artifact: Checkpoint, metadata: Any) -> Iterator[Failure]:
    """Judge what an index says of all tensors, which it need not do."""
    if not isinstance(metadata, dict | None):
        yield Failure(INDEX, f"metadata is {metadata!r:.40}, expected an object")
        return
    total = (metadata or {}).get("total_size")
    held = sum(info.nbytes for info in artifact.infos().values())
    if total is not None and total != held:
        yield Failure(INDEX, f"total_size is {total}, but the tensors have {held} bytes")
