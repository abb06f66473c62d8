"""GPTQ in plain torch, for weights on a GPU: `walk` in blocks, products in float32 without TF32.

Units can differ from the CPU's where a number falls on the other side of a tie: products and their
sums are rounded in another order. Rows are not walked in ranges here.

Shape letters: N rows, K columns, G groups of a row, b columns of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quant.fourbit.rows import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from quant.fourbit.hessian import Factor
    from quant.fourbit.rows import Rows


def nearest(y: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the units nearest to y, ties to the even code."""
    if bits:
        end = 1 << (bits - 1)
        return (y + zero).clamp(-end, end - 1).round() - zero
    size = y.abs().clamp(max=6)
    gap = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / gap).round() * gap).copysign(y)


def feed_back(rows: Rows, factor: Factor) -> None:
    """Fill in the units that GPTQ chooses."""
    order, upper = factor.order, factor.upper
    columns, groups = order.tolist(), (order // rows.group).tolist()
    # columns one after another in memory: each is read and written whole
    w, d, zero = (x.T.contiguous() for x in (rows.w[:, order], rows.d, rows.zero))
    for first, stop in _blocks(w):
        missed, block = w[first:stop], upper[first:stop, first:stop]
        for i in range(stop - first):
            j, g = columns[first + i], groups[first + i]
            unit = nearest(missed[i] / d[g], zero[g], rows.bits)
            missed[i] = (missed[i] - unit * d[g]) / block[i, i]
            rows.units[:, j] = unit
            missed[i + 1 :].addr_(block[i, i + 1 :], missed[i], alpha=-1)
        w[stop:].addmm_(upper[first:stop, stop:].T, missed, alpha=-1)


def settle(rows: Rows, factor: Factor) -> None:
    """Choose each unit again, and steps of whole numbers in groups of up to a block."""
    group, hessian = rows.group, factor.hessian
    q = rows.units * rows.d.repeat_interleave(group, 1)
    slope = ((rows.w - q) @ hessian + factor.added * (rows.w - q)).T.contiguous()
    d, zero, units = (x.T.contiguous() for x in (rows.d, rows.zero, rows.units))
    bend = hessian.diagonal() + factor.added
    bend = torch.where(bend > 0, bend, torch.inf)  # a column of nothing stays
    for first, stop in _blocks(slope):
        row, block = slope[first:stop].clone(), hessian[first:stop, first:stop].clone()
        block.diagonal().add_(factor.added)
        moved = torch.zeros_like(row)
        for i in range(stop - first):
            j, g = first + i, (first + i) // group
            if rows.bits and group <= BLOCK and j % group == 0:
                change = _better_step(units[j : j + group], row[i : i + group], d[g], block, i)
                _scale(moved[i : i + group], row, change * units[j : j + group], block, i)
                d[g] += change
            wanted = units[j] + row[i] / (bend[j] * d[g])
            unit = nearest(wanted, zero[g], rows.bits)
            _scale(moved[i : i + 1], row, ((unit - units[j]) * d[g])[None], block, i)
            units[j] = unit
        slope.addmm_(hessian[first:stop].T, moved, alpha=-1)
        slope[first:stop] -= factor.added * moved
    rows.units.copy_(units.T)
    rows.d.copy_(d.T)


def _scale(moved: Tensor, row: Tensor, change: Tensor, block: Tensor, i: int) -> None:
    """Change q of columns from the i-th of a block on, and the slope of the block with it."""
    moved += change
    row.addmm_(block[i : i + len(change)].T, change, alpha=-1)


def _better_step(units: Tensor, row: Tensor, step: Tensor, block: Tensor, i: int) -> Tensor:
    """Return how far the bfloat16 step with the least error under these units is from this one."""
    push = block[i : i + len(units), i : i + len(units)] @ units
    along, bend = (units * row).sum(0), (units * push).sum(0)
    new = (step + along / bend).bfloat16().float()
    change = new - step
    better = (bend > 0) & (new * step > 0) & (change * (change * bend - 2 * along) < 0)
    return torch.where(better, change, 0.0)


def _blocks(x_KN: Tensor) -> Iterator[tuple[int, int]]:
    for first in range(0, len(x_KN), BLOCK):
        yield first, min(first + BLOCK, len(x_KN))
