"""Gated attention of one token for each sequence: a context in parts, then the parts together.

Chosen for: decoding rows, where `ATTENTION` chooses write.

Each program has one part of one context, for the query heads that share a key head.

The first keys and values of a part are loaded while the preceding kernels still run, except those
at the last few places, which these kernels may be writing. All others were written in earlier
steps; a step begins with a kernel that is not launched early, so they are complete.

The split over the context: see parts; source, traps and rounding: see reference.

Shape letters: B sequences with one token each, n query heads, m key and value heads, d head size, S
slots, L tokens a slot holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.attention.online import LOG2_E, load_tile
from runtime.kernels.attention.parts import Parts, add_part, part_bounds
from runtime.kernels.attention.reference import attention_prefill_reference, check
from runtime.kernels.launch import jit, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


def attention_decode_reference(
    q_Bnd: Tensor,
    gate_Bnd: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
) -> Tensor:
    """Say what `attention_decode` computes, in plain torch."""
    cu_seqlens = torch.arange(q_Bnd.shape[0] + 1)
    return attention_prefill_reference(
        q_Bnd, gate_Bnd, pool_k, pool_v, slots_B, cu_seqlens, lengths_B - 1
    )


def attention_decode(
    q_Bnd: Tensor,
    gate_Bnd: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    late: int = 1,
) -> Tensor:
    """Return the gated attention [B, n, d] of one token for each sequence to its whole slot.

    q_Bnd, gate_Bnd  [B, n, d] model dtype, heads contiguous in themselves
    pool_k, pool_v   [S, L, m, d] contiguous, the B tokens included
    slots_B          [B] int32 or int64; below 0 the row is zeros
    lengths_B        [B] int32 or int64, tokens in the slot, this one included
    late             how many of the last places of a row's context this step writes: as many as
                     there are rows of one slot
    """
    check(q_Bnd, gate_Bnd, pool_k, pool_v)
    assert lengths_B.shape == slots_B.shape == q_Bnd.shape[:1], "one slot and length for each row"
    if not use_triton(q_Bnd):
        return attention_decode_reference(q_Bnd, gate_Bnd, pool_k, pool_v, slots_B, lengths_B)
    _, num_heads, head_dim = q_Bnd.shape
    kv_heads = pool_k.shape[2]
    parts = Parts.empty(q_Bnd, pool_k)
    _decode_kernel[parts.grid(kv_heads)](
        q_Bnd,
        pool_k,
        pool_v,
        parts.o,
        parts.top,
        parts.total,
        slots_B,
        lengths_B,
        late,
        pool_k.shape[1],
        num_heads,
        kv_heads,
        *q_Bnd.stride()[:2],
        head_dim**-0.5 * LOG2_E,
        **parts.options(pool_k),
        **early(),
    )
    return parts.combined(gate_Bnd)


@jit
def _decode_kernel(
    q,
    pool_k,
    pool_v,
    part_o,
    part_max,
    part_sum,
    slots,
    lengths,
    late,
    L,
    num_heads,
    kv_heads,
    q_row,
    q_head,
    scale,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    STAGES: tl.constexpr,
):
    start_next()
    part, kv_head = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot, length = tl.load(slots + b).to(tl.int64), tl.load(lengths + b).to(tl.int32)
    length = tl.where(slot >= 0, length, 0)
    first, end = part_bounds(part, length, PARTS, GRAIN)
    row = kv_heads * HEAD
    k_head = pool_k + (slot * L * kv_heads + kv_head) * HEAD
    v_head = pool_v + (slot * L * kv_heads + kv_head) * HEAD
    place = first + tl.arange(0, BLOCK_L)
    old = place < tl.minimum(end, length - late)
    k = load_tile(k_head, place, old, 0.0, row, HEAD, BLOCK_D)
    v = load_tile(v_head, place, old, 0.0, row, HEAD, BLOCK_D)
    wait_for_inputs()
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)[None, :]
    head = kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < HEAD)
    q_Gd = tl.load(q + b * q_row + head[:, None] * q_head + d, mask=inside, other=0.0)
    new = (place < end) & (place >= length - late)
    k = load_tile(k_head, place, new, k, row, HEAD, BLOCK_D)
    v = load_tile(v_head, place, new, v, row, HEAD, BLOCK_D)
    o = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_G,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    add_part(
        o,
        top,
        total,
        q_Gd,
        k,
        v,
        k_head,
        v_head,
        first,
        end,
        row,
        scale,
        part_o,
        part_max,
        part_sum,
        b,
        head,
        part,
        num_heads,
        g < GROUP,
        PARTS,
        HEAD,
        STAGES,
    )
