"""Faults in four bits and INT8: codes, scales, what stands beside them, and their config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.planted.artifact import Base
from tests.planted.edit import Tensors
from tests.planted.fault import AS_IT_IS, STRUCTURE, UNOPENED, Fault, Names, Where
from tests.planted.group_faults import groups
from tests.planted.quantization_faults import Change, block_fault, entries, put
from tests.planted.tensor_fault import Plant, tensor_fault

GATE, UP = "{last}gate_proj.weight", "{last}up_proj.weight"
NVFP4, INT4 = ("nvfp4a16", "nvfp4-mixed"), ("int4-g32",)
FP4 = (*NVFP4, "mxfp4a16")
PACKED = (*FP4, *INT4)
ALL = (*PACKED, "int8")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for outputs, table in CODES:
        for name, how in table.items():
            yield tensor_fault("four bits: codes", name, _codes(how), where(*outputs))
    for outputs, table in SCALES:
        for name, how in table.items():
            yield tensor_fault("four bits: scales", name, _part("_scale", how), where(*outputs))
    for name, how in WHOLE.items():
        plant = _part("_global_scale", how)
        yield tensor_fault("four bits: scales", name, plant, where(*NVFP4))
    for name, (outputs, plant) in MORE.items():
        yield tensor_fault("four bits: scales", name, plant, where(*outputs))
    yield from _of_headers()
    yield tensor_fault(
        "four bits: parts", "saved-again-beside-its-receipt", _save_again, where(*ALL),
        receipts=(AS_IT_IS,),
    )  # fmt: skip


def _of_headers() -> Iterator[Fault]:
    """Yield what is lost, and what the config says otherwise."""
    for name, (outputs, plant) in LOST.items():
        more = {"level": STRUCTURE, "codes": UNOPENED}
        yield tensor_fault("four bits: parts", name, plant, where(*outputs), **more)
    for name, (outputs, wanted, change) in CONFIG.items():
        yield block_fault(f"4-{name}", wanted, change, where(*outputs), codes=UNOPENED)


def where(*outputs: str) -> Where:
    """Return whether a base is one of these outputs."""

    def applies(base: Base) -> bool:
        return base.output in outputs

    return applies


def words(tensors: Tensors, hub: str = UP) -> torch.Tensor:
    """Return the stored codes, to be changed in place: words, bytes, or whole numbers."""
    names, base = set(tensors.names()), tensors.stored(hub)
    packed = base + "_packed"
    return tensors.entry(packed if packed in names else base).view()


def _codes(how: Callable[[torch.Tensor], object]) -> Plant:
    def plant(tensors: Tensors) -> str:
        how(words(tensors))
        return tensors.stored(UP)

    return plant


def _part(part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Return a fault that changes a part's values."""

    def plant(tensors: Tensors) -> str:
        view = tensors.entry(tensors.stored(UP) + part).view()
        view.copy_(how(view.float()).to(view.dtype))
        return tensors.stored(UP)

    return plant


def _swap_nibbles(codes: torch.Tensor) -> None:
    view = codes.view(torch.uint8)
    view.copy_((view >> 4) | (view << 4))


def _swap_rows(codes: torch.Tensor) -> None:
    codes[[3, 4]] = codes[[4, 3]]


def _other_bit(codes: torch.Tensor) -> None:
    codes.view(torch.uint8).view(-1)[::8] ^= 4


CODES: tuple[tuple[tuple[str, ...], dict[str, Callable[[torch.Tensor], object]]], ...] = (
    (
        ALL,
        {
            "words-off-by-one": lambda codes: codes.copy_(codes.roll(1, 1)),
            "rows-off-by-one": lambda codes: codes.copy_(codes.roll(1, 0)),
            "two-rows-swapped": _swap_rows,
            "zeroed": lambda codes: codes.zero_(),
            "a-row-zeroed": lambda codes: codes[5].zero_(),
        },
    ),
    (PACKED, {"nibbles-swapped": _swap_nibbles, "a-bit-of-some": _other_bit}),
)


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change of the first row's first scale."""

    def change(scale: torch.Tensor) -> torch.Tensor:
        scale = scale.clone()
        scale[0, 0] = value
        return scale

    return change


SCALES: tuple[tuple[tuple[str, ...], dict[str, Callable[[torch.Tensor], torch.Tensor]]], ...] = (
    (PACKED, {"shifted-by-a-group": lambda s: s.roll(1, 1)}),
    (ALL, {"shifted-by-a-row": lambda s: s.roll(1, 0), "a-zero": first(0)}),
    (("mxfp4a16",), {"doubled": lambda s: s + 1, "halved": lambda s: s - 1, "nan": first(255)}),
    (
        (*NVFP4, *INT4, "int8"),
        {
            "negative": lambda s: -s,
            "one-negative": first(-1),
            "halved": lambda s: s / 2,
            "nan": first(float("nan")),
            "all-ones": torch.ones_like,
        },
    ),
)
WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "global-inverted": torch.reciprocal,
    "global-zero": torch.zeros_like,
    "global-nan": lambda s: s * torch.nan,
    "global-negative": lambda s: -s,
    "global-doubled": lambda s: s * 2,
    "global-never-written": lambda s: torch.full_like(s, 1.4e-45),
}


def _unequal(tensors: Tensors) -> str:
    """Give up a global scale of its own, and block scales that make the same values."""
    scale = tensors.entry(tensors.stored(UP) + "_scale").view()
    scale.copy_((scale.float() / 2).to(scale.dtype))
    tensors.entry(tensors.stored(UP) + "_global_scale").view().mul_(0.5)
    return "_global_scale"


def _swap_scales(tensors: Tensors) -> Names:
    one, two = (tensors.entry(tensors.stored(hub) + "_scale") for hub in (GATE, UP))
    one.data, two.data = two.data, one.data
    return tensors.stored(GATE), tensors.stored(UP)


def _zero_point(tensors: Tensors) -> str:
    tensors.entry(tensors.stored(UP) + "_zero_point").view()[2] ^= 0x11
    return tensors.stored(UP)


def _wrong_shape(tensors: Tensors) -> str:
    shape = tensors.entry(tensors.stored(UP) + "_shape").view()
    shape.copy_(shape.flip(0))
    return tensors.stored(UP)


MORE: dict[str, tuple[tuple[str, ...], Plant]] = {
    "global-of-its-own": (NVFP4, _unequal),
    "of-gate-and-up-swapped": (PACKED, _swap_scales),
    "zero-points-off-by-one": (INT4, _zero_point),
    "shape-wrong": (INT4, _wrong_shape),
}


def _lose(*parts: str) -> Plant:
    def plant(tensors: Tensors) -> str:
        for part in parts:
            name = tensors.stored(UP) + part
            del tensors.home(name).entries[name]
        return tensors.stored(UP).removesuffix(".weight")

    return plant


def _save_again(tensors: Tensors) -> str:
    """Store tensors by name; the receipt is that of the file before."""
    for file in tensors.files:
        file.entries = dict(sorted(file.entries.items(), reverse=True))
    return "model.safetensors"


LOST: dict[str, tuple[tuple[str, ...], Plant]] = {
    "scales-missing": (ALL, _lose("_scale")),
    "codes-missing": (PACKED, _lose("_packed")),
    "global-missing": (NVFP4, _lose("_global_scale")),
    "zero-points-missing": (INT4, _lose("_zero_point")),
    "shape-missing": (INT4, _lose("_shape")),
    "a-weight-missing": (NVFP4, _lose("_packed", "_scale", "_global_scale")),
}


def _without_mtp(block: dict[str, Any]) -> None:
    entries(block)[:] = [entry for entry in entries(block) if not entry.startswith("mtp.")]


def _linear_for_all(block: dict[str, Any]) -> None:
    """Let a class catch every linear, and nothing be left out."""
    groups("", "targets", ["Linear"])(block)
    entries(block).clear()


# name: (outputs, what must be named, change)
CONFIG: dict[str, tuple[tuple[str, ...], str, Change]] = {
    "bits": (ALL, "num_bits", groups("weights", "num_bits", 3)),
    "group-of-64": (PACKED, "group_size", groups("weights", "group_size", 64)),
    "group-missing": (INT4, "group_size", groups("weights", "group_size", None)),
    "strategy-channel": (PACKED, "strategy", groups("weights", "strategy", "channel")),
    "strategy-tensor": (("int8",), "strategy", groups("weights", "strategy", "tensor")),
    "symmetric": (INT4, "symmetric", groups("weights", "symmetric", True)),
    "not-symmetric": ((*FP4, "int8"), "symmetric", groups("weights", "symmetric", False)),
    "type": (("nvfp4a16", "mxfp4a16"), "type", groups("weights", "type", "int")),
    "format": (ALL, "format", groups("", "format", "float-quantized")),
    "format-of-all": (("nvfp4a16", "int4-g32"), "format", put("format", "marlin-24")),
    "scales-in-uint8": (
        ("nvfp4a16",),
        "scale_dtype",
        groups("weights", "scale_dtype", "torch.uint8"),
    ),
    "inputs-in-four-bits": (
        ("nvfp4a16", "int4-g32"),
        "input_activations",
        groups("", "input_activations", {"num_bits": 4, "type": "float", "dynamic": False}),
    ),
    "reordered": (INT4, "actorder", groups("weights", "actorder", "group")),
    "list-without-mtp": (ALL, "mtp", _without_mtp),
    "linear-and-no-list": (ALL, "targets|in_proj_a", _linear_for_all),
    "targets-linear-beside-others": (
        ("nvfp4-mixed",),
        "targets|config_groups",
        groups("", "targets", ["Linear"]),
    ),
}
