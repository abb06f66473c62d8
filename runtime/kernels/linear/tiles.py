"""Products with FP8 weights in tiles of the tensor cores, x as it is or in FP8 too.

Chosen for: `PRODUCT` with FP8 weights and 9 to 511 rows that are not quantised, and `CODES_PRODUCT`
that cuBLAS does not take.

    y[m, n] = sum_k x[m, k] * codes[n, k] * scale(n, k)          summed in float32

The weights are the left operand of the tensor cores, where they may come from registers.

Trap: codes and scales have to be multiplied in float32 wherever the weight is read anyway: their
product, rounded to bfloat16, is another weight.

Shape letters: M rows of x (tokens), N outputs, K inputs, G groups of 128 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.conditions import FEW_ROWS
from runtime.kernels.launch import autotune, jit, operand, power_of_two, tl
from runtime.kernels.linear.weight import BLOCK, scale_edge

_PROGRAMS = 512  # four for each of the 132 multiprocessors of an H100


def block_of_rows(num_rows: int) -> int:
    """Return how many rows of x a tensor-core tile takes: 16, which `tl.dot` asks for, to 128."""
    return min(max(power_of_two(num_rows), 16), 128)


def tile_product(
    x_MK: Tensor, x_scale: Tensor | None, codes: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the product [M, N] from the tensor cores; K is cut where few rows leave them idle."""
    (m, k), n, edge = x_MK.shape, codes.shape[0], scale_edge(codes, scale)
    parts = max(1, min(-(-_PROGRAMS // -(-n // 32)), k // (4 * BLOCK), 8)) if m <= FEW_ROWS else 1
    y_MN = torch.empty((m, n), dtype=dtype, device=x_MK.device)
    partial = y_MN if parts == 1 else y_MN.new_empty((parts, m, n), dtype=torch.float32)
    block_m = block_of_rows(m)
    _tiles_kernel[lambda meta: (-(-m // block_m) * -(-n // meta["BLOCK_N"]), parts)](
        x_MK,
        x_scale,
        codes,
        scale,
        partial,
        m,
        n,
        k,
        -(-k // (parts * BLOCK)) * BLOCK,
        x_MK.stride(0),
        scale.stride(0),
        int(edge > 1),
        EDGE=edge,
        BLOCK_M=block_m,
    )
    return y_MN if parts == 1 else partial.sum(0).to(dtype)


@jit
def tile_of(program, tiles_m, tiles_n):
    """Return (tile of M, tile of N): 8 tiles of M share each weight tile while it is in L2."""
    per_group = 8 * tiles_n
    first = program // per_group * 8
    height = tl.minimum(tiles_m - first, 8)
    return first + program % per_group % height, program % per_group // height


@jit
def add_product(
    total,
    w,
    x,
    scale,
    x_scale,
    n,
    m,
    n_inside,
    m_inside,
    k,
    M,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
):
    """Return total [N, M] plus the product of w [N, k] and x [k, M] with its block scales.

    scale  of the rows n of the weight, EDGE of which share one; 0: there are none
    x_scale  None, or [G, M] of the rows m of x, which is then in E4M3
    """
    # through float32: from E4M3 to bfloat16 a GPU goes by way of float16, a quarter as fast
    w = operand(w.to(tl.float32).to(x.dtype))
    x = operand(x)
    if EDGE <= 1 and x_scale is None:
        return tl.dot(w, x, total, input_precision="ieee")
    # the tensor cores keep about 14 bits of an FP8 sum: each step is added in float32
    product = tl.dot(w, x, input_precision="ieee")
    if EDGE > 1:
        s_n = scale + n // EDGE * scale_row + k // 128 * scale_col
        product *= tl.load(s_n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        if x_scale is not None:
            product *= tl.load(x_scale + k // 128 * M + m, mask=m_inside, other=0.0)[None, :]
    return total + product


@jit
def scale_rows(total, scale, x_scale, n, m, n_inside, m_inside, EDGE: tl.constexpr):
    """Return total [N, M] times the scales that belong to whole rows of the weight and of x."""
    if EDGE == 1:
        total *= tl.load(scale + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        if x_scale is not None:
            total *= tl.load(x_scale + m, mask=m_inside, other=0.0)[None, :]
    return total


TILE_CHOICES = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    for n, k, warps, stages in (
        (32, 128, 2, 5),
        (64, 128, 4, 4),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
    )
]


@autotune(TILE_CHOICES, key=["N", "K", "BLOCK_M", "EDGE"])
@jit
def _tiles_kernel(
    x,
    x_scale,
    codes,
    scale,
    out,
    M,
    N,
    K,
    part,
    x_row,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    first = tl.program_id(1) * part
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + m.to(tl.int64)[None, :] * x_row + k[:, None]
    w_rows = codes + n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, tl.minimum(first + part, K), BLOCK_K):
        left = k < K - start
        x_KM = tl.load(x_rows + start, mask=(m < M)[None, :] & left[:, None], other=0.0)
        w_NK = tl.load(w_rows + start, mask=(n < N)[:, None] & left[None, :], other=0.0)
        total = add_product(
            total,
            w_NK,
            x_KM,
            scale,
            x_scale,
            n,
            m,
            n < N,
            m < M,
            start,
            M,
            scale_row,
            scale_col,
            EDGE,
        )
    total = scale_rows(total, scale, x_scale, n, m, n < N, m < M, EDGE)
    at = (tl.program_id(1) * M + m).to(tl.int64)[:, None] * N + n[None, :]
    y_MN = tl.trans(total).to(out.dtype.element_ty)
    tl.store(out + at, y_MN, mask=(m < M)[:, None] & (n < N)[None, :])
