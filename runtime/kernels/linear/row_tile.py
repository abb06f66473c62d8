"""A tile of a product with one row, or two: what a program of row computes.

Chosen for: within `PRODUCT`, `ROW_ADDED` and `ROW_PRODUCTS` of row; never alone.

Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, tl
from runtime.kernels.linear.row_parts import (
    add_row_products,
    finished_rows,
    keep,
    no_row_products,
    norm_part,
    normed_rows,
    part_scales,
    root_means,
    row_scales,
    weight_part,
    x_rows,
)
from runtime.kernels.overlap import wait_for_inputs


@jit
def residuals(residual, n, N, ROWS: tl.constexpr):
    """Return the residuals of each row, or zeros if there are none."""
    before = ()
    for row in tl.static_range(ROWS):
        r_N = tl.zeros(n.shape, tl.float32)
        if residual is not None:
            r_N = tl.load(residual + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        before += (r_N,)  # type: ignore[assignment]
    return before


@jit
def store_rows(y, ys, before, residual, n, N, ROWS: tl.constexpr):
    """Write the sums of each row, rounded, then added to its residuals if there are any."""
    for row in tl.static_range(ROWS):
        y_N = ys[row].to(y.dtype.element_ty)
        if residual is not None:
            y_N = (before[row] + y_N.to(tl.float32)).to(y.dtype.element_ty)
        tl.store(y + row * N + n, y_N, mask=n < N)


@jit
def row_sums(
    tile,
    x,
    norm,
    residual,
    kept,
    K,
    eps,
    weight,
    scale,
    N,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the products of each row of x with a tile's rows of the weight, and its residuals."""
    first = tile * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    # what no kernel writes comes while those before finish
    w0 = weight_part(weight, first, N, 0, K, BLOCK_N, BLOCK_K)
    w1 = weight_part(weight, first, N, BLOCK_K, K, BLOCK_N, BLOCK_K)
    s0 = part_scales(scale, weight, first, 0, K, scale_row, scale_col, EDGE, BLOCK_K)
    s1 = part_scales(scale, weight, first, BLOCK_K, K, scale_row, scale_col, EDGE, BLOCK_K)
    n0, n1 = norm_part(norm, 0, K, BLOCK_K), norm_part(norm, BLOCK_K, K, BLOCK_K)
    s_N = row_scales(scale, first, N, EDGE, BLOCK_N)
    wait_for_inputs()
    x0, x1 = x_rows(x, 0, K, ROWS, BLOCK_K), x_rows(x, BLOCK_K, K, ROWS, BLOCK_K)
    before, roots = residuals(residual, n, N, ROWS), ()
    if norm is not None:
        roots = root_means(x, K, eps, ROWS, WIDTH)
    x0, x1 = normed_rows(x0, n0, roots, x, norm, ROWS), normed_rows(x1, n1, roots, x, norm, ROWS)
    keep(kept, x0[0], 0, K, tile)
    keep(kept, x1[0], BLOCK_K, K, tile)
    totals = no_row_products(weight, ROWS, BLOCK_N, BLOCK_K)
    totals = add_row_products(totals, w0, x0, s0, EDGE, ROWS)
    totals = add_row_products(totals, w1, x1, s1, EDGE, ROWS)
    if STAGES > 0:
        for start in tl.range(2 * BLOCK_K, K, BLOCK_K, num_stages=STAGES):
            w = weight_part(weight, first, N, start, K, BLOCK_N, BLOCK_K)
            w_K, parts = norm_part(norm, start, K, BLOCK_K), x_rows(x, start, K, ROWS, BLOCK_K)
            parts = normed_rows(parts, w_K, roots, x, norm, ROWS)
            keep(kept, parts[0], start, K, tile)
            s = part_scales(scale, weight, first, start, K, scale_row, scale_col, EDGE, BLOCK_K)
            totals = add_row_products(totals, w, parts, s, EDGE, ROWS)
    return finished_rows(totals, s_N, EDGE, ROWS), before


@jit
def row_tile(
    tile,
    x,
    norm,
    residual,
    kept,
    K,
    eps,
    weight,
    scale,
    y,
    N,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the products of the rows of x with a tile's rows of the weight."""
    ys, before = row_sums(
        tile,
        x,
        norm,
        residual,
        kept,
        K,
        eps,
        weight,
        scale,
        N,
        scale_row,
        scale_col,
        EDGE,
        ROWS,
        WIDTH,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    store_rows(y, ys, before, residual, n, N, ROWS)
