"""The fields of quantization_config that engines act on, held against what is stored.

    fp8                 fmt, activation_scheme, weight_block_size, scale_fmt
    compressed-tensors  config_groups: which group an engine takes for a module, and what that says
                        of its weights and its inputs (`group_fields`)
    modelopt            quant_algo, quantized_layers (`modelopt_fields`)

What each field may say by itself is a table (`quantization_table`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import FIELD
from formats.family.layout import Atom
from formats.family.moves import Unstack
from formats.quant_methods import COMPRESSED, FP8, MODELOPT
from formats.safetensors.methods import BLOCK
from formats.side_names import CONFIG
from quant.stored import scheme_of
from qwen35_convert.containers.safetensors.activation_scales import (
    has_cache_scales,
    input_scales,
    stray_scales,
)
from qwen35_convert.containers.safetensors.group_fields import group_problems, static_modules
from qwen35_convert.containers.safetensors.modelopt_fields import file_problems, modelopt_problems
from qwen35_convert.containers.safetensors.quantization_config import module_of
from qwen35_convert.containers.safetensors.quantization_table import (
    ACTIVATIONS,
    ARGS_RECORDS,
    CACHE_FIELDS,
    FIELDS,
    JUDGED,
    LISTS,
    MODELOPT_CACHE_FIELDS,
    NEEDED,
    RECORD_TYPES,
    RECORDS,
    Row,
    odd_rows,
)
from qwen35_convert.difference import differences, first
from qwen35_convert.failure import Failure

PER_TENSOR = ("fp8-tensor",)
# By method: what the scheme of a cache may say.
CACHES = {COMPRESSED: CACHE_FIELDS, MODELOPT: CACHE_FIELDS | MODELOPT_CACHE_FIELDS}


def field_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the fields that an engine would take for something else than what is stored."""
    yield from _stacked_experts(artifact)
    yield from _wide_codes(artifact)
    for sentence in _two_blocks(artifact):
        yield Failure(CONFIG, sentence)
    block = artifact.config.quantization or {}
    method = block.get("quant_method")
    for problem in _problems(artifact, block, method):
        yield Failure(CONFIG, f"{BLOCK}: {problem}")
    for problem in _cache_scheme(block.get(FIELD), CACHES.get(str(method))):
        yield Failure(CONFIG, f"{BLOCK}: {FIELD}: {problem}")
    if method == FP8:
        yield from _scale_format(artifact, block.get("scale_fmt", "float"))
    elif method == COMPRESSED:
        yield from group_problems(block, _quantized(artifact), input_scales(artifact))
    elif method == MODELOPT:
        yield from modelopt_problems(block, _quantized(artifact), input_scales(artifact))
        yield from file_problems(artifact, block)
    yield from stray_scales(artifact, _static(artifact, block))


def _static(artifact: Checkpoint, block: Mapping[str, Any]) -> Collection[str]:
    """Return the quantised modules whose inputs have static scales by the config."""
    modules = _quantized(artifact)
    if block.get("quant_method") == COMPRESSED:
        return static_modules(block, modules)
    static = block.get("quant_method") == MODELOPT or block.get("activation_scheme") == "static"
    return modules if static else ()


def _wide_codes(artifact: Checkpoint) -> Iterator[Failure]:
    for atom in _quantized(artifact).values():
        if artifact.infos()[atom.stored].dtype == "F8_E5M2":
            yield Failure(atom.stored, "has E5M2 codes, which no engine loads, expected E4M3")


def _stacked_experts(artifact: Checkpoint) -> Iterator[Failure]:
    """Engines take the codes of a stack of experts for values (measured: a KL of 5.4)."""
    stacks = dict.fromkeys(
        atom.stored
        for atom in artifact.layout.atoms.values()
        if atom.quantized and any(isinstance(op, Unstack) for op in atom.ops)
    )
    for stored in stacks:
        problem = "is a stack of quantised experts: transformers takes its codes for values"
        yield Failure(stored, f"{problem}, expected one tensor for each expert")


def _two_blocks(artifact: Checkpoint) -> Iterator[str]:
    """Engines differ in which they read, the one at the root or the one of the text part."""
    config = artifact.config
    root, text = config.raw.get(BLOCK), config.text.get(BLOCK)
    if root is not None and text is not None:
        yield from first(differences(text, root, f"text_config.{BLOCK}"))


def _problems(artifact: Checkpoint, block: Mapping[str, Any], method: str | None) -> Iterator[str]:
    if method not in FIELDS:
        return
    skipped = RECORDS | JUDGED[method] | frozenset(LISTS[method])
    yield from odd_rows(block, FIELDS[method], skipped)
    for field, (types, expected) in RECORD_TYPES.items():
        if type(block.get(field)) not in types:
            yield f"{field} is {block[field]!r:.80}, expected {expected}"
    for field in NEEDED.get(method, ()):
        if block.get(field) is None:
            yield f"{field} is absent, {FIELDS[method][field][1]}"
    if method in ACTIVATIONS:
        yield from _activations(artifact, block, method)
    if method == FP8:
        forms = {atom.scheme: atom for atom in _quantized(artifact).values()}
        yield from _block_size(block.get("weight_block_size"), forms.values())


def _activations(artifact: Checkpoint, block: Mapping[str, Any], method: str) -> Iterator[str]:
    """Yield a promise of static scales, of inputs or of the cache, that are not stored."""
    field, right, why = ACTIVATIONS[method]
    got, quantized = block.get(field, right), _quantized(artifact).keys()
    there = quantized <= input_scales(artifact) if method == FP8 else has_cache_scales(artifact)
    if got != right and not (there and (got == "static" or method != FP8)):
        lost = sorted(quantized - input_scales(artifact)) if method == FP8 else []
        yield f"{field} is {got!r:.120}, {why}" + (f": {lost[0]} has none" if lost else "")


def _cache_scheme(scheme: object, fields: Mapping[str, Row] | None) -> Iterator[str]:
    """Yield the fields of a quantised cache that engines do not take; None: they read none."""
    if fields is None:
        return
    if isinstance(scheme, dict):
        yield from odd_rows(scheme, fields, ARGS_RECORDS)
    elif scheme is not None:
        yield f"is {scheme!r:.120}, expected an object or null"


def _block_size(size: object, forms: Collection[Atom]) -> Iterator[str]:
    """One scale for a tensor needs no block; other scales are those of the official block."""
    for atom in forms:
        official = scheme_of(atom).config_block([])
        expected = official["weight_block_size"] if official else None
        if official is None and atom.scheme not in PER_TENSOR:
            problem = f"quant_method is 'fp8', but {atom.parts[1]} is a scale of {atom.scheme}"
            yield f"{problem}, expected 'compressed-tensors'"
        elif size != expected:
            yield f"weight_block_size is {size}, but {atom.scheme} is stored, expected {expected}"


def _scale_format(artifact: Checkpoint, said: object) -> Iterator[Failure]:
    """UE8M0 is a power of two: engines drop the mantissa of any other scale."""
    if said == "float":
        return
    if said != "ue8m0":
        problem = f"scale_fmt is {said!r}, expected 'float' or 'ue8m0'"
        yield Failure(CONFIG, f"{BLOCK}: {problem}")
        return
    for atom in _quantized(artifact).values():
        for part in atom.parts[1:]:
            scale = artifact.load(part, artifact.read(part), ...).float()
            if bool((scale.frexp().mantissa != 0.5).any()):
                yield Failure(part, "is not a power of two, but scale_fmt in config.json is ue8m0")
                return


def _quantized(artifact: Checkpoint) -> dict[str, Atom]:
    atoms = artifact.layout.atoms.values()
    return {module_of(atom.weight): atom for atom in atoms if atom.quantized}
