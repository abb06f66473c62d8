"""Faults in the blocks of ggml's types: a code, a scale of a block or of a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from tests.planted.code_faults import UP, Blocks
from tests.planted.edit import Tensors
from tests.planted.fault import FORGED, Fault, Where, in_bases
from tests.planted.tensor_fault import tensor_fault

Change = Callable[[Blocks], object]
GGML = {
    "Q8_0": in_bases("nano-q8_0", "moe-q8_0", "nano-mmproj"),
    "Q6_K": in_bases("wide-q6_k"),
    "Q5_K": in_bases("wide-q5_k_m"),
    "Q4_K": in_bases("wide-q4_k_m", "moe-q4_k_m"),
    "IQ4_XS": in_bases("wide-iq4_xs"),
    "IQ3_S": in_bases("wide-iq3_s"),
    "MXFP4": in_bases("moe-mxfp4_moe"),
}
# Where a block has its float16 scales, and one byte of scales and of codes.
SUPER = {"Q8_0": 0, "Q6_K": 208, "Q5_K": 0, "Q4_K": 0, "IQ4_XS": 0, "IQ3_S": 0}
MINIMUM = {"Q5_K": 2, "Q4_K": 2}
SUB = {"Q6_K": 192, "Q5_K": 4, "Q4_K": 4, "IQ4_XS": 4, "IQ3_S": 106}
SIGNS = {"IQ3_S": 74}
CODES = {"Q8_0": 2, "Q6_K": 0, "Q5_K": 48, "Q4_K": 16, "IQ4_XS": 8, "MXFP4": 1, "IQ3_S": 2}
SIZES = {
    "Q8_0": 34, "Q6_K": 210, "Q5_K": 176, "Q4_K": 144, "IQ4_XS": 136, "MXFP4": 17, "IQ3_S": 110,
}  # fmt: skip
# Points of a grid are no codes of their own: one more or less is as good, and so is a scale.
OF_A_GRID = frozenset({
    "a-code-by-one", "a-code-turned", "a-high-code-turned", "scale-three-per-cent-more",
    "sub-scale-by-many-steps",
})  # fmt: skip


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for kind, where in GGML.items():
        plant = partial(_blocks, kind=kind)
        yield from of_type("blocks", kind, plant, where, _changes(kind))
        yield from of_type("blocks", kind, plant, where, _right_changes(kind), receipts=(FORGED,))


def of_type(
    kind: str,
    type_: str,
    plant: Callable[..., str],
    where: Where,
    changes: Mapping[str, Change],
    **options: Any,
) -> Iterator[Fault]:
    """Yield the faults that changes of a type's blocks are.

    plant  makes a `change` and returns the tensor's name
    """
    for name, change in changes.items():
        fault = f"{type_.lower()}-{name}"
        yield tensor_fault(kind, fault, partial(plant, change=change), where, **options)


def _blocks(tensors: Tensors, kind: str, change: Change) -> str:
    entry = tensors.at(UP)
    assert entry.info.dtype == kind, f"{entry.info.name} is {entry.info.dtype}"
    change(entry.data.reshape(-1, SIZES[kind]))
    return entry.info.name


def half(at: int, how: Callable[[float], float]) -> Change:
    """Return a change of one block's float16."""

    def apply(blocks: Blocks) -> None:
        number = blocks[7, at : at + 2].copy().view(np.float16)
        blocks[7, at : at + 2] = np.array([how(float(number[0]))], np.float16).view(np.uint8)

    return apply


def step(at: int, by: int) -> Change:
    """Return a change of one byte."""

    def apply(blocks: Blocks) -> None:
        blocks[7, at] = (int(blocks[7, at]) + by) % 256

    return apply


def bits(at: int, mask: int) -> Change:
    """Return a change of bits of one byte."""

    def apply(blocks: Blocks) -> None:
        blocks[7, at] ^= mask

    return apply


def _assign(target: int | list[int], source: int | list[int]) -> Change:
    """Return a change that copies blocks."""

    def apply(blocks: Blocks) -> None:
        blocks[target] = blocks[source]

    return apply


def _zero(blocks: Blocks) -> None:
    blocks[7] = 0


def _codes_of_the_neighbour(codes: int) -> Change:
    def apply(blocks: Blocks) -> None:
        blocks[7, codes : codes + 16] = blocks[8, codes : codes + 16]

    return apply


def _changes(kind: str) -> dict[str, Change]:
    """Return changes of one type's blocks that no encoder would make."""
    found = _all_changes(kind)
    if kind in SIGNS:
        found["a-sign-turned"] = bits(SIGNS[kind] + 5, 0x10)
        return {name: change for name, change in found.items() if name not in OF_A_GRID}
    return found


def _all_changes(kind: str) -> dict[str, Change]:
    codes = CODES[kind]
    found: dict[str, Change] = {
        "a-code-by-one": step(codes + 4, 1),
        "a-code-turned": bits(codes + 3, 0x80 if kind == "Q8_0" else 0x08),
        "a-high-code-turned": bits(codes + 5, 0x40),
        "a-block-copied": _assign(7, 8),
        "a-block-zeroed": _zero,
        "two-blocks-swapped": _assign([7, 8], [8, 7]),
        "codes-of-the-neighbour": _codes_of_the_neighbour(codes),
    }
    if kind in SUPER:
        found |= {name: half(SUPER[kind], how) for name, how in SCALES.items()}
    if kind in MINIMUM:
        found |= {name: half(MINIMUM[kind], how) for name, how in MINIMA.items()}
    if kind == "MXFP4":
        found["exponent-by-two"] = bits(0, 0x02)
    elif kind in SUB:
        found["sub-scale-by-many-steps"] = bits(SUB[kind] + 1, 0x18)
    return found


def _right_changes(kind: str) -> dict[str, Change]:
    """Return changes that another encoder might have made, but not ours."""
    found: dict[str, Change] = {}
    if kind in SIGNS:
        found |= {n: change for n, change in _all_changes(kind).items() if n in OF_A_GRID}
    if kind in SUPER:
        found["scale-by-an-ulp"] = step(SUPER[kind], 1)
    if kind in SUB:
        found["sub-scale-by-a-step"] = step(SUB[kind] + (kind == "Q6_K"), 1)
    return found


SCALES: dict[str, Callable[[float], float]] = {
    "scale-three-per-cent-more": lambda d: 1.03 * d,
    "scale-doubled": lambda d: 2 * d,
    "scale-negative": lambda d: -d,
    "scale-nan": lambda _: float("nan"),
    "scale-infinite": lambda _: float("inf"),
}
MINIMA: dict[str, Callable[[float], float]] = {
    "minimum-doubled": lambda m: 2 * m,
    "minimum-lost": lambda _: 0.0,
}
