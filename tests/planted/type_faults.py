"""Faults that headers show: a tensor of another type or shape than its reader takes it for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.planted.edit import Entry, Tensors
from tests.planted.fault import ALONE, FORGED, STRUCTURE, TENSORS, Fault, Where
from tests.planted.header_faults import FILES, FOLDERS, FP8, HOMES, UP, fault
from tests.planted.tensor_fault import Plant, tensor_fault


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, plant in TYPES.items():
        yield fault(f"type-{name}", plant, FOLDERS)
    for name, plant in SCALES.items():
        yield fault(f"type-{name}", plant, FP8)
    for name, plant in TYPES_OF_FILES.items():
        yield fault(f"type-{name}", plant, FILES)
    for name, plant in SHAPES.items():
        yield fault(f"shape-{name}", plant, HOMES)
    for name, dtype in (("scale-in-f16", torch.float16), ("scale-in-f32", torch.float32)):
        yield fault(f"type-{name}", _scale_in(dtype), FP8, receipts=(FORGED,))
    yield fault("type-scale-called-f16", _call_scale_f16, FP8, TENSORS)
    for name, plant in MIXED.items():
        yield alone(name, plant, FOLDERS)
    yield alone("scale-called-f16", _call_one_scale_f16, FP8)
    yield fault("a-linear-left-in-bf16", _dequantise, FP8)


def alone(name: str, plant: Plant, where: Where) -> Fault:
    """Return a fault that shows without a source: most tensors are of another type."""
    return tensor_fault("types, alone", name, plant, where, level=STRUCTURE, receipts=(ALONE,))


def _recast(hub: str, dtype: torch.dtype) -> Plant:
    """Return a fault that stores a plain tensor in another type."""

    def plant(tensors: Tensors) -> str:
        one = tensors.at(hub)
        one.put(one.view().float().to(dtype))
        return one.info.name

    return plant


def _relabel(pick: Callable[[Tensors], Entry], dtype: str) -> Plant:
    """Return a fault that says another type of the same bytes."""

    def plant(tensors: Tensors) -> str:
        one = pick(tensors)
        one.info = replace(one.info, dtype=dtype)
        return one.info.name

    return plant


def _call_scale_f16(tensors: Tensors) -> str:
    scale = tensors.scale(UP)
    scale.info = replace(scale.info, dtype="F16")
    return tensors.stored(UP)


def _call_one_scale_f16(tensors: Tensors) -> str:
    scale = tensors.scale(UP)
    scale.info = replace(scale.info, dtype="F16")
    return f"{scale.info.name} is F16, but most"


def _scale_in(dtype: torch.dtype) -> Plant:
    def plant(tensors: Tensors) -> str:
        scale = tensors.scale(UP)
        scale.put(scale.view().to(dtype))
        return scale.info.name.rsplit(".", 1)[0]

    return plant


TYPES: dict[str, Plant] = {
    "decay-in-bf16": _recast("layers.0.linear_attn.A_log", torch.bfloat16),
    "delta-norm-in-bf16": _recast("layers.0.linear_attn.norm.weight", torch.bfloat16),
    "norm-in-f16": _recast("layers.0.input_layernorm.weight", torch.float16),
    "embedding-in-f16": _recast("embed_tokens.weight", torch.float16),
    "conv-in-f16": _recast("layers.0.linear_attn.conv1d.weight", torch.float16),
    "bf16-bits-called-f16": _relabel(
        lambda t: t.at("layers.0.linear_attn.in_proj_a.weight"), "F16"
    ),
    "norm-in-f64": _recast("norm.weight", torch.float64),
    "head-of-mtp-in-f16": _recast("mtp.fc.weight", torch.float16),
    "bf16-bits-called-integers": _relabel(lambda t: t.at("norm.weight"), "I16"),
}
# What headers alone show, as most tensors are of another type.
MIXED: dict[str, Plant] = {
    name: TYPES[name]
    for name in (
        "norm-in-f16",
        "embedding-in-f16",
        "conv-in-f16",
        "bf16-bits-called-f16",
        "head-of-mtp-in-f16",
    )
}
SCALES: dict[str, Plant] = {
    "codes-called-integers": _relabel(lambda t: t.at(UP), "I8"),
    "codes-called-bytes": _relabel(lambda t: t.at(UP), "U8"),
    "codes-called-e5m2": _relabel(lambda t: t.at(UP), "F8_E5M2"),
    "scale-in-f64": _scale_in(torch.float64),
}
TYPES_OF_FILES: dict[str, Plant] = {
    "norm-in-f16": _recast("layers.0.input_layernorm.weight", torch.float16),
    "norm-in-bf16": _recast("layers.1.input_layernorm.weight", torch.bfloat16),
    "conv-in-f16": _recast("layers.0.linear_attn.conv1d.weight", torch.float16),
    "decay-in-bf16": _recast("layers.0.linear_attn.A_log", torch.bfloat16),
}


def _reshape(hub: str) -> Plant:
    """Return a fault that says the shape of a matrix the other way round, or flattens it."""

    def plant(tensors: Tensors) -> str:
        one = tensors.at(hub)
        shape = one.info.shape
        one.info = replace(one.info, shape=(*shape[:-2], shape[-1], shape[-2]))
        return one.info.name

    return plant


def _flat(hub: str) -> Plant:
    """Return a fault that says a vector is a matrix of one row."""

    def plant(tensors: Tensors) -> str:
        one = tensors.at(hub)
        one.info = replace(one.info, shape=(1, *one.info.shape))
        return one.info.name

    return plant


def _shorter(hub: str) -> Plant:
    """Return a fault that loses the second half of a tensor's rows."""

    def plant(tensors: Tensors) -> str:
        one = tensors.at(hub)
        rows = one.info.shape[0] // 2
        one.info = replace(one.info, shape=(rows, *one.info.shape[1:]))
        one.data = one.data[: len(one.data) // 2]
        return f"{one.info.name}|the embedding has" if "embed" in hub else one.info.name

    return plant


SHAPES: dict[str, Plant] = {
    "of-a-matrix-turned": _reshape("layers.0.linear_attn.in_proj_b.weight"),
    "of-dt-bias-a-row": _flat("layers.0.linear_attn.dt_bias"),
    "of-a-conv-turned": _reshape("layers.0.linear_attn.conv1d.weight"),
    "of-a-norm-halved": _shorter("layers.0.input_layernorm.weight"),
    "of-the-embedding-halved": _shorter("embed_tokens.weight"),
    "of-the-decay-halved": _shorter("layers.0.linear_attn.A_log"),
}


def _dequantise(tensors: Tensors) -> str:
    """Store one weight as it was; the list of unquantised modules does not name it."""
    name = UP
    one, scale, values = tensors.at(name), tensors.scale(name), tensors.values(name)
    del tensors.home(scale.info.name).entries[scale.info.name]
    one.put(values.to(torch.bfloat16))
    return one.info.name.removesuffix(".weight")
