"""After GPTQ: each unit of a block again, the best one given all others, and bfloat16 steps.

Chosen for: GPTQ of weights on a GPU, by `quant.fourbit.batched`. No layer of a model uses it.

    slope = (w - q) H        unit_j = nearest((q_j + slope_j / H_jj) / d)        slope -= change H_j

A program has some rows of one matrix in its registers: their slopes, their units, and how far q has
moved. Steps of whole numbers in groups of up to a block move along the units, before these do.

Shape letters: E matrices, N rows, K columns, G groups of a row, b columns of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quant.fourbit.rows import nearest
from runtime.kernels.gptq.units import as_bfloat16, column, launch, nearest_unit
from runtime.kernels.launch import jit, tl, use_triton

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.rows import Rows


def settle_block_reference(
    rows: Rows, slope_ENK: Tensor, hessian_EKK: Tensor, added_E: Tensor, first: int,
    moved_ENb: Tensor,
) -> None:  # fmt: skip
    """Say what `settle_block` computes, in plain torch."""
    size, group = moved_ENb.shape[-1], rows.group
    row = slope_ENK[..., first : first + size].clone()
    block = hessian_EKK[:, first : first + size, first : first + size].clone()
    block.diagonal(dim1=1, dim2=2).add_(added_E[:, None])
    moved_ENb.zero_()
    for start in range(0, size, group):
        span = slice(start, min(start + group, size))
        units = rows.units[..., first + span.start : first + span.stop]
        d, zero = (x[..., (first + start) // group] for x in (rows.d, rows.zero))
        if rows.refit:
            push = units @ block[:, span]
            change = _better_step(units, row[..., span], d, push[..., span])[..., None]
            d += change[..., 0]
            moved_ENb[..., span] += change * units
            row -= change * push
        for i in range(span.start, span.stop):
            bend, old = block[:, i, i, None], units[..., i - start].clone()
            wanted = (old * d + row[..., i] / bend) / d
            new = torch.where(bend > 0, nearest(wanted, zero, rows.bits), old)
            units[..., i - start] = new
            moved_ENb[..., i] += (new - old) * d
            row -= ((new - old) * d)[..., None] * block[:, None, i]


def _better_step(units: Tensor, row: Tensor, step: Tensor, push: Tensor) -> Tensor:
    """Return how far the bfloat16 step with the least error under these units is from this one."""
    along, bend = (units * row).sum(-1), (units * push).sum(-1)
    new = (step + along / bend).bfloat16().float()
    change = new - step
    better = (bend > 0) & (new * step > 0) & (change * (change * bend - 2 * along) < 0)
    return torch.where(better, change, 0.0)


def settle_block(
    rows: Rows, slope_ENK: Tensor, hessian_EKK: Tensor, added_E: Tensor, first: int,
    moved_ENb: Tensor,
) -> None:  # fmt: skip
    """Improve units, and steps if `rows.refit`, of the columns from `first` on.

    rows     of E matrices, columns in their own order; their units and d are changed
    slope    [E, N, K], (w - q) H, which is read
    hessian  [E, K, K] float32, and what is `added` [E] to its diagonal
    moved    [E, N, b], filled with the change of q
    """
    if not use_triton(rows.w):
        settle_block_reference(rows, slope_ENK, hessian_EKK, added_E, first, moved_ENb)
        return
    tensors = rows.units, rows.d, rows.zero, slope_ENK, hessian_EKK, added_E, moved_ENb
    launch(_settle_kernel, rows, tensors, first, GROUP=rows.group)


@jit
def _settle_kernel(
    units, d, zero, slope, hessian, added, moved, N, K, G, first, size,
    END: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    r, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    n, inside = e * N + r, r < N
    mask = inside[:, None] & (k < size)[None, :]
    at = n[:, None] * K + first + k[None, :]
    row = tl.load(slope + at, mask=mask, other=0.0)
    unit_tile = tl.load(units + at, mask=mask, other=0.0)
    moved_tile = tl.zeros((ROWS, SIZE), tl.float32)
    block, more = hessian + (e * K + first) * K + first, tl.load(added + e)
    for start in range(0, size, GROUP):
        stop = tl.minimum(start + GROUP, size)
        to = n * G + (first + start) // GROUP
        step = tl.load(d + to, mask=inside, other=1.0)
        shift = tl.load(zero + to, mask=inside, other=0.0)
        if END > 0 and GROUP <= SIZE:
            own = tl.where(((k >= start) & (k < stop))[None, :], unit_tile, 0.0)
            push = own * more
            for i in range(start, stop):
                H = tl.load(block + i * K + k, mask=k < size, other=0.0)
                push = tl.fma(column(own, (k == i)[None, :])[:, None], H[None, :], push)
            change = _better_change(own, row, step, push)
            step += change
            tl.store(d + to, step, mask=inside)
            moved_tile += change[:, None] * own
            row = tl.fma(-change[:, None], push, row)
        for i in range(start, stop):
            H = tl.load(block + i * K + k, mask=k < size, other=0.0)
            H += tl.where(k == i, more, 0.0)
            here, bend = (k == i)[None, :], tl.load(block + i * K + i) + more
            old = column(unit_tile, here)
            pull = tl.div_rn(column(row, here), tl.where(bend > 0, bend, 1.0))
            wanted = tl.div_rn(tl.fma(old, step, pull), step)
            new = tl.where(bend > 0, nearest_unit(wanted, shift, END), old)
            change = (new - old) * step
            unit_tile = tl.where(here, new[:, None], unit_tile)
            moved_tile += tl.where(here, change[:, None], 0.0)
            row = tl.fma(-change[:, None], H[None, :], row)
    tl.store(units + at, unit_tile, mask=mask)
    tl.store(moved + n[:, None] * size + k[None, :], moved_tile, mask=mask)


@jit
def _better_change(own, row, step, push):
    """Return how far the bfloat16 step with the least error under these units is from this one."""
    along, bend = tl.sum(own * row, 1), tl.sum(own * push, 1)
    new = as_bfloat16(step + tl.div_rn(along, tl.where(bend > 0, bend, 1.0)))
    change = new - step
    better = (bend > 0) & (new * step > 0) & (change * (change * bend - 2.0 * along) < 0)
    return tl.where(better, change, 0.0)
