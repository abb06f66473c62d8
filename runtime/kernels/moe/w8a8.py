"""Experts for many tokens with activations in FP8 too, scales for 128 columns or 128 x 128 weights.

Chosen for: `EXPERTS` of more than 16 tokens, quantised, with block scales and whole groups of 128,
but for those of roles.

    inner[p] = quantised(silu(gate) * up) of codes(x[t]) and expert e_p
    y[t] = sum_j w_j * down_e_j(inner)

Tokens are the left operand here: the scale of a token then belongs to a row of the sums, of which a
thread has two, and that of a weight to all of a tile. The tensor cores keep about 14 bits of an FP8
sum, so 128 columns are summed there, then added in float32. The inner activations are rounded to
the model dtype, then quantised, before they leave: F is a multiple of 128.

The second product: see w8a8_down.

An expert's last block may hold few pairs. Up to 64, the fewest rows that the tensor cores take from
four warps, it is a tile of 64 rows: the same sums at half the cost.

Source and rounding: see layer and encode.rows.

Shape letters: T tokens, k experts per token, P = T*k pairs, H hidden, F inner size, G groups of 128
columns, B blocks of pairs of one expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.encode.rows import Codes, quantize_rows, quantized
from runtime.kernels.launch import autotune, jit, operand, power_of_two, tl
from runtime.kernels.linear.row_parts import rounded, silu_times
from runtime.kernels.linear.tiles import block_of_rows
from runtime.kernels.linear.weight import BLOCK
from runtime.kernels.moe.sort import block_of, expert_blocks
from runtime.kernels.moe.sum import Pairs
from runtime.kernels.moe.w8a8_down import down_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Stored

# codes of a block's inner activations that stay on chip
_KEPT = 1 << 16
# A last block of so many pairs is half a tile. Eight layers of 35B-A3B with the head, milliseconds
# on an H100 for 8192 tokens: 17.8, without such tails 18.6, with all of them last in the grid 18.7;
# two programs for the outputs of a block 18.1, all columns of a block before the next block 17.9.
_TAIL = 64


def most_pairs(inner: int) -> int:
    """Return how many pairs a block may have: fewer read weights again, more are not kept."""
    return min(128, max(16, _KEPT // power_of_two(inner)))


def w8a8_pairs(
    x_TH: Tensor,
    gate_up: Stored,
    down: Stored,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    codes: Codes | None = None,
) -> Pairs:
    """Return the weighted outputs of each token's experts.

    codes  those of x in groups of 128, if there are any
    """
    (num_tokens, k), (num_experts, hidden, inner) = experts_Tk.shape, down.values.shape
    block = min(block_of_rows(num_tokens * k // num_experts), most_pairs(inner))
    order_P, blocks_B3 = expert_blocks(experts_Tk, num_experts, block)
    num_pairs, num_blocks, tail = weights_Tk.numel(), blocks_B3.shape[0], min(_TAIL, block)
    x, x_scale = codes or quantize_rows(x_TH, BLOCK)
    inner_codes = Codes.room(num_pairs, inner, x.device, multiple=1)
    out_PH = x_TH.new_empty((num_pairs, hidden))
    _gate_up_kernel[(num_blocks, inner // BLOCK)](
        x,
        x_scale,
        gate_up.values,
        gate_up.scale,
        order_P,
        blocks_B3,
        *inner_codes,
        out_PH,
        x_scale.stride(1),
        hidden,
        inner,
        num_pairs,
        *gate_up.scale_strides[:2],
        TOP=k,
        BLOCK_M=block,
        TAIL=tail,
    )
    down_kernel[(num_blocks,)](
        *inner_codes,
        down.values,
        down.scale,
        order_P,
        blocks_B3,
        weights_Tk,
        out_PH,
        num_pairs,
        hidden,
        inner,
        *down.scale_strides[:2],
        GROUPS=inner // BLOCK,
        BLOCK_M=block,
        TAIL=tail,
    )
    return Pairs(out_PH, k)


@autotune(
    [{"num_warps": w, "num_stages": s} for w, s in ((8, 3), (8, 4), (4, 3), (4, 2))],
    key=["H", "F", "BLOCK_M", "TAIL"],
)
@jit
def _gate_up_kernel(
    x,
    x_scale,
    gate_up,
    scale,
    order,
    blocks,
    codes,
    codes_scale,
    like,
    x_group,
    H,
    F,
    P,
    scale_expert,
    scale_row,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,
):
    expert, first, end = block_of(blocks)
    group = tl.program_id(1)
    if expert < 0:
        return
    if TAIL < BLOCK_M and end - first <= TAIL:
        _gate_up_tile(
            x,
            x_scale,
            gate_up,
            scale,
            order,
            expert,
            group,
            first,
            end,
            codes,
            codes_scale,
            like,
            x_group,
            H,
            F,
            P,
            scale_expert,
            scale_row,
            TOP,
            TAIL,
        )
        return
    _gate_up_tile(
        x,
        x_scale,
        gate_up,
        scale,
        order,
        expert,
        group,
        first,
        end,
        codes,
        codes_scale,
        like,
        x_group,
        H,
        F,
        P,
        scale_expert,
        scale_row,
        TOP,
        BLOCK_M,
    )


@jit
def _gate_up_tile(
    x,
    x_scale,
    gate_up,
    scale,
    order,
    expert,
    group,
    first,
    end,
    codes,
    codes_scale,
    like,
    x_group,
    H,
    F,
    P,
    scale_expert,
    scale_row,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    t = tl.load(order + place, mask=used, other=0) // TOP
    n = tl.arange(0, 128)
    k = tl.arange(0, 128)
    x_rows = x + t[:, None] * H + k[None, :]
    w_rows = gate_up + (expert * 2 * F + group * 128 + n)[None, :] * H + k[:, None]
    up_rows = w_rows + F * H
    s_gate = scale + expert * scale_expert + group * scale_row
    s_up = s_gate + F // 128 * scale_row
    gate = tl.zeros((BLOCK_M, 128), tl.float32)
    up = tl.zeros((BLOCK_M, 128), tl.float32)
    # scales are loaded a step ahead: the tensor cores would wait for them
    s_M = tl.load(x_scale + t)
    gate_s, up_s = tl.load(s_gate), tl.load(s_up)
    groups = H // 128
    for g in range(0, groups):
        x_MK = operand(tl.load(x_rows + g * 128))
        after = tl.minimum(g + 1, groups - 1)
        next_M = tl.load(x_scale + after * x_group + t)
        next_gate, next_up = tl.load(s_gate + after), tl.load(s_up + after)
        product = tl.dot(x_MK, operand(tl.load(w_rows + g * 128)))
        gate += product * (s_M * gate_s.to(tl.float32))[:, None]
        product = tl.dot(x_MK, operand(tl.load(up_rows + g * 128)))
        up += product * (s_M * up_s.to(tl.float32))[:, None]
        s_M, gate_s, up_s = next_M, next_gate, next_up
    inner = rounded(silu_times(gate, up, like), like)
    q, s = quantized(inner, codes)
    tl.store(codes + place[:, None] * F + group * 128 + n[None, :], q, mask=used[:, None])
    tl.store(codes_scale + group * P + place, s, mask=used)
