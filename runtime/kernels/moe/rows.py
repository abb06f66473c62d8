"""Experts for a few tokens: each pair of a token and one of its experts is one row.

Chosen for: `EXPERTS` of 8 tokens or fewer.

    inner[p] = silu(gate) * up of x[t] and expert e_p          out[p] = w_p * down_e_p(inner[p])

A token's rows are summed by the norm after them: see sum. A program of the second kernel loads its
weights while the first kernel still runs.

Source and rounding: see layer. For a single token see row.
Trap: the second kernel reads which experts there are before it waits for the first one. That kernel
lets it start only after it has itself waited, when all kernels before it have finished. They are
read past the nearest cache, which may still hold those of an earlier layer.

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
from runtime.kernels.moe.sum import Pairs
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Stored

# Measured on an H200, 8 tokens of 35B-A3B in FP8: both 51.2 us, 54.1 with half the rows of each;
# down alone 17.4, 23 with 8 rows, 45 with 4
_GATED = {"BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 4, "STAGES": 4}
_DOWN = {"BLOCK_N": 32, "num_warps": 4}


def few_pairs(
    x_TH: Tensor, gate_up: Stored, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor
) -> Pairs:
    """Return the weighted outputs of each token's experts."""
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


def _down(inner_PF: Tensor, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor) -> Pairs:
    (num_tokens, k), (hidden, inner) = experts_Tk.shape, down.values.shape[1:]
    out_PH = inner_PF.new_empty((num_tokens * k, hidden))
    blocks = _DOWN | {"BLOCK_K": max(power_of_two(inner), 16)}
    _down_kernel[(-(-hidden // blocks["BLOCK_N"]), num_tokens * k)](
        inner_PF,
        down.values,
        down.scale,
        experts_Tk,
        weights_Tk,
        out_PH,
        hidden,
        inner,
        *down.scale_strides,
        EDGE=down.edge,
        **blocks,
        **early(),
    )
    return Pairs(out_PH, k)


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
    wait_for_inputs()
    start_next()
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
    out,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of a pair; BLOCK_K spans F."""
    start_next()
    pair, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_N
    expert = tl.load(experts + pair, cache_modifier=".cg")
    s = scale + expert * scale_expert
    w = weight_part(down + expert * H * F, first, H, 0, F, BLOCK_N, BLOCK_K)
    s_F = part_scales(s, down, first, 0, F, scale_row, scale_col, EDGE, BLOCK_K)
    s_N = row_scales(s, first, H, EDGE, BLOCK_N)
    share = tl.load(weights + pair, cache_modifier=".cg").to(tl.float32)
    wait_for_inputs()
    x_F = x_part(inner + pair * F, 0, F, BLOCK_K)
    total = add_products(no_products(down, BLOCK_N, BLOCK_K), w, x_F, s_F, EDGE)
    y_N = rounded(finished(total, s_N, EDGE), out) * share
    n = first + tl.arange(0, BLOCK_N)
    tl.store(out + pair * H + n, y_N.to(out.dtype.element_ty), mask=n < H)
