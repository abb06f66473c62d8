"""Copies of the embedding and the head beside an MTP head, which the family lets share the model's.

A copy is not written: every engine takes the model's. One with other values is a model that no
engine of this family computes, and is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from quant.measure import same_bits

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 256


def check_copies(source: Checkpoint, way_out: str) -> None:
    """Raise FormatError for a copy that is none; `way_out` are the flags that drop MTP."""
    for name, original in source.layout.copies.items():
        row = _first_difference(source, name, original)
        if row is not None:
            raise FormatError(
                name,
                f"is not {original}: they differ in row {row}",
                "a copy: the family's MTP head shares the embedding and the head of the model",
                f"leave MTP out: {way_out}",
            )


def _first_difference(source: Checkpoint, name: str, original: str) -> int | None:
    """Return the first row in which two stored tensors of one type and shape differ."""
    ours, theirs = source.read(name), source.read(original)
    for start in range(0, len(ours), ROWS):
        rows = slice(start, start + ROWS)
        mine, other = source.load(name, ours, rows), source.load(original, theirs, rows)
        if not same_bits(mine, other):
            return start + _row(mine, other)
        source.release(mine.nbytes + other.nbytes)
    return None


def _row(mine: Tensor, other: Tensor) -> int:
    return next(i for i in range(len(mine)) if not same_bits(mine[i], other[i]))
