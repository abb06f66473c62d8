"""Experts for a few tokens: each pair of a token and one of its experts is one row.

Chosen for: `EXPERTS` of 8 tokens or fewer.

    inner[p] = silu(gate) * up of x[t] and expert e_p          y[t] = sum_j w_j * down_e_j(inner)

Source and rounding: see layer. For a single token see row.

Shape letters: T tokens, k experts per token, P = T*k pairs, H hidden, F inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.linear.row import row_blocks
from runtime.kernels.linear.row_gated import gated_sums
from runtime.kernels.linear.row_parts import (
    add_products,
    finished,
    no_products,
    part_scales,
    rounded,
    row_scales,
    silu_times,
    weight_part,
    x_part,
)
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Stored

_GATED = {"BLOCK_N": 4, "BLOCK_K": 1024, "num_warps": 4, "STAGES": 4}
_DOWN = {"BLOCK_N": 4, "num_warps": 2, "STAGES": 5}


def few_tokens(
    x_TH: Tensor, gate_up: Stored, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts [T, H]."""
    inner_PF = _gated(x_TH, gate_up, experts_Tk)
    return _down(inner_PF, down, weights_Tk, experts_Tk)


def _gated(x_TH: Tensor, gate_up: Stored, experts_Tk: Tensor) -> Tensor:
    (num_tokens, k), hidden, inner = experts_Tk.shape, x_TH.shape[1], gate_up.values.shape[1] // 2
    blocks = row_blocks(_GATED, hidden, inner)
    inner_PF = x_TH.new_empty((num_tokens * k, inner))
    _gated_kernel[(-(-inner // blocks["BLOCK_N"]), num_tokens * k)](
        x_TH,
        gate_up.values,
        gate_up.scale,
        experts_Tk,
        inner_PF,
        hidden,
        inner,
        *gate_up.scale_strides,
        TOP=k,
        EDGE=gate_up.edge,
        **blocks,
        **early(),
    )
    return inner_PF


def _down(inner_PF: Tensor, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
    (num_tokens, k), (hidden, inner) = experts_Tk.shape, down.values.shape[1:]
    y_TH = inner_PF.new_empty((num_tokens, hidden))
    blocks = _DOWN | {"BLOCK_K": max(power_of_two(inner), 16)}
    _down_kernel[(-(-hidden // blocks["BLOCK_N"]), num_tokens)](
        inner_PF,
        down.values,
        down.scale,
        experts_Tk,
        weights_Tk,
        y_TH,
        hidden,
        inner,
        *down.scale_strides,
        TOP=k,
        EDGE=down.edge,
        **blocks,
        **early(),
    )
    return y_TH


@jit
def _gated_kernel(
    x,
    gate_up,
    scale,
    experts,
    inner,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    TOP: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    pair = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    start_next()
    wait_for_inputs()
    expert = tl.load(experts + pair)
    row = x + (pair // TOP).to(tl.int64) * H
    gate, up = gated_sums(
        row,
        None,
        0.0,
        gate_up + expert * 2 * F * H,
        scale + expert * scale_expert,
        first,
        H,
        F,
        scale_row,
        scale_col,
        0,
        EDGE,
        1,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    n = first + tl.arange(0, BLOCK_N)
    product = silu_times(gate, up, inner).to(inner.dtype.element_ty)
    tl.store(inner + pair.to(tl.int64) * F + n, product, mask=n < F)


@jit
def _down_kernel(
    inner,
    down,
    scale,
    experts,
    weights,
    y,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    TOP: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_K spans F."""
    t = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    start_next()
    wait_for_inputs()
    y_N = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.range(0, TOP, num_stages=STAGES):
        pair = t * TOP + j
        expert = tl.load(experts + pair)
        s = scale + expert * scale_expert
        w = weight_part(down + expert * H * F, first, H, 0, F, BLOCK_N, BLOCK_K)
        s_F = part_scales(s, down, first, 0, F, scale_row, scale_col, EDGE, BLOCK_K)
        x_F = x_part(inner + pair * F, 0, F, BLOCK_K)
        total = no_products(down, BLOCK_N, BLOCK_K)
        total = add_products(total, w, x_F, s_F, EDGE)
        out = rounded(finished(total, row_scales(s, first, H, EDGE, BLOCK_N), EDGE), y)
        y_N += rounded(out * tl.load(weights + pair).to(tl.float32), y)
    tl.store(y + t * H + rows, y_N.to(y.dtype.element_ty), mask=rows < H)
