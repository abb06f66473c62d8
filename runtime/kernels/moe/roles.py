"""Experts for prompts by warps with roles: some load, some multiply, and these take turns.

Chosen for: `EXPERTS` of prompts on Hopper, quantised, block scales, whole groups of 128.

What it computes, and in which steps, is in w8a8, whose kernels do both with all warps: their sums
leave the tensor cores every 128 columns to be scaled in float32, and nothing hides that. Here a
program is as large as a multiprocessor and walks along tiles; the warps that load go on to the next
one. How warps work together is in ring.

Shape letters: T tokens, k experts per token, P = T*k pairs, H hidden, F inner size, B blocks of
pairs of one expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.encode.rows import Codes, quantize_rows
from runtime.kernels.linear.weight import BLOCK
from runtime.kernels.moe import roles_down, roles_gate_up
from runtime.kernels.moe.roles_down import down_kernel
from runtime.kernels.moe.roles_gate_up import gate_up_kernel
from runtime.kernels.moe.sort import expert_blocks
from runtime.kernels.moe.sum import Pairs
from runtime.kernels.ring import TILE, multiprocessors, tiles

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Stored


def roles_pairs(
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
    num_experts, hidden, inner = down.values.shape
    num_pairs, k = weights_Tk.numel(), experts_Tk.shape[1]
    order_P, blocks_B3 = expert_blocks(experts_Tk, num_experts, TILE)
    x, x_scale = codes or quantize_rows(x_TH, BLOCK)
    inner_codes = Codes.room(num_pairs, inner, x.device, multiple=1)
    out_PH = x_TH.new_empty((num_pairs, hidden))
    programs = (multiprocessors(x.get_device()),)
    gate_up_kernel[programs](
        x,
        x_scale,
        tiles(gate_up.values.flatten(0, 1)),
        gate_up.scale,
        order_P,
        blocks_B3,
        *inner_codes,
        out_PH,
        x_scale.stride(1),
        hidden,
        inner,
        num_pairs,
        blocks_B3.shape[0],
        *gate_up.scale_strides[:2],
        TOP=k,
        GROUPS=inner // BLOCK,
        **roles_gate_up.OPTIONS,
    )
    down_kernel[programs](
        tiles(inner_codes.codes),
        inner_codes.scale,
        tiles(down.values.flatten(0, 1)),
        down.scale,
        order_P,
        blocks_B3,
        weights_Tk,
        out_PH,
        num_pairs,
        hidden,
        blocks_B3.shape[0],
        *down.scale_strides[:2],
        **roles_down.options(inner // BLOCK),
    )
    return Pairs(out_PH, k)
