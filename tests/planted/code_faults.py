"""Faults in the stored bytes: codes and scales that no encoder would have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from tests.planted.edit import Entry, Tensors
from tests.planted.fault import FORGED, Fault, Names, in_bases
from tests.planted.tensor_fault import Plant, tensor_fault

FP8 = in_bases(
    "nano-fp8-block", "nano-fp8-block-hub", "moe-fp8-block", "wide-fp8-channel", "wide-mixed"
)
WITH_BLOCKS = in_bases("nano-fp8-block", "nano-fp8-block-hub", "moe-fp8-block", "wide-mixed")
SQUARE = in_bases("wide-fp8-block", "moe-fp8-block")
KEPT = in_bases(
    "nano-bf16-split",
    "moe-bf16-split",
    "wide-bf16",
    "nano-fp8-block",
    "moe-mxfp4_moe",
    "wide-q4_k_m",
)
UP, GATE = "{last}up_proj.weight", "{last}gate_proj.weight"
Blocks = NDArray[np.uint8]


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, change in CODE.items():
        yield tensor_fault("codes", name, partial(_weight, change=change), FP8)
    for name, change in SCALE.items():
        yield tensor_fault("scales", name, partial(_scale, change=change), FP8)
    neighbours = partial(_scale, change=_swap_scales)
    yield tensor_fault("scales", "neighbours-swapped", neighbours, WITH_BLOCKS)
    yield tensor_fault("scales", "transposed", _transpose, SQUARE)
    yield tensor_fault("scales", "of-two-weights-swapped", _swap_two, FP8)
    yield tensor_fault("scales", "doubled-and-codes-halved", _halve_codes, FP8, receipts=(FORGED,))
    yield tensor_fault(
        "scales", "by-an-ulp", partial(_scale, change=_next), FP8, receipts=(FORGED,)
    )
    yield tensor_fault("codes", "rounded-towards-zero", _truncate, FP8)
    for name, plant in PLAIN.items():
        yield tensor_fault("bits", name, plant, KEPT)


def _weight(tensors: Tensors, change: Callable[[Blocks], object]) -> str:
    change(tensors.at(UP).blocks())
    return tensors.stored(UP)


def _scale(tensors: Tensors, change: Callable[[torch.Tensor], object]) -> str:
    change(tensors.scale(UP).view())
    return tensors.stored(UP)


def flip(bit: int) -> Callable[[Blocks], object]:
    """Return a change of one bit of one code that is not small."""

    def change(codes: Blocks) -> None:
        at = int((codes & 0x78).reshape(-1).argmax())
        codes.reshape(-1)[at] ^= 1 << bit

    return change


def put(row: int, column: int, value: int) -> Callable[[Blocks], object]:
    """Return a change of one code."""

    def change(codes: Blocks) -> None:
        codes[row, column] = value

    return change


def _swap_codes(codes: Blocks) -> None:
    codes[[3, 4]] = codes[[4, 3]]


def _copy_block(codes: Blocks) -> None:
    codes[:128, :128] = codes[128:256, :128]


def _shift_codes(codes: Blocks) -> None:
    codes[5] = np.roll(codes[5], 1)


CODE: dict[str, Callable[[Blocks], object]] = {
    "last-bit": flip(0),
    "middle-bit": flip(2),
    "exponent-bit": flip(3),
    "sign-bit": flip(7),
    "nan": put(2, 3, 0x7F),
    "negative-nan": put(2, 3, 0xFF),
    "largest": put(2, 3, 0x7E),
    "two-rows-swapped": _swap_codes,
    "a-block-copied": _copy_block,
    "a-row-shifted": _shift_codes,
}


def times(factor: float) -> Callable[[torch.Tensor], object]:
    """Return a change of all scales."""
    return lambda scale: scale.mul_(factor)


def first(value: float) -> Callable[[torch.Tensor], object]:
    """Return a change of one scale."""
    return lambda scale: scale.view(-1)[:1].fill_(value)


def _swap_scales(scale: torch.Tensor) -> None:
    """Swap two scales that differ; where all are alike, let one differ first."""
    flat = scale.view(-1)
    other = next((i for i in range(1, len(flat)) if flat[i] != flat[0]), None)
    if other is None:
        flat[0] *= 2
    else:
        flat[0], flat[other] = flat[other].clone(), flat[0].clone()


def _next(scale: torch.Tensor) -> None:
    bits = torch.int16 if scale.dtype == torch.bfloat16 else torch.int32
    scale.view(bits).view(-1)[0] += 1


SCALE: dict[str, Callable[[torch.Tensor], object]] = {
    "three-per-cent-more": times(1.03),
    "doubled": times(2),
    "halved": times(0.5),
    "one-doubled": lambda scale: scale.view(-1)[:1].mul_(2),
    "one-three-per-cent-less": lambda scale: scale.view(-1)[-1:].mul_(0.97),
    "inverted": lambda scale: scale.reciprocal_(),
    "all-ones": lambda scale: scale.fill_(1),
    "zero": first(0),
    "negative": first(-1),
    "nan": first(float("nan")),
    "infinite": first(float("inf")),
}


def _transpose(tensors: Tensors) -> str:
    """Let a square weight have its scales along the wrong axis; where equal, let them differ."""
    hub = "{full}.self_attn.o_proj.weight"
    scale = tensors.scale(hub).view()
    if torch.equal(scale, scale.T):
        scale[0, 1] *= 2
    else:
        scale.copy_(scale.T.clone())
    return tensors.stored(hub)


def _swap_two(tensors: Tensors) -> Names:
    """Let gate and up have each other's scales; where they are equal, double one."""
    one, two = tensors.scale(GATE), tensors.scale(UP)
    if np.array_equal(one.data, two.data):
        two.view().mul_(2)
        return tensors.stored(UP)
    one.data, two.data = two.data, one.data
    return tensors.stored(GATE), tensors.stored(UP)


def _halve_codes(tensors: Tensors) -> str:
    """Write the same values with a scale twice as large: right, but not what we write."""
    codes = tensors.at(UP).view()
    codes.copy_((codes.float() / 2).to(codes.dtype))
    tensors.scale(UP).view().mul_(2)
    return tensors.stored(UP)


def _truncate(tensors: Tensors) -> str:
    """Take one step from every fifth code, as rounding towards zero does from every second."""
    some = tensors.at(UP).blocks()[:, ::5]
    some[(some & 0x7F) > 8] -= 1
    return tensors.stored(UP)


def _last_bit(name: str) -> Plant:
    def plant(tensors: Tensors) -> str:
        entry = tensors.at(name)
        at = int(entry.view().float().abs().reshape(-1).argmax()) * _width(entry)
        entry.data[at] ^= 1
        return entry.info.name

    return plant


def _width(entry: Entry) -> int:
    return len(entry.data) // int(np.prod(entry.info.shape))


PLAIN: dict[str, Plant] = {
    "of-a-norm": _last_bit("layers.0.input_layernorm.weight"),
    "of-dt-bias": _last_bit("{delta}dt_bias"),
    "of-a-conv": _last_bit("{delta}conv1d.weight"),
    "of-the-delta-norm": _last_bit("{delta}norm.weight"),
    "of-a-query-norm": _last_bit("{full}.self_attn.q_norm.weight"),
    "of-an-mtp-norm": _last_bit("mtp.pre_fc_norm_hidden.weight"),
}
