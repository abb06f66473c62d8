"""Experts for many tokens: pairs of a token and an expert, sorted by expert, in tiles.

Chosen for: `EXPERTS` of more than 8 tokens that w8a8 does not take.

    inner[p] = silu(gate) * up of x[t] and expert e_p          y[t] = sum_j w_j * down_e_j(inner)

A tile has up to 128 pairs of one expert, found by gathering rows of x. Gate and up rows of the
weight lie side by side in one operand: their sums are split only at the end.

Source and rounding: see layer.

Shape letters: T tokens, k experts per token, P = T*k pairs, E experts, H hidden, F inner size, B
blocks of pairs of one expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.encode.rows import quantize_rows
from runtime.kernels.launch import autotune, jit, tl
from runtime.kernels.linear.row_parts import rounded, silu_times
from runtime.kernels.linear.tiles import add_product, block_of_rows, scale_rows
from runtime.kernels.linear.weight import BLOCK
from runtime.kernels.moe.sort import expert_block, expert_blocks
from runtime.kernels.moe.sum import Pairs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Stored

_MOST_PAIRS = 64  # with 128, tiles of two sums spill registers


def tiled_pairs(
    x_TH: Tensor, gate_up: Stored, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor
) -> Pairs:
    """Return the weighted outputs of each token's experts, x and inner activations as they are."""
    return _tiled(x_TH, gate_up, down, weights_Tk, experts_Tk, quantise=False)


def tiled_codes(
    x_TH: Tensor, gate_up: Stored, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor
) -> Pairs:
    """Return the weighted outputs of each token's experts, x and inner activations quantised."""
    return _tiled(x_TH, gate_up, down, weights_Tk, experts_Tk, quantise=True)


def _tiled(
    x_TH: Tensor,
    gate_up: Stored,
    down: Stored,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    *,
    quantise: bool,
) -> Pairs:
    num_tokens, k = experts_Tk.shape
    num_experts, hidden, inner = down.values.shape
    block = min(block_of_rows(num_tokens * k // num_experts), _MOST_PAIRS)
    order_P, blocks_B3 = expert_blocks(experts_Tk, num_experts, block)
    num_blocks = blocks_B3.shape[0]
    inner_PF = x_TH.new_empty((num_tokens * k, inner))
    x, x_scale = _activations(x_TH, gate_up, quantise=quantise)
    _gate_up_kernel[lambda meta: (num_blocks, -(-2 * inner // meta["BLOCK_N"]))](
        x,
        x_scale,
        gate_up.values,
        gate_up.scale,
        order_P,
        blocks_B3,
        inner_PF,
        num_tokens,
        hidden,
        inner,
        *gate_up.scale_strides,
        TOP=k,
        EDGE=gate_up.edge,
        BLOCK_M=block,
    )
    out_PH = x_TH.new_empty((num_tokens * k, hidden))
    x, x_scale = _activations(inner_PF, down, quantise=quantise)
    _down_kernel[lambda meta: (num_blocks, -(-hidden // meta["BLOCK_N"]))](
        x,
        x_scale,
        down.values,
        down.scale,
        order_P,
        blocks_B3,
        weights_Tk,
        out_PH,
        num_tokens * k,
        hidden,
        inner,
        *down.scale_strides,
        EDGE=down.edge,
        BLOCK_M=block,
    )
    return Pairs(out_PH, k)


def _activations(x: Tensor, weight: Stored, *, quantise: bool) -> tuple[Tensor, Tensor | None]:
    return quantize_rows(x, x.shape[1] if weight.edge == 1 else BLOCK) if quantise else (x, None)


TILE_CHOICES = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    for n, k, warps, stages in (
        (128, 128, 4, 3),
        (128, 128, 4, 4),
        (128, 128, 8, 4),
        (128, 64, 8, 4),
        (64, 128, 4, 4),
    )
]


@autotune(TILE_CHOICES, key=["H", "F", "BLOCK_M", "EDGE"])
@jit
def _gate_up_kernel(
    x,
    x_scale,
    gate_up,
    scale,
    order,
    blocks,
    inner,
    T,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    TOP: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, place, used = expert_block(blocks, BLOCK_M)
    if expert < 0:
        return
    HALF: tl.constexpr = BLOCK_N // 2
    t = tl.load(order + place, mask=used, other=0) // TOP
    n = tl.arange(0, BLOCK_N)
    f = tl.program_id(1) * HALF + n % HALF
    row = tl.where(n < HALF, f, F + f)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + t[None, :] * H + k[:, None]
    w_rows = gate_up + (expert * 2 * F + row)[:, None] * H + k[None, :]
    s = scale + expert * scale_expert
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, H, BLOCK_K):
        left = k < H - start
        x_KM = tl.load(x_rows + start, mask=used[None, :] & left[:, None], other=0.0)
        w_NK = tl.load(w_rows + start, mask=(f < F)[:, None] & left[None, :], other=0.0)
        total = add_product(
            total,
            w_NK,
            x_KM,
            s,
            x_scale,
            row,
            t,
            f < F,
            used,
            start,
            T,
            scale_row,
            scale_col,
            EDGE,
        )
    total = scale_rows(total, s, x_scale, row, t, f < F, used, EDGE)
    both = tl.permute(tl.reshape(total, (2, HALF, BLOCK_M)), (2, 1, 0))
    gate, up = tl.split(both)
    product = silu_times(gate, up, inner).to(inner.dtype.element_ty)
    f = tl.program_id(1) * HALF + tl.arange(0, HALF)
    at = place[:, None] * F + f[None, :]
    tl.store(inner + at, product, mask=used[:, None] & (f < F)[None, :])


@autotune(TILE_CHOICES, key=["H", "F", "BLOCK_M", "EDGE"])
@jit
def _down_kernel(
    inner,
    x_scale,
    down,
    scale,
    order,
    blocks,
    weights,
    out,
    P,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, place, used = expert_block(blocks, BLOCK_M)
    if expert < 0:
        return
    h = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = inner + place[None, :] * F + k[:, None]
    w_rows = down + (expert * H + h)[:, None] * F + k[None, :]
    s = scale + expert * scale_expert
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, F, BLOCK_K):
        left = k < F - start
        x_KM = tl.load(x_rows + start, mask=used[None, :] & left[:, None], other=0.0)
        w_NK = tl.load(w_rows + start, mask=(h < H)[:, None] & left[None, :], other=0.0)
        total = add_product(
            total,
            w_NK,
            x_KM,
            s,
            x_scale,
            h,
            place,
            h < H,
            used,
            start,
            P,
            scale_row,
            scale_col,
            EDGE,
        )
    total = scale_rows(total, s, x_scale, h, place, h < H, used, EDGE)
    pair = tl.load(order + place, mask=used, other=0)
    weight = tl.load(weights + pair, mask=used, other=0.0).to(tl.float32)
    y_MN = (tl.trans(rounded(total, out)) * weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + pair[:, None] * H + h[None, :], y_MN, mask=used[:, None] & (h < H)[None, :])
