"""One row, normed, times an FP8 weight whose rows a few warps hold: a program has a strip of rows.

Chosen for: `ROW_PRODUCTS` with large FP8 weights of 2048 columns.

    y[n] = sum_k norm(x)[k] * w[n, k]             summed in float32, rounded once; see row

The row is normed once for a strip and stays in registers. Half of a strip's rows are being copied
into shared memory before the kernel waits for x. The half is measured: copying all of them takes
bandwidth from the preceding kernels, copying a quarter leaves the kernel waiting for its own
weights. All strips of a layer's first product run at once, so none starts after x is ready.

Trap: the wait is in the loop, in its first iteration. If it came before the loop, the compiler
would start the copies after it.

Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.linear.row_parts import (
    add_products,
    no_products,
    norm_part,
    normed,
    part_scales,
    row_scales,
    weight_part,
    x_part,
)
from runtime.kernels.linear.weight import NO_PRODUCT, Stored, check_rows
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Weight

# Twelve layers of 35B-A3B on an H100 took 764 us with these, 785 with another kernel for the norm;
# strips of 8 rows 784, of 32 803; 4 warps 772; one row a turn 771, four 780; a quarter ahead 780.
_STRIP = {"ROWS": 16, "TILE": 2, "STAGES": 5, "num_warps": 2}


def strips(x_1K: Tensor, norm_K: Tensor, eps: float, *weights: Weight) -> tuple[Tensor, ...]:
    """Return norm(x) @ weight.T [1, N] in x's dtype for each of one or two weights [N, K].

    The second one is small: a program has one row of it.
    """
    first, *more = stored = [Stored.of(weight) for weight in weights]
    _, k = check_rows(x_1K, 1, *stored)
    outputs = tuple(x_1K.new_empty((1, w.values.shape[0])) for w in stored)
    programs, second = -(-outputs[0].shape[1] // _STRIP["ROWS"]), NO_PRODUCT
    if more:
        programs += outputs[1].shape[1]
        second = more[0].to_product(outputs[1])
    _strips_kernel[(programs,)](
        x_1K,
        norm_K,
        k,
        eps,
        *first.to_product(outputs[0]),
        *second,
        EDGE=first.edge,
        EDGE2=more[0].edge if more else 0,
        WIDTH=max(power_of_two(k), 16),
        **_STRIP,
        **early(),
    )
    return outputs


@jit
def _strip(
    first,
    x,
    norm,
    K,
    eps,
    weight,
    scale,
    y,
    N,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows from `first` on, TILE at a time; they lie within one block of scales."""
    n, turn = first + tl.arange(0, ROWS), tl.arange(0, ROWS // TILE)[:, None]
    w_K = norm_part(norm, 0, K, WIDTH)
    s = part_scales(scale, weight, first, 0, K, scale_row, scale_col, EDGE, WIDTH)
    s_N = row_scales(scale, first, N, EDGE, ROWS)
    x_K, sums = tl.zeros((WIDTH,), tl.float32), tl.zeros((ROWS // TILE, TILE), tl.float32)
    for i in tl.range(0, ROWS // TILE, num_stages=STAGES):
        w = weight_part(weight, first + i * TILE, N, 0, K, TILE, WIDTH)
        if i == 0:
            wait_for_inputs()
            x_K = x_part(x, 0, K, WIDTH)
            x_K = normed(x_K, w_K, tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps), x, norm)
        total = add_products(no_products(weight, TILE, WIDTH), w, x_K, s, EDGE)
        sums = tl.where(turn == i, tl.sum(total, 1)[None, :], sums)
    y_N = tl.reshape(sums, (ROWS,))
    if EDGE == 1:
        y_N *= s_N.to(tl.float32)
    tl.store(y + n, y_N.to(y.dtype.element_ty), mask=n < N)


@jit
def _strips_kernel(
    x,
    norm,
    K,
    eps,
    weight,
    scale,
    y,
    N,
    scale_row,
    scale_col,
    weight2,
    scale2,
    y2,
    N2,
    scale_row2,
    scale_col2,
    EDGE: tl.constexpr,
    EDGE2: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take a row of the second weight, whose programs come first and end first, or a strip."""
    start_next()
    program = tl.program_id(0)
    if weight2 is None or program >= N2:
        _strip(
            (program - N2) * ROWS,
            x,
            norm,
            K,
            eps,
            weight,
            scale,
            y,
            N,
            scale_row,
            scale_col,
            EDGE,
            WIDTH,
            ROWS,
            TILE,
            STAGES,
        )
    else:
        _strip(
            program,
            x,
            norm,
            K,
            eps,
            weight2,
            scale2,
            y2,
            N2,
            scale_row2,
            scale_col2,
            EDGE2,
            WIDTH,
            1,
            1,
            1,
        )
