"""A few rows whose heads are still to be scaled by their norm, times a weight, and added.

Chosen for: `ROW_ADDED` of one row or two that delta_rule.several has left unscaled.

    y[n] = residual[n] + sum_k x[k] * root(head of k) * w[n, k]        see norm.gated's `Unscaled`

The root of a head is multiplied by the sums of 16 bytes of weights, as a scale of FP8 is. Every
program adds the parts of all heads' squares, which costs less than another kernel.

How a row is read and multiplied: see row.

Shape letters: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.conditions import A_FEW_ROWS
from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.linear.row_parts import (
    add_products,
    finished_rows,
    no_row_products,
    weight_part,
    x_rows,
)
from runtime.kernels.linear.row_tile import residuals, store_rows
from runtime.kernels.linear.weight import Stored, check_rows
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.norm.gated import Unscaled

_ROWS, _WARPS = 4, 4


def row_heads(x: Unscaled, weight: Tensor, residual_MN: Tensor) -> Tensor:
    """Return x @ weight.T + the residual [M, N].

    x            M at most 2; heads in whole 16 bytes
    weight       [N, K] in x's dtype
    residual_MN  [M, N] contiguous, in x's dtype
    """
    rows, k = check_rows(x.y, A_FEW_ROWS, Stored.of(weight))
    vector = 16 // x.y.element_size()
    assert x.d % vector == 0, "16 bytes of a row lie within a head"
    assert residual_MN.is_contiguous(), "the residual must be contiguous"
    width = max(power_of_two(-(-k // 2)), 16)
    y_MN = residual_MN.new_empty((rows, weight.shape[0]))
    _heads_kernel[(-(-weight.shape[0] // _ROWS),)](
        x.y,
        x.squares,
        residual_MN,
        weight,
        y_MN,
        k,
        weight.shape[0],
        x.eps,
        HEAD=x.d,
        PARTS=x.squares.shape[2],
        ROWS=rows,
        BLOCK_N=_ROWS,
        BLOCK_K=width,
        num_warps=_WARPS,
        **early(),
    )
    return y_MN


@jit
def _part_roots(
    squares, x, start, K, eps, HEAD: tl.constexpr, PARTS: tl.constexpr, ROWS, WIDTH: tl.constexpr
):
    """Return the roots of WIDTH columns of each row, one for each 16 bytes."""
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    g = start + tl.arange(0, WIDTH // VECTOR) * VECTOR
    roots = ()
    for row in tl.static_range(ROWS):
        total = tl.zeros((WIDTH // VECTOR,), tl.float32)
        at = squares + (row * (K // HEAD) + g // HEAD) * PARTS
        for part in tl.static_range(PARTS):
            total += tl.load(at + part, mask=g < K, other=0.0)
        roots += (tl.rsqrt(total / HEAD + eps),)  # type: ignore[assignment]
    return roots


@jit
def _heads_kernel(
    x,
    squares,
    residual,
    weight,
    y,
    K,
    N,
    eps,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    start_next()
    w0 = weight_part(weight, first, N, 0, K, BLOCK_N, BLOCK_K)
    w1 = weight_part(weight, first, N, BLOCK_K, K, BLOCK_N, BLOCK_K)
    wait_for_inputs()
    x0, x1 = x_rows(x, 0, K, ROWS, BLOCK_K), x_rows(x, BLOCK_K, K, ROWS, BLOCK_K)
    r0 = _part_roots(squares, x, 0, K, eps, HEAD, PARTS, ROWS, BLOCK_K)
    r1 = _part_roots(squares, x, BLOCK_K, K, eps, HEAD, PARTS, ROWS, BLOCK_K)
    before = residuals(residual, n, N, ROWS)
    totals = no_row_products(weight, ROWS, BLOCK_N, BLOCK_K)
    after = ()
    for row in tl.static_range(ROWS):
        total = add_products(totals[row], w0, x0[row], r0[row], 128)
        after += (add_products(total, w1, x1[row], r1[row], 128),)  # type: ignore[assignment]
    ys = finished_rows(after, None, 0, ROWS)
    store_rows(y, ys, before, residual, n, N, ROWS)
