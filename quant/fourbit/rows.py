"""Rows of a weight while codes are chosen for them, and the blocks of columns they are walked in.

Shape letters: N rows, K columns, G groups of a row, b columns of a block, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from quant.ggml import iq4_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

BLOCK = 128
TABLE = -1


class Form(Protocol):
    """A stored form that chooses steps of rows in its own way, and keeps what it stores."""

    def part(self, rows: slice) -> Form:
        """Return it for some of the rows."""
        ...

    def steps(self, wanted_NK: Tensor, weights_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps and zeros [N, G] that suit these weights, and what errors weigh."""
        ...


@dataclass(slots=True)
class Rows:
    """Some rows on their way to units, all on one device; of several matrices, an axis before N.

    w      float32 [N, K]
    d      float32 [N, G], steps
    zero   float32 [N, G]
    units  float32 [N, K], decoded weights over their steps
    bits   of whole numbers; 0: E2M1; TABLE: the values of ggml's IQ4
    tried  float32 [C, N, G], steps among which each is searched for again; None: they stay
    form   what chooses steps in its own way; None: those tried, and the rule of the bits
    """

    w: Tensor
    d: Tensor
    zero: Tensor
    units: Tensor
    bits: int
    tried: Tensor | None = None
    form: Form | None = None

    @property
    def group(self) -> int:
        """The columns of a group."""
        return self.w.shape[-1] // self.d.shape[-1]

    @property
    def end(self) -> int:
        """2^(bits-1) of whole numbers, 0 of E2M1, less of a table."""
        return end_of(self.bits)

    @property
    def refit(self) -> bool:
        """Whether steps are chosen again with the units: whole numbers in groups up to a block."""
        return self.bits > 0 and self.group <= BLOCK and self.form is None

    @property
    def searched(self) -> bool:
        """Whether steps are searched for again between passes over the units."""
        return self.tried is not None or self.form is not None

    @property
    def values(self) -> Tensor:
        """What the units mean, [N, K]."""
        return self.units * self.d.repeat_interleave(self.group, -1)

    @property
    def left(self) -> Tensor:
        """What the units leave of the weights, [N, K]."""
        return self.w - self.values

    def take(self, steps: Tensor) -> None:
        """Take these steps [B], and the units nearest to what was meant."""
        values, width = self.values, self.group
        self.d.copy_(steps.view_as(self.d))
        d, zero = (x.repeat_interleave(width, -1) for x in (self.d, self.zero))
        self.units.copy_(nearest(values / d, zero, self.bits))

    def part(self, rows: slice) -> Rows:
        """Return some of the rows; of one matrix they are these very ones."""
        tensors = (self.w, self.d, self.zero, self.units)
        w, d, zero, units = (x[..., rows, :].contiguous() for x in tensors)
        tried = None if self.tried is None else self.tried[..., rows, :]
        form = None if self.form is None else self.form.part(rows)
        return Rows(w, d, zero, units, self.bits, tried, form)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first column of each block, and memory for what its columns move, [N, b]."""
        columns = self.w.shape[-1]
        for first in range(0, columns, BLOCK):
            shape = *self.w.shape[:-1], min(BLOCK, columns - first)
            yield first, self.w.new_empty(shape)


def end_of(bits: int) -> int:
    """Return 2^(bits-1) of whole numbers, 0 of E2M1, less of a table: what loops are told."""
    return 1 << (bits - 1) if bits > 0 else bits


def nearest(y: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the units nearest to y, ties to the even code; of a table, to the larger value."""
    if bits == TABLE:
        values = y.new_tensor(iq4_table.TABLE)
        return values[torch.bucketize(y, (values[1:] + values[:-1]) / 2, right=True)]
    if bits:
        end = 1 << (bits - 1)
        return (y + zero).clamp(-end, end - 1).round() - zero
    size = y.abs().clamp(max=6)
    gap = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / gap).round() * gap).copysign(y)
