"""Merge an adapter into the rows of a weight: w + scale * (left @ right), rounded once.

A merged weight must be the same to the byte on every machine, and matrix products add in an order
of their own. So the factors are put on a grid first, relative to the largest of each row (left) and
column (right), so fine that every sum of products is exact in float64, in any order:

    b = (53 - ceil(log2 r)) / 2 bits        b + b + log2 r <= 53        r = 16: 24 bits, r = 256: 22

That is what float32 holds, in which peft adds; factors in bfloat16 with a range of 2^16 lose
nothing at all. Both results are rounded to the base model's type: they differ by one step, and only
beside the middle between two.

Shape letters: N rows, K columns, r rank, S stacked matrices of R rows each.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from formats.adapter.changes import Adapter, Run
from formats.checkpoint import MAX_MAPPED
from formats.safetensors.adapters import ADAPTER_FILES

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 17  # weights that are added to at once: a megabyte of float64
EXACT, BIAS = 53, 1023  # of float64: bits of a sum, of its exponent


def add_low_rank(w_NK: Tensor, left_Nr: Tensor, right_rK: Tensor, scale: float) -> Tensor:
    """Return w + scale * (left @ right) in w's type. Any of the three may be BF16, F16 or F32."""
    import torch

    out_NK, bits = torch.empty_like(w_NK), (EXACT - math.ceil(math.log2(len(right_rK)))) // 2
    right_rK = _on_grid(right_rK.double(), 0, bits)
    step = max(1, BLOCK // w_NK.shape[1])
    for start in range(0, len(w_NK), step):
        rows = slice(start, start + step)
        sum_nK = _on_grid(left_Nr[rows].double(), 1, bits) @ right_rK
        out_NK[rows] = sum_nK.mul_(scale).add_(w_NK[rows]).float().to(w_NK.dtype)
    return out_NK


def _on_grid(x: Tensor, axis: int, bits: int) -> Tensor:
    """Return float64 numbers rounded to `bits` below the power of two above the largest of an axis.

    What is added and taken away again is 1.5 * 2^52 steps of the grid: the sum has no finer ones.
    """
    import torch

    exponent = torch.frexp(x.abs().amax(axis, keepdim=True)).exponent.long()
    steps = ((exponent - bits + 52 + BIAS) << 52).view(torch.float64) * 1.5
    return (x + steps) - steps


@dataclass
class Merging:
    """An overlay that merges an adapter as its base model is read."""

    adapter: Adapter
    _touched: int = field(default=0, repr=False)

    @property
    def folder(self) -> Path:
        """Where the adapter's files are."""
        return self.adapter.folder

    @property
    def files(self) -> Mapping[str, Path]:
        """Its two files."""
        return {name: self.folder / name for name in ADAPTER_FILES}

    @property
    def names(self) -> Mapping[str, object]:
        """The stored tensors that it changes."""
        return self.adapter.changes

    @property
    def held_bytes(self) -> int:
        """The largest right factor in float64, twice, and two blocks."""
        runs = (run for change in self.adapter.changes.values() for run in change.added)
        widest = max((run.added.right[0].numel() for run in runs if run.added), default=0)
        return 8 * (2 * widest + 2 * BLOCK)

    def change(self, name: str, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return rows of a stored tensor with the adapter merged; see `formats.overlay`."""
        change, out = self.adapter.changes[name], rows.reshape(len(numbers), -1).clone()
        for run, inside in _runs(change.whole, numbers):
            assert run.whole is not None, "it takes the place of rows"
            out[inside] = run.whole[numbers[inside] - run.start].to(out.dtype)
        for run, inside in _runs(change.added, numbers):
            for s, where, row in _stacks(run, numbers, inside):
                assert run.added is not None, "it adds to rows"
                left, right = run.added.left[s][row], run.added.right[s]
                out[where] = add_low_rank(out[where], left, right, run.added.scale)
                self._release(right.nbytes + left.nbytes)
        return out.view(rows.shape)

    def _release(self, nbytes: int) -> None:
        """Give the pages of the adapter back, as a checkpoint's are."""
        self._touched += nbytes
        if self._touched >= MAX_MAPPED:
            self._touched = 0
            self.adapter.file.release()


def _runs(runs: Sequence[Run], numbers: Tensor) -> Iterator[tuple[Run, Tensor]]:
    """Yield the runs that hold some of these rows, and which of them those are, in order."""
    if not len(numbers) or not runs:
        return
    low, high = int(numbers.min()), int(numbers.max())
    first = max(0, bisect_right(runs, low, key=lambda run: run.start) - 1)
    for run in runs[first : bisect_right(runs, high, key=lambda run: run.start)]:
        inside = ((numbers >= run.start) & (numbers < run.stop)).nonzero().flatten()
        if len(inside):
            yield run, inside


def _stacks(run: Run, numbers: Tensor, inside: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the matrices of a run that hold some of its rows: number, which rows, rows in it."""
    import torch

    assert run.added is not None, "it adds to rows"
    local, height = numbers[inside] - run.start, run.added.left.shape[1]
    stacks = local // height
    for s in torch.unique(stacks).tolist():
        here = stacks == s
        yield s, inside[here], local[here] % height
