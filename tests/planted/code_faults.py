"""Faults in the stored bytes: codes and scales that no encoder would have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from tests.planted.artifact import Artifact
from tests.planted.edit import Entry, Tensors, editing
from tests.planted.fault import BOTH, FORGED, Fault, Names, Where, in_bases
from tests.planted.tensor_faults import Names_

FP8 = in_bases("nano-fp8-block", "nano-fp8-block-hub", "moe-fp8-block", "wide-fp8-channel",
               "wide-mixed")  # fmt: skip
WITH_BLOCKS = in_bases("nano-fp8-block", "nano-fp8-block-hub", "moe-fp8-block", "wide-mixed")
KEPT = in_bases("nano-bf16-split", "moe-bf16-split", "wide-bf16", "nano-fp8-block", "moe-mxfp4_moe",
                "wide-q4_k_m")  # fmt: skip
GGML = {
    "Q8_0": in_bases("nano-q8_0", "moe-q8_0", "nano-mmproj"),
    "Q6_K": in_bases("wide-q6_k"),
    "Q5_K": in_bases("wide-q5_k_m"),
    "Q4_K": in_bases("wide-q4_k_m", "moe-q4_k_m"),
    "IQ4_XS": in_bases("wide-iq4_xs"),
    "MXFP4": in_bases("moe-mxfp4_moe"),
}
# Where a block has its float16 scales, and one byte of scales and of codes.
SUPER = {"Q8_0": 0, "Q6_K": 208, "Q5_K": 0, "Q4_K": 0, "IQ4_XS": 0}
MINIMUM = {"Q5_K": 2, "Q4_K": 2}
SUB = {"Q6_K": 192, "Q5_K": 4, "Q4_K": 4, "IQ4_XS": 4, "MXFP4": 0}
CODES = {"Q8_0": 2, "Q6_K": 0, "Q5_K": 48, "Q4_K": 16, "IQ4_XS": 8, "MXFP4": 1}
SIZES = {"Q8_0": 34, "Q6_K": 210, "Q5_K": 176, "Q4_K": 144, "IQ4_XS": 136, "MXFP4": 17}
Blocks = NDArray[np.uint8]


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, change in CODE.items():
        yield _fault("codes", name, partial(_weight, change=change), FP8)
    for name, change in SCALE.items():
        yield _fault("scales", name, partial(_scale, change=change), FP8)
    yield _fault("scales", "neighbours-swapped", partial(_scale, change=_swap_scales), WITH_BLOCKS)
    yield _fault("scales", "of-two-weights-swapped", _swap_two, FP8)
    yield _fault("scales", "doubled-and-codes-halved", _halve_codes, FP8, (FORGED,))
    yield _fault("scales", "by-an-ulp", partial(_scale, change=_next), FP8, (FORGED,))
    yield _fault("codes", "rounded-towards-zero", _truncate, FP8)
    for name, plant in PLAIN.items():
        yield _fault("bits", name, plant, KEPT)
    for kind, where in GGML.items():
        for name, (receipts, change) in _block_faults(kind).items():
            plant = partial(_blocks, kind=kind, change=change)
            yield _fault("blocks", f"{kind.lower()}-{name}", plant, where, receipts)


def _fault(
    kind: str,
    name: str,
    plant: Callable[[Tensors], Names],
    where: Where,
    receipts: tuple[str, ...] = BOTH,
) -> Fault:
    def apply(artifact: Artifact) -> Names:
        with editing(artifact) as tensors:
            return plant(tensors)

    return Fault(kind, name, apply, where, receipts=receipts)


def _target(tensors: Tensors) -> str:
    names = Names_(tensors.artifact.base.model)
    return names.mlp("up_proj", names.full)


def _weight(tensors: Tensors, change: Callable[[Blocks], object]) -> str:
    name = _target(tensors)
    change(tensors.at(name).blocks())
    return tensors.stored(name)


def _scale(tensors: Tensors, change: Callable[[torch.Tensor], object]) -> str:
    name = _target(tensors)
    scale = tensors.scale(name)
    assert scale is not None, f"{name} is not quantised"
    change(scale.view())
    return tensors.stored(name)


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


def _swap_two(tensors: Tensors) -> Names:
    """Let gate and up have each other's scales; where they are equal, double one."""
    names = Names_(tensors.artifact.base.model)
    one, two = (tensors.scale(names.mlp(p, names.full)) for p in ("gate_proj", "up_proj"))
    assert one is not None, "gate is not quantised"
    assert two is not None, "up is not quantised"
    if np.array_equal(one.data, two.data):
        two.view().mul_(2)
        return tensors.stored(names.mlp("up_proj", names.full))
    one.data, two.data = two.data, one.data
    return tuple(tensors.stored(names.mlp(p, names.full)) for p in ("gate_proj", "up_proj"))


def _halve_codes(tensors: Tensors) -> str:
    """Write the same values with a scale twice as large: right, but not what we write."""
    name = _target(tensors)
    codes, scale = tensors.at(name).view(), tensors.scale(name)
    assert scale is not None, f"{name} is not quantised"
    codes.copy_((codes.float() / 2).to(codes.dtype))
    scale.view().mul_(2)
    return tensors.stored(name)


def _truncate(tensors: Tensors) -> str:
    """Take from every fifth code that is larger than its neighbour the step that rounding gave."""
    name = _target(tensors)
    codes = tensors.at(name).blocks()
    some = codes[:, ::5]
    some[(some & 0x7F) > 8] -= 1
    return tensors.stored(name)


def _last_bit(name: str) -> Callable[[Tensors], Names]:
    def plant(tensors: Tensors) -> str:
        entry = tensors.at(name.format(full=Names_(tensors.artifact.base.model).full))
        at = int(entry.view().float().abs().reshape(-1).argmax()) * _width(entry)
        entry.data[at] ^= 1
        return entry.info.name

    return plant


def _width(entry: Entry) -> int:
    return len(entry.data) // int(np.prod(entry.info.shape))


PLAIN: dict[str, Callable[[Tensors], Names]] = {
    "of-a-norm": _last_bit("layers.0.input_layernorm.weight"),
    "of-dt-bias": _last_bit("layers.0.linear_attn.dt_bias"),
    "of-a-conv": _last_bit("layers.0.linear_attn.conv1d.weight"),
    "of-the-delta-norm": _last_bit("layers.0.linear_attn.norm.weight"),
    "of-a-query-norm": _last_bit("{full}.self_attn.q_norm.weight"),
    "of-an-mtp-norm": _last_bit("mtp.pre_fc_norm_hidden.weight"),
}


def _blocks(tensors: Tensors, kind: str, change: Callable[[Blocks], object]) -> str:
    name = _target(tensors)
    entry = tensors.at(name)
    assert entry.info.dtype == kind, f"{name} is {entry.info.dtype}"
    change(entry.data.reshape(-1, SIZES[kind]))
    return tensors.stored(name)


def half(at: int, change: Callable[[float], float]) -> Callable[[Blocks], object]:
    """Return a change of one block's float16."""

    def apply(blocks: Blocks) -> None:
        number = blocks[7, at : at + 2].copy().view(np.float16)
        blocks[7, at : at + 2] = np.array([change(float(number[0]))], np.float16).view(np.uint8)

    return apply


def step(at: int, by: int) -> Callable[[Blocks], object]:
    """Return a change of one byte."""

    def apply(blocks: Blocks) -> None:
        blocks[7, at] = (int(blocks[7, at]) + by) % 256

    return apply


def bits(at: int, mask: int) -> Callable[[Blocks], object]:
    """Return a change of bits of one byte."""

    def apply(blocks: Blocks) -> None:
        blocks[7, at] ^= mask

    return apply


def _block_faults(
    kind: str,
) -> dict[str, tuple[tuple[str, ...], Callable[[Blocks], object]]]:
    """Return faults of one type's blocks."""
    codes = CODES[kind]
    found: dict[str, tuple[tuple[str, ...], Callable[[Blocks], object]]] = {
        "a-code-turned": (BOTH, bits(codes + 3, 0x80 if kind == "Q8_0" else 0x08)),
        "a-high-code-turned": (BOTH, bits(codes + 5, 0x40)),
        "a-block-copied": (BOTH, lambda blocks: blocks.__setitem__(7, blocks[8])),
        "two-blocks-swapped": (BOTH, lambda blocks: blocks.__setitem__([7, 8], blocks[[8, 7]])),
        "a-block-zeroed": (BOTH, lambda blocks: blocks.__setitem__(7, 0)),
        "codes-of-the-neighbour": (BOTH, lambda b: b[7, codes:].__setitem__(
            slice(0, 16), b[8, codes : codes + 16])),
        "a-code-by-one": (BOTH, step(codes + 4, 1)),
    }  # fmt: skip
    if kind in SUPER:
        at = SUPER[kind]
        found |= {
            "scale-three-per-cent-more": (BOTH, half(at, lambda d: 1.03 * d)),
            "scale-doubled": (BOTH, half(at, lambda d: 2 * d)),
            "scale-negative": (BOTH, half(at, lambda d: -d)),
            "scale-nan": (BOTH, half(at, lambda _: float("nan"))),
            "scale-infinite": (BOTH, half(at, lambda _: float("inf"))),
            "scale-by-an-ulp": ((FORGED,), step(at, 1)),
        }
    if kind in MINIMUM:
        found["minimum-doubled"] = (BOTH, half(MINIMUM[kind], lambda m: 2 * m))
        found["minimum-lost"] = (BOTH, half(MINIMUM[kind], lambda _: 0.0))
    if kind in SUB:
        found["sub-scale-by-a-step"] = ((FORGED,), step(SUB[kind] + (kind == "Q6_K"), 1))
        found["sub-scale-by-many-steps"] = (BOTH, bits(SUB[kind] + 1 if kind != "MXFP4" else 0,
                                                      0x18 if kind != "MXFP4" else 0x02))  # fmt: skip
    return found
