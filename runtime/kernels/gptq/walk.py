"""GPTQ within a block of columns: the nearest units, what they lose moved on.

Chosen for: GPTQ of weights on a GPU, by `quant.fourbit.batched`. No layer of a model uses it.

    unit_j = nearest(w_j / d)     missed_j = (w_j - unit_j d) / U_jj     w_k -= missed_j U_jk, k > j

A program has some rows of one matrix in its registers, and walks the block's columns; it reads each
row of the factor once. The operations and their order are those of `quant.fourbit.walk`.

Trap: units are the CPU's only if products and sums are not fused but where `fma` says so, and if
division rounds to nearest.

Shape letters: E matrices, N rows, K columns, G groups of a row, b columns of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.fourbit.rows import nearest
from runtime.kernels.gptq.units import column, launch, nearest_unit
from runtime.kernels.launch import jit, tl, use_triton

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.rows import Rows


def walk_block_reference(
    rows: Rows, upper_EKK: Tensor, group_EK: Tensor, first: int, missed_ENb: Tensor
) -> None:
    """Say what `walk_block` computes, in plain torch."""
    size = missed_ENb.shape[-1]
    w = rows.w[..., first : first + size].clone()
    group_ENK = group_EK.long()[:, None].expand(*w.shape[:2], -1)
    for i in range(size):
        j = first + i
        d, zero = (x.gather(2, group_ENK[..., j : j + 1])[..., 0] for x in (rows.d, rows.zero))
        unit = nearest(w[..., i] / d, zero, rows.bits)
        error = (w[..., i] - unit * d) / upper_EKK[:, j, j, None]
        rows.units[..., j], missed_ENb[..., i] = unit, error
        w[..., i + 1 :] -= error[..., None] * upper_EKK[:, None, j, j + 1 : first + size]


def walk_block(
    rows: Rows, upper_EKK: Tensor, group_EK: Tensor, first: int, missed_ENb: Tensor
) -> None:
    """Take the nearest units of the columns from `first` on, and fill in what they miss.

    rows    of E matrices, columns in the factor's order
    upper   [E, K, K] float32       group  [E, K] int32, of each column
    missed  [E, N, b], what each column lost, over the factor's diagonal
    """
    if not use_triton(rows.w):
        walk_block_reference(rows, upper_EKK, group_EK, first, missed_ENb)
        return
    tensors = rows.w, rows.d, rows.zero, upper_EKK, group_EK, rows.units, missed_ENb
    launch(_walk_kernel, rows, tensors, first)


@jit
def _walk_kernel(
    w, d, zero, upper, group, units, missed, N, K, G, first, size,
    END: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    r, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    n, inside = e * N + r, r < N
    mask = inside[:, None] & (k < size)[None, :]
    at = n[:, None] * K + first + k[None, :]
    x = tl.load(w + at, mask=mask, other=0.0)
    unit_tile = tl.zeros((ROWS, SIZE), tl.float32)
    missed_tile = tl.zeros((ROWS, SIZE), tl.float32)
    for i in range(size):
        g = n * G + tl.load(group + e * K + first + i)
        step = tl.load(d + g, mask=inside, other=1.0)
        shift = tl.load(zero + g, mask=inside, other=0.0)
        line = upper + (e * K + first + i) * K + first
        U = tl.load(line + k, mask=(k > i) & (k < size), other=0.0)
        here = (k == i)[None, :]
        wanted = column(x, here)
        unit = nearest_unit(tl.div_rn(wanted, step), shift, END)
        error = tl.div_rn(wanted - unit * step, tl.load(line + i))
        unit_tile = tl.where(here, unit[:, None], unit_tile)
        missed_tile = tl.where(here, error[:, None], missed_tile)
        x = tl.fma(-error[:, None], U[None, :], x)
    tl.store(units + at, unit_tile, mask=mask)
    tl.store(missed + n[:, None] * size + k[None, :], missed_tile, mask=mask)
