"""Experts with weights of four bits: few tokens in rows, more in tiles, prompts decoded before.

Chosen for: `EXPERTS` with packed weights, and `ONE_TOKEN` where packed_row does not serve.

    inner[p] = silu(gate) * up of x[t] and expert e_p          y[t] = sum_j w_j * down_e_j(inner)

Up to 8 tokens each pair of a token and an expert is a row, as in rows; beyond, pairs are sorted by
expert, as in tiles; for a prompt both stacks are decoded, and tiles takes what that gives.

Source and rounding: see layer and linear.packed.

Shape letters: T tokens, k experts per token, P = T*k pairs, E experts, H hidden, F inner size, C
chunks of 256 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import autotune, jit, tl
from runtime.kernels.linear.packed import CHUNK
from runtime.kernels.linear.packed_parts import row_factor, tile_sums
from runtime.kernels.linear.packed_rows import finish, row_parts
from runtime.kernels.linear.packed_tiles import PACKED_CHOICES, spread, spread_column, unpacked
from runtime.kernels.linear.row_parts import rounded, silu_times
from runtime.kernels.linear.tiles import block_of_rows
from runtime.kernels.linear.weight import Stored
from runtime.kernels.moe.sort import expert_block, expert_blocks
from runtime.kernels.moe.sum import Pairs
from runtime.kernels.moe.tiles import tiled_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.packed import PackedWeight

_MOST_PAIRS = 64


def packed_tokens(
    x_TH: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    residual_TH: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts [T, H], plus the residual if there is one."""
    k, num_pairs = experts_Tk.shape[1], experts_Tk.numel()
    inner_PF, y_TH = x_TH.new_empty((num_pairs, down.k)), torch.empty_like(x_TH)
    partial = row_parts(x_TH, gate_up, experts_Tk, share=k)
    finish(partial, gate_up, inner_PF, experts_Tk, gated=True)
    partial = row_parts(inner_PF, down, experts_Tk)
    finish(partial, down, y_TH, experts_Tk, residual=residual_TH, weights=weights_Tk)
    return y_TH


def packed_tiles(
    x_TH: Tensor, gate_up: PackedWeight, down: PackedWeight, weights_Tk: Tensor, experts_Tk: Tensor
) -> Pairs:
    """Return the weighted outputs of each token's experts, tiles of pairs of one expert."""
    (num_tokens, k), (num_experts, hidden, inner) = experts_Tk.shape, down.shape
    block = min(block_of_rows(num_tokens * k // num_experts), _MOST_PAIRS)
    order_P, blocks_B3 = expert_blocks(experts_Tk, num_experts, block)
    width = down.chunks * CHUNK
    make = x_TH.new_empty if width == inner else x_TH.new_zeros
    inner_PF = make((num_tokens * k, width))
    _launch(spread(x_TH, gate_up), gate_up, order_P, blocks_B3, None, inner_PF, inner, k, block)
    out_PH = x_TH.new_empty((num_tokens * k, hidden))
    _launch(inner_PF, down, order_P, blocks_B3, weights_Tk, out_PH, hidden, k, block)
    return Pairs(out_PH, k)


def unpacked_pairs(
    x_TH: Tensor, gate_up: PackedWeight, down: PackedWeight, weights_Tk: Tensor, experts_Tk: Tensor
) -> Pairs:
    """Return the weighted outputs of each token's experts, all of these decoded before."""
    up, out = Stored.of(unpacked(gate_up, x_TH.dtype)), Stored.of(unpacked(down, x_TH.dtype))
    return tiled_pairs(x_TH, up, out, weights_Tk, experts_Tk)


def _launch(
    x: Tensor,
    weight: PackedWeight,
    order_P: Tensor,
    blocks_B3: Tensor,
    weights_Tk: Tensor | None,
    out: Tensor,
    columns: int,
    k: int,
    block: int,
) -> None:
    halves = weight.shape[1] // columns
    _expert_tiles_kernel[
        lambda meta: (blocks_B3.shape[0], -(-columns * halves // meta["BLOCK_N"]))
    ](
        x,
        weight.words,
        weight.scale,
        weight.row,
        order_P,
        blocks_B3,
        weights_Tk,
        out,
        weight.shape[1],
        weight.chunks,
        columns,
        out.shape[1],
        TOP=k,
        GATED=int(weights_Tk is None),
        FP4=int(weight.is_nvfp4),
        GROUP=weight.group,
        BLOCK_M=block,
    )


@autotune(PACKED_CHOICES, key=["N", "C", "BLOCK_M", "FP4", "GROUP", "GATED"])
@jit
def _expert_tiles_kernel(
    x,
    words,
    scale,
    row,
    order,
    blocks,
    weights,
    out,
    N,
    C,
    OUT,
    out_row,
    TOP: tl.constexpr,
    GATED: tl.constexpr,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply pairs of one expert; gated, half of the rows of the weight are gate, half are up.

    Inner activations are stored spread, for the second product.
    """
    expert, place, used = expert_block(blocks, BLOCK_M)
    if expert < 0:
        return
    HALF: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first, i = tl.program_id(1) * HALF, tl.arange(0, BLOCK_N)
    n = tl.minimum(first + i % HALF, OUT - 1) + i // HALF * OUT
    pair = tl.load(order + place, mask=used, other=0)
    x_row = pair // TOP if GATED else place
    total = tile_sums(
        x,
        x_row,
        used,
        words + expert * N * C * 32,
        scale + expert * N * C * (256 // GROUP),
        n,
        N,
        C,
        0,
        C,
        FP4,
        GROUP,
        BLOCK_N,
        BLOCK_M,
        STAGES,
    )
    total *= row_factor(row + expert * N, n, n < N, FP4)[:, None]
    columns = first + tl.arange(0, HALF)
    inside = used[:, None] & (columns < OUT)[None, :]
    if GATED:
        both = tl.permute(tl.reshape(total, (2, HALF, BLOCK_M)), (2, 1, 0))
        gate, up = tl.split(both)
        y = silu_times(gate, up, out).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * out_row + spread_column(columns, FP4)[None, :], y, inside)
    else:
        weight = tl.load(weights + pair, mask=used, other=0.0).to(tl.float32)
        y = (tl.trans(rounded(total, out)) * weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + pair[:, None] * out_row + columns[None, :], y, inside)
