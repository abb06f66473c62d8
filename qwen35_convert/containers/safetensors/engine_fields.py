"""The fields of quantization_config that engines act on, held against what is stored.

    fp8                 fmt, activation_scheme, weight_block_size, scale_fmt
    compressed-tensors  config_groups: which group an engine takes for a module, and what that says
                        of its weights and its inputs

Sources: vLLM's `Fp8Config` and `CompressedTensorsConfig` at 0.33, transformers'
`FineGrainedFP8Config` at 5.24, compressed-tensors' `QuantizationArgs` at 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.ops import Unstack
from quant.stored import scheme_of
from qwen35_convert.containers.safetensors.quantization_config import module_of
from qwen35_convert.failure import Failure

CONFIG = "config.json"
FORMATS = (None, "float-quantized")
# What a field means where it is absent.
ABSENT = {"symmetric": True, "dynamic": False, "num_bits": 8, "type": "int"}


def field_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the fields that an engine would take for something else than what is stored."""
    yield from _stacked_experts(artifact)
    block = artifact.config.quantization or {}
    if block.get("quant_method") == "fp8":
        yield from _official_fields(artifact, block)
    elif block.get("quant_method") == "compressed-tensors":
        yield from _group_fields(artifact, block)


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


def _official_fields(artifact: Checkpoint, block: Mapping[str, Any]) -> Iterator[Failure]:
    fmt, activations = block.get("fmt", "e4m3"), block.get("activation_scheme", "dynamic")
    if fmt != "e4m3":
        yield Failure(CONFIG, f"quantization_config: fmt is {fmt!r}, but E4M3 codes are stored")
    if activations != "dynamic":
        problem = f"activation_scheme is {activations!r}, but no scales of inputs are stored"
        yield Failure(CONFIG, f"quantization_config: {problem}, expected 'dynamic'")
    yield from _scale_format(artifact, block.get("scale_fmt"))
    forms = {atom.scheme: scheme_of(atom) for atom in _quantized(artifact).values()}
    size = block.get("weight_block_size")
    for name, form in forms.items():
        official = form.config_block([])
        expected = official["weight_block_size"] if official else None
        if expected is None and name in ("fp8-tensor", "fp8-scalar") and size is None:
            continue
        if expected is None or size != expected:
            problem = f"weight_block_size is {size}, but {name} is stored"
            yield Failure(CONFIG, f"quantization_config: {problem}")


def _scale_format(artifact: Checkpoint, said: object) -> Iterator[Failure]:
    """UE8M0 is a power of two: engines drop the mantissa of any other scale."""
    if said in (None, "float"):
        return
    if said != "ue8m0":
        problem = f"scale_fmt is {said!r}, expected 'float' or 'ue8m0'"
        yield Failure(CONFIG, f"quantization_config: {problem}")
        return
    for atom in _quantized(artifact).values():
        for part in atom.parts[1:]:
            scale = artifact.load(part, artifact.read(part), ...).float()
            if bool((scale.frexp().mantissa != 0.5).any()):
                yield Failure(part, "is no power of two, but scale_fmt in config.json is ue8m0")
                return


def _group_fields(artifact: Checkpoint, block: Mapping[str, Any]) -> Iterator[Failure]:
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        yield Failure(CONFIG, "quantization_config: config_groups is missing")
        return
    seen = set()
    for module, atom in _quantized(artifact).items():
        name = _group_of(module, groups)
        if name is None:
            yield Failure(module, f"is {atom.scheme}, but no group of config_groups targets it")
        elif (name, atom.scheme) not in seen:
            seen.add((name, atom.scheme))
            for problem in _odd_fields(groups[name], atom):
                yield Failure(CONFIG, f"config_groups {name}: {problem}, as {module}")


def _quantized(artifact: Checkpoint) -> dict[str, Atom]:
    atoms = artifact.layout.atoms.values()
    return {module_of(atom.weight): atom for atom in atoms if atom.quantized}


def _group_of(module: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the group an engine takes: by the module's name, then by a pattern, then by class."""
    listed = [(t, name) for name, group in groups.items() for t in group.get("targets") or ()]
    exact = (name for target, name in listed if target == module)
    patterns = (
        name
        for target, name in listed
        if target.startswith("re:") and re.match(target.removeprefix("re:"), module)
    )
    classes = (name for target, name in listed if target == "Linear")
    return next((name for way in (exact, patterns, classes) for name in way), None)


def _odd_fields(group: Mapping[str, Any], atom: Atom) -> Iterator[str]:
    """Yield what a group says of weights or inputs that is not so."""
    expected = scheme_of(atom).config_entry([])
    if expected is None:
        yield f"compressed-tensors has no {atom.scheme}, but it is stored"
        return
    if expected.get("format") and group.get("format") not in (None, expected["format"]):
        yield f"format is {group['format']!r}, but {expected['format']} is stored"
    said = group.get("weights") or {}
    for field, value in expected["weights"].items():
        if said.get(field, ABSENT.get(field)) != value:
            yield f"{field} of weights is {said.get(field)!r}, but {value!r} is stored"
    inputs = group.get("input_activations")
    if inputs and inputs.get("dynamic") is not True:
        yield "input_activations are static, but no scales of inputs are stored"
