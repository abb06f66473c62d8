"""Gated causal attention of prompts by warps with roles: some load, two groups multiply.

Chosen for: `PROMPTS` on Hopper in 16 bits, heads of 256 in pairs of one key head, 64 tokens or more
a sequence.

What it computes is in prefill and reference, what a program does in roles_tile, how warps work
together in ring. A group of warps has 64 queries of one head: what they and 256 columns add up
takes half of its registers. Two heads of one key head read the same tiles of keys to the end.

Shape letters: T packed tokens, N sequences, n query heads, m key and value heads, d head size, S
slots, L tokens a slot holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.attention import roles_tile
from runtime.kernels.attention.online import LOG2_E
from runtime.kernels.launch import HAS_GLUON, gl, ragged_blocks
from runtime.kernels.ring import PARTS, multiprocessors

if HAS_GLUON:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

HEAD = 256
QUERIES = 64
_OPTIONS = {"K_STAGES": 2, "V_STAGES": 2, "MULTIPLY": 232, "LOAD": 40, **PARTS}


def roles_prefill(
    q_Tnd: Tensor,
    gate_Tnd: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_N: Tensor,
    cu_seqlens: Tensor,
    start_N: Tensor,
) -> Tensor:
    """Return `attention_prefill` by the kernel; d is 256 and n / m even."""
    (num_tokens, num_heads, head_dim), num_sequences = q_Tnd.shape, slots_N.shape[0]
    num_slots, length, kv_heads, _ = pool_k.shape
    assert head_dim == HEAD, "heads must be of 256"
    assert num_heads // kv_heads % 2 == 0, "two heads of a program must have one key head"
    y_Tnd = torch.empty(q_Tnd.shape, dtype=q_Tnd.dtype, device=q_Tnd.device)
    row, width = q_Tnd.stride()[:2]
    pool, wide = num_slots * length, kv_heads * HEAD
    pairs, blocks = num_heads // 2, ragged_blocks(num_tokens, num_sequences, QUERIES)
    programs = min(multiprocessors(q_Tnd.get_device()), pairs * blocks)
    roles_tile.kernel[(programs,)](
        _tiles(q_Tnd, num_tokens, (num_heads - 1) * width + HEAD, row),
        _tiles(pool_k, pool, wide, wide),
        _tiles(pool_v, pool, wide, wide),
        pool_v,
        gate_Tnd,
        y_Tnd,
        slots_N,
        cu_seqlens,
        start_N,
        num_sequences,
        length,
        pairs,
        blocks,
        num_heads // kv_heads,
        wide,
        width,
        *gate_Tnd.stride()[:2],
        HEAD**-0.5 * LOG2_E,
        STEPS=num_sequences.bit_length(),
        **_OPTIONS,
    )
    return y_Tnd


def _tiles(x: Tensor, rows: int, columns: int, row: int) -> Any:
    """Return a descriptor of rows `row` apart; a tile is 64 of them, of one head."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    return TensorDescriptor(x, [rows, columns], [row, 1], [QUERIES, HEAD], layout)
