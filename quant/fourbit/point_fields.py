"""Where IQ2 and IQ3 keep points, signs and levels in the bytes of a super-block of 256 columns.

    w ~ +-base (2 l + 1) g      g a level of the point of 4 or 8 columns, l of 16 or 32 columns

A field is a run of bits of the block, its bytes one after another, each from its lowest bit on.
Of seven signs the eighth makes the number of minus signs even.

Source: llama.cpp's ggml-quants.c at b11434, `dequantize_row_iq*`. Planning asks this table which
types there are, so it loads no numpy; `points` reads and writes by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


SUPER, EIGHT = 256, 8


class Run(NamedTuple):
    """Bits of a number: `width` from `start` of the block on, which are those from `low` on."""

    start: int
    width: int
    low: int = 0


@dataclass(frozen=True, slots=True)
class Fields:
    """The numbers of a type's super-block.

    group   columns of a point
    block   columns that share a level
    even    whether an even number of eight signs is minus
    """

    group: int
    block: int
    even: bool
    points: tuple[tuple[Run, ...], ...]
    signs: tuple[tuple[Run, ...], ...]
    levels: tuple[tuple[Run, ...], ...]


def _every(count: int, start: int, width: int, by: int, low: int = 0) -> list[Run]:
    """Return runs of bits, one every so many."""
    return [Run(start + by * k, width, low) for k in range(count)]


def _alone(runs: Iterable[Run]) -> tuple[tuple[Run, ...], ...]:
    return tuple((run,) for run in runs)


def _within(words: Iterable[int], count: int, width: int) -> list[Run]:
    """Return runs of bits, several in each word, which starts at a bit."""
    return [Run(word + width * k, width) for word in words for k in range(count)]


def _both(low: list[Run], high: list[Run]) -> tuple[tuple[Run, ...], ...]:
    return tuple(zip(low, high, strict=True))


EVEN, FREE = True, False
_XXS2, _XXS3 = range(48, 528, 64), range(528, 784, 32)
FIELDS = {
    "IQ2_XXS": Fields(
        8, 32, EVEN, _alone(_within(range(16, 528, 64), 4, 8)), _alone(_within(_XXS2, 4, 7)),
        _alone(Run(word + 28, 4) for word in _XXS2),
    ),
    "IQ2_XS": Fields(
        8, 16, EVEN, _alone(_every(32, 16, 9, 16)), _alone(_every(32, 25, 7, 16)),
        _alone(_every(16, 528, 4, 4)),
    ),
    "IQ2_S": Fields(
        8, 16, FREE, _both(_every(32, 16, 8, 8), _every(32, 528, 2, 2, 8)),
        _alone(_every(32, 272, 8, 8)), _alone(_every(16, 592, 4, 4)),
    ),
    "IQ3_XXS": Fields(
        4, 32, EVEN, _alone(_every(64, 16, 8, 8)), _alone(_within(_XXS3, 4, 7)),
        _alone(Run(word + 28, 4) for word in _XXS3),
    ),
    "IQ3_S": Fields(
        4, 32, FREE, _both(_every(64, 16, 8, 8), _every(64, 528, 1, 1, 8)),
        _alone(_every(32, 592, 8, 8)), _alone(_every(8, 848, 4, 4)),
    ),
}  # fmt: skip
