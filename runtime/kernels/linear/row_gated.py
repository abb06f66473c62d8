"""Gate and up of a row, or a few, in one kernel: the first half of a feed-forward.

Chosen for: `GATED` of one row on a GPU, of 2 short ones.

    y = silu(x W_gate) * (x W_up)               each of the four steps rounded to x's dtype
    norm       x is first replaced by its zero-centred RMSNorm, rounded to its dtype

How a row is read and multiplied: see row.

Trap: the rows of a program must lie within one 128-row block of scales. For the rows of `up` the
number of rows of a program, a power of two, has to divide F.

Shape letters: M rows of x, H hidden size, F inner size of the feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import silu

from runtime.kernels.conditions import A_FEW_ROWS
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.linear.row import SHORT, is_normed_before, row_blocks
from runtime.kernels.linear.row_parts import (
    add_row_products,
    finished_rows,
    no_row_products,
    norm_part,
    normed_rows,
    part_scales,
    root_means,
    row_scales,
    silu_times,
    weight_part,
    x_rows,
)
from runtime.kernels.linear.weight import Stored, Weight, check_rows, product_reference
from runtime.kernels.norm.rms import rmsnorm, rmsnorm_reference
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_GATED = {"BLOCK_N": 4, "BLOCK_K": 1024, "num_warps": 4, "STAGES": 4}
# by rows of x: a multiprocessor has four such programs at once
_GATED_SHORT = {
    1: {"BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 8, "STAGES": 3},
    2: {"BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 8, "STAGES": 3, "maxnreg": 64},
}


def row_gated_reference(
    x_MH: Tensor, gate_up: Weight, norm_H: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Say what `row_gated` computes, in plain torch."""
    normed = x_MH if norm_H is None else rmsnorm_reference(x_MH, norm_H, eps)
    gate, up = product_reference(normed, gate_up).chunk(2, dim=-1)
    return silu(gate) * up


def row_gated(
    x_MH: Tensor, gate_up: Weight, norm_H: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Return silu(gate) * up [M, F] of [gate | up] = x gate_up^T, of norm(x) if there is a norm.

    x_MH     [M, H] contiguous, M at most 2
    gate_up  [2F, H], gate rows first
    norm_H   [H], stored as w: the factor is 1 + w
    """
    if not use_triton(x_MH):
        return row_gated_reference(x_MH, gate_up, norm_H, eps)
    if norm_H is not None and is_normed_before(x_MH, gate_up):
        x_MH, norm_H = rmsnorm(x_MH, norm_H, eps), None
    stored, (rows, hidden) = Stored.of(gate_up), check_rows(x_MH, A_FEW_ROWS)
    assert x_MH.is_contiguous(), "rows must follow one another"
    inner = stored.values.shape[0] // 2
    assert stored.values.shape == (2 * inner, hidden), "gate_up must be [2F, H]"
    out_MF = x_MH.new_empty((rows, inner))
    blocks = row_blocks(_GATED if hidden > SHORT else _GATED_SHORT[rows], hidden, inner)
    _gated_kernel[(-(-inner // blocks["BLOCK_N"]),)](
        x_MH,
        norm_H,
        stored.values,
        stored.scale,
        out_MF,
        hidden,
        inner,
        *stored.scale_strides,
        eps,
        ROWS=rows,
        EDGE=stored.edge,
        WIDTH=power_of_two(hidden),
        **blocks,
        **early(),
    )
    return out_MF


@jit
def gated_row_sums(
    x,
    norm,
    eps,
    gate_up,
    scale,
    first,
    H,
    F,
    scale_row,
    scale_col,
    WAIT: tl.constexpr,
    ROWS: tl.constexpr,
    EDGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return (gate, up) of each row, BLOCK_N columns from `first` on, in float32.

    WAIT  1: the kernels before may still be writing x when the weights are asked for
    """
    up_first, up_last = F + first, 2 * F
    g0 = weight_part(gate_up, first, F, 0, H, BLOCK_N, BLOCK_K)
    u0 = weight_part(gate_up, up_first, up_last, 0, H, BLOCK_N, BLOCK_K)
    g1 = weight_part(gate_up, first, F, BLOCK_K, H, BLOCK_N, BLOCK_K)
    u1 = weight_part(gate_up, up_first, up_last, BLOCK_K, H, BLOCK_N, BLOCK_K)
    n0, n1 = norm_part(norm, 0, H, BLOCK_K), norm_part(norm, BLOCK_K, H, BLOCK_K)
    sg0 = part_scales(scale, gate_up, first, 0, H, scale_row, scale_col, EDGE, BLOCK_K)
    su0 = part_scales(scale, gate_up, up_first, 0, H, scale_row, scale_col, EDGE, BLOCK_K)
    sg1 = part_scales(scale, gate_up, first, BLOCK_K, H, scale_row, scale_col, EDGE, BLOCK_K)
    su1 = part_scales(scale, gate_up, up_first, BLOCK_K, H, scale_row, scale_col, EDGE, BLOCK_K)
    sg_N = row_scales(scale, first, F, EDGE, BLOCK_N)
    su_N = row_scales(scale, up_first, up_last, EDGE, BLOCK_N)
    if WAIT > 0:
        wait_for_inputs()
    x0, x1 = x_rows(x, 0, H, ROWS, BLOCK_K), x_rows(x, BLOCK_K, H, ROWS, BLOCK_K)
    roots = ()
    if norm is not None:
        roots = root_means(x, H, eps, ROWS, WIDTH)
    gate = no_row_products(gate_up, ROWS, BLOCK_N, BLOCK_K)
    up = no_row_products(gate_up, ROWS, BLOCK_N, BLOCK_K)
    x0, x1 = normed_rows(x0, n0, roots, x, norm, ROWS), normed_rows(x1, n1, roots, x, norm, ROWS)
    gate = add_row_products(gate, g0, x0, sg0, EDGE, ROWS)
    up = add_row_products(up, u0, x0, su0, EDGE, ROWS)
    gate = add_row_products(gate, g1, x1, sg1, EDGE, ROWS)
    up = add_row_products(up, u1, x1, su1, EDGE, ROWS)
    if STAGES > 0:
        for start in tl.range(2 * BLOCK_K, H, BLOCK_K, num_stages=STAGES):
            g = weight_part(gate_up, first, F, start, H, BLOCK_N, BLOCK_K)
            u = weight_part(gate_up, up_first, up_last, start, H, BLOCK_N, BLOCK_K)
            w_K, parts = norm_part(norm, start, H, BLOCK_K), x_rows(x, start, H, ROWS, BLOCK_K)
            parts = normed_rows(parts, w_K, roots, x, norm, ROWS)
            sg = part_scales(scale, gate_up, first, start, H, scale_row, scale_col, EDGE, BLOCK_K)
            su = part_scales(
                scale, gate_up, up_first, start, H, scale_row, scale_col, EDGE, BLOCK_K
            )
            gate = add_row_products(gate, g, parts, sg, EDGE, ROWS)
            up = add_row_products(up, u, parts, su, EDGE, ROWS)
    return finished_rows(gate, sg_N, EDGE, ROWS), finished_rows(up, su_N, EDGE, ROWS)


@jit
def gated_sums(
    x,
    norm,
    eps,
    gate_up,
    scale,
    first,
    H,
    F,
    scale_row,
    scale_col,
    WAIT: tl.constexpr,
    EDGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return (gate, up) of one row: see `gated_row_sums`."""
    gates, ups = gated_row_sums(
        x,
        norm,
        eps,
        gate_up,
        scale,
        first,
        H,
        F,
        scale_row,
        scale_col,
        WAIT,
        1,
        EDGE,
        WIDTH,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    return gates[0], ups[0]


@jit
def _gated_kernel(
    x,
    norm,
    gate_up,
    scale,
    out,
    H,
    F,
    scale_row,
    scale_col,
    eps,
    ROWS: tl.constexpr,
    EDGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    start_next()
    gates, ups = gated_row_sums(
        x,
        norm,
        eps,
        gate_up,
        scale,
        first,
        H,
        F,
        scale_row,
        scale_col,
        1,
        ROWS,
        EDGE,
        WIDTH,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    n = first + tl.arange(0, BLOCK_N)
    for row in tl.static_range(ROWS):
        y_N = silu_times(gates[row], ups[row], out).to(out.dtype.element_ty)
        tl.store(out + row * F + n, y_N, mask=n < F)
