"""Gated causal attention of whole prompts, or later chunks of them, to a pool of slots.

Chosen for: `PROMPTS` on a GPU in 16 bits, where attention.roles is not: other cards, head sizes and
short prompts.

    o_t = softmax(q_t K^T / sqrt(d), positions <= t) V        y_t = o_t * sigmoid(gate_t)

A program has 128 queries of one head, or 64, and walks along the keys. Tiles of keys that all its
queries may see come through the bulk copy engine, which leaves the threads to the softmax; the last
few, of which each query sees a part, are loaded by the threads, which do not read what the slot
held before beyond the sequence's end.

Source, traps and rounding: see reference.

Shape letters: T packed tokens, N sequences, n query heads, m key and value heads, d head size, S
slots, L tokens a slot holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.attention.online import LOG2_E, gated, load_tile, soften
from runtime.kernels.attention.reference import attention_prefill_reference, check
from runtime.kernels.attention.roles import roles_prefill
from runtime.kernels.cases import Prompt
from runtime.kernels.dispatch import PROMPTS
from runtime.kernels.launch import (
    HAS_TRITON,
    gluon_runs,
    jit,
    operand,
    power_of_two,
    ragged_block,
    ragged_blocks,
    tl,
    use_triton,
)
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

_QUERIES = 64
_KEYS = 64
# Microseconds on an H100, 8192 tokens, 16 query heads of 256: 64 keys and 2 stages 1092 (500
# TFLOP/s), 32 and 3 stages 1364, 128 and 1 stage 1254; keys loaded by the threads 1301; with sums
# rescaled only where a score grew much 1148.
# 512 tokens of 0.8B, 8 heads, on an H200: 28 us in 32 programs of 128 queries, 20 in 64 of 64 by
# 4 warps.
_WARPS = {_QUERIES: 4, 2 * _QUERIES: 8}
_STAGES = 2
_PLACES = 132  # multiprocessors of an H200


def attention_prefill(
    q_Tnd: Tensor,
    gate_Tnd: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_N: Tensor,
    cu_seqlens: Tensor,
    start_N: Tensor,
) -> Tensor:
    """Return the gated attention [T, n, d] of packed sequences to their slots, up to themselves.

    q_Tnd, gate_Tnd  [T, n, d] model dtype, heads contiguous in themselves
    pool_k, pool_v   [S, L, m, d] contiguous, the T tokens included; on a GPU d is a multiple of 8
    slots_N          [N] int32 or int64; below 0 the sequence's rows are zeros
    cu_seqlens       [N+1] int32 or int64, from 0 to T
    start_N          [N] int32 or int64, tokens that stood in the slot before these
    """
    check(q_Tnd, gate_Tnd, pool_k, pool_v)
    assert cu_seqlens.shape[0] == slots_N.shape[0] + 1, "one slot for each sequence"
    assert start_N.shape == slots_N.shape, "one start for each sequence"
    attend = _attention(_case(q_Tnd, pool_k, slots_N))
    y_Tnd: Tensor = attend(q_Tnd, gate_Tnd, pool_k, pool_v, slots_N, cu_seqlens, start_N)
    return y_Tnd


def _case(q_Tnd: Tensor, pool_k: Tensor, slots_N: Tensor) -> Prompt:
    """Return what the table is asked for."""
    (num_tokens, num_heads, head_dim), gluon = q_Tnd.shape, gluon_runs(q_Tnd.get_device())
    group, each = num_heads // pool_k.shape[2], num_tokens // max(slots_N.shape[0], 1)
    kernels = use_triton(q_Tnd), q_Tnd.is_cuda, q_Tnd.dtype, gluon
    return Prompt(*kernels, head_dim, group, each)


def launch_prefill(
    q_Tnd: Tensor,
    gate_Tnd: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_N: Tensor,
    cu_seqlens: Tensor,
    start_N: Tensor,
) -> Tensor:
    """Return `attention_prefill` by the kernel."""
    num_tokens, num_heads, head_dim = q_Tnd.shape
    num_sequences, kv_heads = slots_N.shape[0], pool_k.shape[2]
    y_Tnd = torch.empty(q_Tnd.shape, dtype=q_Tnd.dtype, device=q_Tnd.device)
    at_once = ragged_blocks(num_tokens, num_sequences, _QUERIES) * num_heads <= _PLACES
    short = num_tokens < 2 * _QUERIES * num_sequences
    queries = _QUERIES if short or at_once else 2 * _QUERIES
    blocks = ragged_blocks(num_tokens, num_sequences, queries)
    columns = max(power_of_two(head_dim), 16)
    _kernel[(num_heads, blocks)](
        q_Tnd,
        gate_Tnd,
        pool_k,
        pool_v,
        _tiles(pool_k, columns),
        _tiles(pool_v, columns),
        y_Tnd,
        slots_N,
        cu_seqlens,
        start_N,
        num_sequences,
        pool_k.shape[1],
        num_heads,
        kv_heads,
        *q_Tnd.stride()[:2],
        *gate_Tnd.stride()[:2],
        head_dim**-0.5 * LOG2_E,
        STEPS=num_sequences.bit_length(),
        HEAD=head_dim,
        BLOCK_Q=queries,
        BLOCK_D=columns,
        BLOCK_L=_KEYS,
        num_warps=_WARPS[queries],
        num_stages=_STAGES,
        **early(),
    )
    return y_Tnd


def _tiles(pool: Tensor, columns: int) -> Any:
    """Return a descriptor of [S, L, m, d] whose tiles are some places of one head."""
    return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), [1, _KEYS, 1, columns])


@jit
def _kernel(
    q,
    gate,
    pool_k,
    pool_v,
    k_tiles,
    v_tiles,
    y,
    slots,
    cu_seqlens,
    starts,
    N,
    L,
    num_heads,
    kv_heads,
    q_row,
    q_head,
    gate_row,
    gate_head,
    scale,
    STEPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    # blocks late in a prompt see the most keys and go first, those of all heads together: head by
    # head the last ones keep few multiprocessors busy: H200, 0.8B, 8192 tokens, 23.4 ms for 22.8
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    n, start, end, first = ragged_block(block, cu_seqlens, N, BLOCK_Q, STEPS)
    if first >= end:
        return
    head = tl.program_id(0)
    slot = tl.load(slots + n).to(tl.int64)
    t = first.to(tl.int64) + tl.arange(0, BLOCK_Q)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (t < end) & (d < HEAD)
    q_Qd = operand(tl.load(q + t * q_row + head * q_head + d, mask=inside, other=0.0))

    before = tl.load(starts + n).to(tl.int32) + first - start
    last = before + tl.arange(0, BLOCK_Q)
    limit = tl.where(slot >= 0, before + tl.minimum(end - first, BLOCK_Q), 0)
    whole = tl.minimum((before + 1) // BLOCK_L * BLOCK_L, limit)
    kv_head = head // (num_heads // kv_heads)
    o = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_Q,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    slot_ = tl.maximum(slot, 0).to(tl.int32)
    for key in range(0, whole, BLOCK_L):
        k = tl.reshape(k_tiles.load([slot_, key, kv_head, 0]), (BLOCK_L, BLOCK_D))
        s = tl.dot(q_Qd, tl.trans(operand(k)), input_precision="ieee")
        p, top, total, shrink = soften(s, scale, top, total)
        v = tl.reshape(v_tiles.load([slot_, key, kv_head, 0]), (BLOCK_L, BLOCK_D))
        p, o = operand(p.to(v.dtype)), o * shrink[:, None]
        o = tl.dot(p, operand(v), o, input_precision="ieee")
    row, first_key = kv_heads * HEAD, (slot * L * kv_heads + kv_head) * HEAD
    for key in range(whole, limit, BLOCK_L):
        place = key + tl.arange(0, BLOCK_L)
        k = load_tile(pool_k + first_key, place, place < limit, 0.0, row, HEAD, BLOCK_D)
        v = load_tile(pool_v + first_key, place, place < limit, 0.0, row, HEAD, BLOCK_D)
        s = tl.dot(q_Qd, tl.trans(operand(k)), input_precision="ieee")
        s = tl.where(place[None, :] <= last[:, None], s, -float("inf"))
        p, top, total, shrink = soften(s, scale, top, total)
        p, o = operand(p.to(v.dtype)), o * shrink[:, None]
        o = tl.dot(p, operand(v), o, input_precision="ieee")
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    gate_Qd = tl.load(gate + t * gate_row + head * gate_head + d, mask=inside, other=0.0)
    tl.store(y + (t * num_heads + head) * HEAD + d, gated(o, gate_Qd, y), mask=inside)


_attention = PROMPTS.bind(launch_prefill, roles_prefill, attention_prefill_reference)
