"""Faults in GGUF's NVFP4: codes and scales of blocks, and the scale that stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.planted.code_faults import UP, Blocks
from tests.planted.edit import Tensors
from tests.planted.fault import UNOPENED, Fault
from tests.planted.fourbit_faults import where
from tests.planted.tensor_fault import Plant, tensor_fault

# Of a block of 64 weights: a scale for every 16, then their codes.
SCALES, SIZE = 4, 36
OUTPUT = where("nvfp4-file")
Change = Callable[[Blocks], object]


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, change in BLOCKS.items():
        yield tensor_fault("four bits: blocks", name, _blocks(change), OUTPUT)
    for name, how in WHOLE.items():
        yield tensor_fault("four bits: blocks", name, _whole(how), OUTPUT)
    yield tensor_fault("four bits: blocks", "whole-scale-missing", _lose, OUTPUT, codes=UNOPENED)


def _blocks(change: Change) -> Plant:
    def plant(tensors: Tensors) -> str:
        entry = tensors.at(UP)
        blocks = entry.data.reshape(*entry.info.shape[:-1], -1, SIZE)
        change(blocks if blocks.ndim == 3 else blocks[1])
        return entry.info.name

    return plant


def _scale_name(tensors: Tensors) -> str:
    return tensors.stored(UP).removesuffix("weight") + "scale"


def _whole(how: Callable[[float], float]) -> Plant:
    def plant(tensors: Tensors) -> str:
        view = tensors.entry(_scale_name(tensors)).view()
        view[-1] = how(float(view[-1]))
        return tensors.stored(UP).removesuffix("weight")

    return plant


def _lose(tensors: Tensors) -> str:
    name = _scale_name(tensors)
    del tensors.home(name).entries[name]
    return tensors.stored(UP).removesuffix("weight")


def _rolled(part: slice, by: int, axis: int) -> Change:
    def change(blocks: Blocks) -> None:
        blocks[..., part] = np.roll(blocks[..., part], by, axis)

    return change


def _swap_nibbles(blocks: Blocks) -> None:
    codes = blocks[..., SCALES:]
    codes[:] = (codes >> 4) | (codes << 4)


def _bit_of_some(blocks: Blocks) -> None:
    blocks[..., SCALES::8] ^= 4


def _rows_swapped(blocks: Blocks) -> None:
    blocks[[3, 4]] = blocks[[4, 3]]


def _first_scale(value: int) -> Change:
    def change(blocks: Blocks) -> None:
        blocks[0, 0, 0] = value

    return change


def _zeroed(blocks: Blocks) -> None:
    blocks[5, :, SCALES:] = 0


HEAD, CODES = slice(0, SCALES), slice(SCALES, SIZE)
BLOCKS: dict[str, Change] = {
    "codes-off-by-a-byte": _rolled(CODES, 1, 2),
    "codes-off-by-a-block": _rolled(CODES, 1, 1),
    "codes-off-by-a-row": _rolled(CODES, 1, 0),
    "scales-off-by-a-group": _rolled(HEAD, 1, 2),
    "scales-off-by-a-row": _rolled(HEAD, 1, 0),
    "nibbles-swapped": _swap_nibbles,
    "a-bit-of-some": _bit_of_some,
    "two-rows-swapped": _rows_swapped,
    "a-row-zeroed": _zeroed,
    "a-scale-zero": _first_scale(0),
    "a-scale-nan": _first_scale(0x7F),
    "a-scale-negative": _first_scale(0xB8),
}
WHOLE: dict[str, Callable[[float], float]] = {
    "whole-scale-zero": lambda _: 0.0,
    "whole-scale-nan": lambda _: float("nan"),
    "whole-scale-negative": lambda scale: -scale,
    "whole-scale-doubled": lambda scale: 2 * scale,
    "whole-scale-inverted": lambda scale: 1 / scale,
}
