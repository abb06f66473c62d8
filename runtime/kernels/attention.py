"""Gated causal attention over a pool of key and value slots.

    o_t = softmax(q_t K^T / sqrt(d), positions <= t) V        y_t = o_t * sigmoid(gate_t)

q and k come normalised and rotated; the gate neither. The tokens' own keys and values are written
into the pool first (`kv_write`), so that prefill, a later chunk of a prompt and decoding all read
one place. Scores, softmax and the sum over V stay in float32 (transformers' eager path rounds
scores and probabilities to the model dtype); o, the sigmoid and their product are rounded to it.

Source: Dao 2023 (FlashAttention-2) for the online softmax, Dao et al. 2023 (Flash-Decoding) for the
split over the context; the gate: Qiu et al. 2025 and transformers' Qwen3_5Attention.
Traps: q_proj gives [q | gate] per head, not all q before all gates; query head h reads key head
h // (n/m), each key head serving neighbours (repeat_interleave, not tile).

Shape letters: T packed tokens, B sequences with one token each, N sequences, n query heads, m key
and value heads, r = n/m, d head size, S slots, L tokens a slot holds, C parts of a context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import (
    autotune,
    jit,
    operand,
    power_of_two,
    ragged_block,
    ragged_blocks,
    tl,
    use_triton,
    widen,
)
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_QUERIES = 64
_QUERY_BLOCK = 256
_MULTIPROCESSORS = (
    132  # of an H100, H200 and GH200: the parts of a context do not depend on the card
)
_MOST_PARTS = 64
_LOG2_E = 1.4426950408889634


def split_query_gate(qg: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the views (q, gate), each [T, n, d], of what q_proj gives.

    qg  [T, n * 2d]: for each head its query, then its gate
    """
    assert qg.shape[-1] == 2 * num_heads * head_dim, "q_proj has a query and a gate for each head"
    heads = qg.view(-1, num_heads, 2 * head_dim)
    return heads[..., :head_dim], heads[..., head_dim:]


def kv_write_reference(
    k_Tmd: Tensor, v_Tmd: Tensor, pool_k: Tensor, pool_v: Tensor, slots_T: Tensor, places_T: Tensor
) -> None:
    """Say what `kv_write` does, in plain torch."""
    used = slots_T >= 0
    at = slots_T[used].long(), places_T[used].long()
    pool_k[at] = k_Tmd[used].to(pool_k.dtype)
    pool_v[at] = v_Tmd[used].to(pool_v.dtype)


def attention_prefill_reference(
    q_Tnd: Tensor, gate_Tnd: Tensor, pool_k: Tensor, pool_v: Tensor,
    slots_N: Tensor, cu_seqlens: Tensor, start_N: Tensor,
) -> Tensor:  # fmt: skip
    """Say what `attention_prefill` computes, in plain torch; 256 queries at a time."""
    y_Tnd = torch.zeros(q_Tnd.shape, dtype=q_Tnd.dtype, device=q_Tnd.device)
    bounds, starts = cu_seqlens.tolist(), start_N.tolist()
    for n, slot in enumerate(slots_N.tolist()):
        if slot < 0:
            continue
        for first in range(bounds[n], bounds[n + 1], _QUERY_BLOCK):
            end = min(first + _QUERY_BLOCK, bounds[n + 1])
            before = starts[n] + first - bounds[n]
            known = slice(0, before + end - first)
            o = _attend(q_Tnd[first:end], pool_k[slot, known], pool_v[slot, known], before)
            y_Tnd[first:end] = o.to(y_Tnd.dtype) * torch.sigmoid(gate_Tnd[first:end])
    return y_Tnd


def attention_decode_reference(
    q_Bnd: Tensor, gate_Bnd: Tensor, pool_k: Tensor, pool_v: Tensor,
    slots_B: Tensor, lengths_B: Tensor,
) -> Tensor:  # fmt: skip
    """Say what `attention_decode` computes, in plain torch."""
    cu_seqlens = torch.arange(q_Bnd.shape[0] + 1)
    return attention_prefill_reference(
        q_Bnd, gate_Bnd, pool_k, pool_v, slots_B, cu_seqlens, lengths_B - 1
    )


def _attend(q_Qnd: Tensor, k_Lmd: Tensor, v_Lmd: Tensor, before: int) -> Tensor:
    """Return attention [Q, n, d] of queries that stand at `before`, `before` + 1, ..."""
    num_queries, num_heads, head_dim = q_Qnd.shape
    length, kv_heads, _ = k_Lmd.shape
    q = widen(q_Qnd).view(num_queries, kv_heads, num_heads // kv_heads, head_dim)
    q = q.permute(1, 2, 0, 3) * head_dim**-0.5
    k, v = (widen(x).permute(1, 0, 2)[:, None] for x in (k_Lmd, v_Lmd))
    scores = q @ k.transpose(2, 3)
    place = torch.arange(length, device=q.device)
    later = place > before + torch.arange(num_queries, device=q.device)[:, None]
    weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
    o: Tensor = weights @ v
    return o.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def kv_write(
    k_Tmd: Tensor, v_Tmd: Tensor, pool_k: Tensor, pool_v: Tensor, slots_T: Tensor, places_T: Tensor
) -> None:
    """Write each token's key and value at its place in its slot.

    k_Tmd, v_Tmd    [T, m, d], heads contiguous in themselves
    pool_k, pool_v  [S, L, m, d] contiguous, changed in place
    slots_T         [T] int32 or int64; below 0 nothing is written
    places_T        [T] int32 or int64, the token's number in its sequence, below L
    """
    _check_pools(pool_k, pool_v)
    assert k_Tmd.shape == v_Tmd.shape == (slots_T.shape[0], *pool_k.shape[2:]), "k, v are [T, m, d]"
    assert k_Tmd.stride(2) == v_Tmd.stride(2) == 1, "heads must be contiguous"
    assert places_T.shape == slots_T.shape, "one place for each token"
    if not use_triton(k_Tmd):
        kv_write_reference(k_Tmd, v_Tmd, pool_k, pool_v, slots_T, places_T)
        return
    num_tokens, kv_heads, head_dim = k_Tmd.shape
    _kv_write_kernel[(num_tokens, kv_heads)](
        k_Tmd, v_Tmd, pool_k, pool_v, slots_T, places_T, pool_k.shape[1], kv_heads, head_dim,
        *k_Tmd.stride()[:2], *v_Tmd.stride()[:2], BLOCK=power_of_two(head_dim), num_warps=1,
        **early(),
    )  # fmt: skip


def attention_prefill(
    q_Tnd: Tensor, gate_Tnd: Tensor, pool_k: Tensor, pool_v: Tensor,
    slots_N: Tensor, cu_seqlens: Tensor, start_N: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gated attention [T, n, d] of packed sequences to their slots, up to themselves.

    q_Tnd, gate_Tnd  [T, n, d] model dtype, heads contiguous in themselves
    pool_k, pool_v   [S, L, m, d] contiguous, the T tokens included
    slots_N          [N] int32 or int64; below 0 the sequence's rows are zeros
    cu_seqlens       [N+1] int32 or int64, from 0 to T
    start_N          [N] int32 or int64, tokens that stood in the slot before these
    """
    _check(q_Tnd, gate_Tnd, pool_k, pool_v)
    assert cu_seqlens.shape[0] == slots_N.shape[0] + 1, "one slot for each sequence"
    assert start_N.shape == slots_N.shape, "one start for each sequence"
    # float32 is for proof: its tiles of 256 columns take minutes to compile and then spill
    if not use_triton(q_Tnd) or (q_Tnd.is_cuda and q_Tnd.dtype == torch.float32):
        return attention_prefill_reference(
            q_Tnd, gate_Tnd, pool_k, pool_v, slots_N, cu_seqlens, start_N
        )
    num_tokens, num_heads, head_dim = q_Tnd.shape
    num_sequences, kv_heads = slots_N.shape[0], pool_k.shape[2]
    y_Tnd = torch.empty(q_Tnd.shape, dtype=q_Tnd.dtype, device=q_Tnd.device)
    queries = 2 * _QUERIES if num_tokens >= 2 * _QUERIES * num_sequences else _QUERIES
    blocks = ragged_blocks(num_tokens, num_sequences, queries)
    _prefill_kernel[(blocks, num_heads)](
        q_Tnd, gate_Tnd, pool_k, pool_v, y_Tnd, slots_N, cu_seqlens, start_N, num_sequences,
        pool_k.shape[1], num_heads, kv_heads,
        *q_Tnd.stride()[:2], *gate_Tnd.stride()[:2], head_dim**-0.5 * _LOG2_E,
        STEPS=num_sequences.bit_length(), HEAD=head_dim,
        BLOCK_Q=queries, BLOCK_D=max(power_of_two(head_dim), 16),
    )  # fmt: skip
    return y_Tnd


def attention_decode(
    q_Bnd: Tensor, gate_Bnd: Tensor, pool_k: Tensor, pool_v: Tensor,
    slots_B: Tensor, lengths_B: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gated attention [B, n, d] of one token for each sequence to its whole slot.

    q_Bnd, gate_Bnd  [B, n, d] model dtype, heads contiguous in themselves
    pool_k, pool_v   [S, L, m, d] contiguous, the B tokens included
    slots_B          [B] int32 or int64; below 0 the row is zeros
    lengths_B        [B] int32 or int64, tokens in the slot, this one included
    """
    _check(q_Bnd, gate_Bnd, pool_k, pool_v)
    assert lengths_B.shape == slots_B.shape == q_Bnd.shape[:1], "one slot and length for each row"
    if not use_triton(q_Bnd):
        return attention_decode_reference(q_Bnd, gate_Bnd, pool_k, pool_v, slots_B, lengths_B)
    batch, num_heads, head_dim = q_Bnd.shape
    kv_heads, group = pool_k.shape[2], num_heads // pool_k.shape[2]
    parts = max(1, min(_MULTIPROCESSORS // (batch * kv_heads), _MOST_PARTS))
    parts = power_of_two(parts + 1) // 2
    part_o = torch.empty((batch, num_heads, parts, head_dim), device=q_Bnd.device)
    part_max = torch.empty((batch, num_heads, parts), device=q_Bnd.device)
    part_sum = torch.empty_like(part_max)
    block_d = max(power_of_two(head_dim), 16)
    _decode_kernel[(parts, kv_heads, batch)](
        q_Bnd, pool_k, pool_v, part_o, part_max, part_sum, slots_B, lengths_B,
        pool_k.shape[1], num_heads, kv_heads, *q_Bnd.stride()[:2], head_dim**-0.5 * _LOG2_E,
        PARTS=parts, GROUP=group, HEAD=head_dim,
        BLOCK_G=max(power_of_two(group), 16), BLOCK_D=block_d, **early(),
    )  # fmt: skip
    y_Bnd = torch.empty(q_Bnd.shape, dtype=q_Bnd.dtype, device=q_Bnd.device)
    piece = min(block_d, 64)
    _combine_kernel[(batch, num_heads, block_d // piece)](
        part_o, part_max, part_sum, gate_Bnd, y_Bnd, num_heads, *gate_Bnd.stride()[:2],
        PARTS=parts, HEAD=head_dim, PIECE=piece, num_warps=4, **early(),
    )  # fmt: skip
    return y_Bnd


def _check(q: Tensor, gate: Tensor, pool_k: Tensor, pool_v: Tensor) -> None:
    _check_pools(pool_k, pool_v)
    assert q.shape == gate.shape, "each head of each token has a gate"
    assert q.stride(2) == gate.stride(2) == 1, "heads must be contiguous"
    assert q.dtype == pool_k.dtype == gate.dtype, "q, gate and the pool must have one dtype"
    assert q.shape[2] == pool_k.shape[3], "q and the pool must have one head size"
    assert q.shape[1] % pool_k.shape[2] == 0, "key heads serve equally many query heads"


def _check_pools(pool_k: Tensor, pool_v: Tensor) -> None:
    assert pool_k.shape == pool_v.shape, "the pools must have one shape"
    assert pool_k.is_contiguous(), "the key pool must be contiguous"
    assert pool_v.is_contiguous(), "the value pool must be contiguous"


@jit
def _kv_write_kernel(
    k, v, pool_k, pool_v, slots, places, L, kv_heads, D, k_row, k_head, v_row, v_head,
    BLOCK: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_inputs()
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + t).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < tl.where(slot >= 0, D, 0)
    at = ((slot * L + tl.load(places + t)) * kv_heads + head) * D + d
    k_d = tl.load(k + t * k_row + head * k_head + d, mask=inside, other=0.0)
    tl.store(pool_k + at, k_d.to(pool_k.dtype.element_ty), mask=inside)
    v_d = tl.load(v + t * v_row + head * v_head + d, mask=inside, other=0.0)
    tl.store(pool_v + at, v_d.to(pool_v.dtype.element_ty), mask=inside)


@jit
def _attend_tile(
    o, top, total, q, k_head, v_head, place, last, limit, row, scale,
    HEAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return (o, top, total) with the keys at `place` added: one step of the online softmax.

    o       [rows, BLOCK_D] sum of exp2(score - top) * v
    top     [rows] the largest score so far, at first a finite low; total [rows] the sum of
            exp2(score - top)
    last    [rows] the last place each row may see, if MASKED; no key from `limit` on is read
    """
    d = tl.arange(0, o.shape[1])
    at = place.to(tl.int64) * row
    known = (place < limit) if MASKED else (place >= 0)
    inside = known[:, None] & (d < HEAD)[None, :]
    k = tl.load(k_head + at[:, None] + d[None, :], mask=inside, other=0.0)
    v = tl.load(v_head + at[:, None] + d[None, :], mask=inside, other=0.0)
    scores = tl.dot(operand(q), tl.trans(operand(k)), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(place[None, :] <= last[:, None], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(p, 1)
    o = tl.dot(operand(p.to(v.dtype)), operand(v), o * shrink[:, None], input_precision="ieee")
    return o, new_top, total


@jit
def _gated(o, gate, y):
    """Return o * sigmoid(gate), both factors and the product rounded to the dtype of `y`."""
    dtype = y.dtype.element_ty
    weight = tl.sigmoid(gate.to(tl.float32)).to(dtype)
    return (o.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@autotune(
    [
        {"BLOCK_L": 64, "num_warps": 4, "num_stages": 2},
        {"BLOCK_L": 64, "num_warps": 8, "num_stages": 2},
        {"BLOCK_L": 32, "num_warps": 4, "num_stages": 3},
        {"BLOCK_L": 128, "num_warps": 8, "num_stages": 1},
    ],
    key=["HEAD", "BLOCK_Q"],
)
@jit
def _prefill_kernel(
    q, gate, pool_k, pool_v, y, slots, cu_seqlens, starts, N, L, num_heads, kv_heads,
    q_row, q_head, gate_row, gate_head, scale, STEPS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    # blocks late in a prompt see the most keys and go first
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n, start, end, first = ragged_block(block, cu_seqlens, N, BLOCK_Q, STEPS)
    if first >= end:
        return
    head = tl.program_id(1)
    slot = tl.load(slots + n).to(tl.int64)
    t = first.to(tl.int64) + tl.arange(0, BLOCK_Q)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (t < end) & (d < HEAD)
    q_Qd = tl.load(q + t * q_row + head * q_head + d, mask=inside, other=0.0)

    before = tl.load(starts + n).to(tl.int32) + first - start
    last = before + tl.arange(0, BLOCK_Q)
    limit = tl.where(slot >= 0, before + tl.minimum(end - first, BLOCK_Q), 0)
    whole = tl.minimum((before + 1) // BLOCK_L * BLOCK_L, limit)
    row = kv_heads * HEAD
    first_key = (slot * L * kv_heads + head // (num_heads // kv_heads)) * HEAD
    o = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_Q,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    for key in range(0, whole, BLOCK_L):
        o, top, total = _attend_tile(
            o, top, total, q_Qd, pool_k + first_key, pool_v + first_key,
            key + tl.arange(0, BLOCK_L), last, limit, row, scale, HEAD=HEAD, MASKED=False,
        )  # fmt: skip
    for key in range(whole, limit, BLOCK_L):
        o, top, total = _attend_tile(
            o, top, total, q_Qd, pool_k + first_key, pool_v + first_key,
            key + tl.arange(0, BLOCK_L), last, limit, row, scale, HEAD=HEAD, MASKED=True,
        )  # fmt: skip
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    gate_Qd = tl.load(gate + t * gate_row + head * gate_head + d, mask=inside, other=0.0)
    tl.store(y + (t * num_heads + head) * HEAD + d, _gated(o, gate_Qd, y), mask=inside)


@autotune(
    [
        {"BLOCK_L": 64, "num_warps": 4, "num_stages": 3},
        {"BLOCK_L": 32, "num_warps": 4, "num_stages": 4},
        {"BLOCK_L": 32, "num_warps": 2, "num_stages": 3},
        {"BLOCK_L": 128, "num_warps": 8, "num_stages": 2},
    ],
    key=["HEAD", "PARTS"],
)
@jit
def _decode_kernel(
    q, pool_k, pool_v, part_o, part_max, part_sum, slots, lengths, L, num_heads, kv_heads,
    q_row, q_head, scale, PARTS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_inputs()
    part, kv_head = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    length = tl.where(slot >= 0, tl.load(lengths + b), 0).to(tl.int32)
    size = tl.cdiv(tl.cdiv(length, PARTS), BLOCK_L) * BLOCK_L
    end = tl.minimum((part + 1) * size, length)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)[None, :]
    head = kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < HEAD)
    q_Gd = tl.load(q + b * q_row + head[:, None] * q_head + d, mask=inside, other=0.0)
    row = kv_heads * HEAD
    first_key = (slot * L * kv_heads + kv_head) * HEAD
    last = tl.zeros((BLOCK_G,), tl.int32) + end - 1
    o = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_G,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    for key in range(part * size, end, BLOCK_L):
        o, top, total = _attend_tile(
            o, top, total, q_Gd, pool_k + first_key, pool_v + first_key,
            key + tl.arange(0, BLOCK_L), last, end, row, scale, HEAD=HEAD, MASKED=True,
        )  # fmt: skip
    at = (b * num_heads + head) * PARTS + part
    tl.store(part_o + at[:, None] * HEAD + d, o, mask=inside)
    tl.store(part_max + at, top, mask=g < GROUP)
    tl.store(part_sum + at, total, mask=g < GROUP)


@jit
def _combine_kernel(
    part_o, part_max, part_sum, gate, y, num_heads, gate_row, gate_head,
    PARTS: tl.constexpr, HEAD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_inputs()
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, PARTS)
    d = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    at = (b * num_heads + head) * PARTS + c
    top = tl.load(part_max + at)
    total = tl.load(part_sum + at)
    # a part without keys has o and total 0; a padding row has only such parts
    weight = tl.exp2(top - tl.max(top, 0))
    o_Cd = tl.load(part_o + at[:, None] * HEAD + d[None, :], mask=(d < HEAD)[None, :], other=0.0)
    total = tl.sum(weight * total, 0)
    o = tl.sum(weight[:, None] * o_Cd, 0) / tl.where(total > 0, total, 1.0)
    gate_d = tl.load(gate + b * gate_row + head * gate_head + d, mask=d < HEAD, other=0.0)
    tl.store(y + (b * num_heads + head) * HEAD + d, _gated(o, gate_d, y), mask=d < HEAD)
