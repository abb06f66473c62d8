"""After units have settled: two of a block at a time, where none alone can be improved.

Chosen for: GPTQ of weights on a GPU, by `quant.fourbit.batched`. No layer of a model uses it.

    cost_i + cost_j + 2 x_i x_j H_ij < 0,    cost = x^2 H - 2 x slope,    x one code times the step

A program has some rows of one matrix in its registers: their slopes, their units, and how far q has
moved. The operations and their order are those of `quant.fourbit.pairs`.

Shape letters: E matrices, N rows, K columns, G groups of a row, b columns of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quant.fourbit.pairs import NEAR
from runtime.kernels.gptq.units import column, launch
from runtime.kernels.launch import jit, tl, use_triton

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.rows import Rows


def pair_block_reference(
    rows: Rows, slope_ENK: Tensor, hessian_EKK: Tensor, added_E: Tensor, first: int,
    moved_ENb: Tensor,
) -> None:  # fmt: skip
    """Say what `pair_block` computes, in plain torch."""
    span = slice(first, first + moved_ENb.shape[-1])
    row = slope_ENK[..., span].clone()
    block = hessian_EKK[:, span, span].clone()
    block.diagonal(dim1=1, dim2=2).add_(added_E[:, None])
    bend = block.diagonal(dim1=1, dim2=2)[:, None]
    d, zero = (x.repeat_interleave(rows.group, -1)[..., span] for x in (rows.d, rows.zero))
    code = rows.units[..., span] + zero
    moved_ENb.zero_()
    for i in range(row.shape[-1]):
        one, own = _costs(row, d, bend)
        first_goes = _inside(code + one, rows.end) & (own < float(NEAR) * d.square() * bend)
        x = (one * d)[..., i, None]
        go, cost = _costs(row - x * block[:, None, i], d, bend)
        cost = torch.where(_inside(code + go, rows.end), cost + own[..., i, None], torch.inf)
        cost[..., i] = torch.inf
        least, j = cost.min(-1, keepdim=True)
        changed = first_goes[..., i, None] & (least < 0)
        ones = torch.zeros_like(code).scatter_(-1, j, go.gather(-1, j))
        ones[..., i] = one[..., i]
        ones *= changed
        code += ones
        moved_ENb += ones * d
        row -= (ones * d) @ block
    rows.units[..., span] = code - zero


def _costs(row: Tensor, d: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
    """Return by which code each unit should go on, and what that costs it alone."""
    one = torch.where(row * d > 0, 1.0, -1.0)
    return one, d.square() * bend - 2 * (one * d * row)


def _inside(code: Tensor, end: int) -> Tensor:
    return (code >= -end) & (code < end)


def pair_block(
    rows: Rows, slope_ENK: Tensor, hessian_EKK: Tensor, added_E: Tensor, first: int,
    moved_ENb: Tensor,
) -> None:  # fmt: skip
    """Improve pairs of units of the columns from `first` on.

    rows     of E matrices, whole numbers, columns in their own order; their units are changed
    slope    [E, N, K], (w - q) H, which is read
    hessian  [E, K, K] float32, and what is `added` [E] to its diagonal
    moved    [E, N, b], filled with the change of q
    """
    if not use_triton(rows.w):
        pair_block_reference(rows, slope_ENK, hessian_EKK, added_E, first, moved_ENb)
        return
    tensors = rows.units, rows.d, rows.zero, slope_ENK, hessian_EKK, added_E, moved_ENb
    launch(_pair_kernel, rows, tensors, first, GROUP=rows.group, NEAREST=float(NEAR))


@jit
def _pair_kernel(
    units, d, zero, slope, hessian, added, moved, N, K, G, first, size,
    END: tl.constexpr, GROUP: tl.constexpr, NEAREST: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    r, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    n, there = e * N + r, k < size
    mask = (r < N)[:, None] & there[None, :]
    at, to = n[:, None] * K + first + k[None, :], n[:, None] * G + ((first + k) // GROUP)[None, :]
    row = tl.load(slope + at, mask=mask, other=0.0)
    step = tl.load(d + to, mask=mask, other=1.0)
    shift = tl.load(zero + to, mask=mask, other=0.0)
    code = tl.load(units + at, mask=mask, other=0.0) + shift
    moved_tile = tl.zeros((ROWS, SIZE), tl.float32)
    block, more = hessian + (e * K + first) * K + first, tl.load(added + e)
    bend = (tl.load(block + k * K + k, mask=there, other=0.0) + more)[None, :]
    far = step * step * bend
    for i in range(0, size):
        H = tl.load(block + i * K + k, mask=there, other=0.0)[None, :]
        here = (k == i)[None, :]
        one = tl.where(row * step > 0, 1.0, -1.0)
        own = far - 2.0 * (one * step * row)
        free = (code + one >= -1.0 * END) & (code + one < 1.0 * END) & (own < NEAREST * far)
        goes = column(tl.where(free, 1.0, 0.0), here)
        x, own_i = column(one * step, here)[:, None], column(own, here)[:, None]
        pull = tl.fma(-x, H, row)
        go = tl.where(pull * step > 0, 1.0, -1.0)
        cost = own_i + (far - 2.0 * (go * step * pull))
        open_to = (code + go >= -1.0 * END) & (code + go < 1.0 * END) & mask & (k != i)[None, :]
        cost = tl.where(open_to, cost, float("inf"))
        least, j = tl.min(cost, 1), tl.argmin(cost, 1)
        changed = ((goes > 0) & (least < 0))[:, None]
        partner = changed & (k[None, :] == j[:, None])
        y = column(go * step, k[None, :] == j[:, None])[:, None]
        code += tl.where(changed & here, one, 0.0) + tl.where(partner, go, 0.0)
        moved_tile += tl.where(changed & here, x, 0.0) + tl.where(partner, y, 0.0)
        row = tl.where(changed, pull - tl.where(here, x * more, 0.0), row)
        row = _follow(row, block, j, k, y, partner, changed, more, K, there)
    tl.store(units + at, code - shift, mask=mask)
    tl.store(moved + n[:, None] * size + k[None, :], moved_tile, mask=mask)


@jit
def _follow(row, block, j, k, y, partner, changed, more, K, there):
    """Return the slopes after the partners of all rows have moved by y."""
    H = tl.load(block + j[:, None] * K + k[None, :], mask=changed & there[None, :], other=0.0)
    row = tl.where(changed, tl.fma(-y, H, row), row)
    return row - tl.where(partner, y * more, 0.0)
