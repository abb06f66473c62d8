"""Gated causal attention over a pool of key and value slots.

Chosen for: `PROMPTS` in float32 and without a GPU.

    o_t = softmax(q_t K^T / sqrt(d), positions <= t) V        y_t = o_t * sigmoid(gate_t)

q and k come normalised and rotated; the gate neither. The tokens' own keys and values are written
into the pool first (see write), so that prefill, a later chunk of a prompt and decoding all read
one place. Scores, softmax and the sum over V stay in float32 (transformers' eager path rounds
scores and probabilities to the model dtype); o, the sigmoid and their product are rounded to it.

Source: Dao 2023 (FlashAttention-2) for the online softmax; the gate: Qiu et al. 2025 and
transformers' Qwen3_5Attention. One token for each sequence: decode, step.
Traps: q_proj gives [q | gate] per head, not all q before all gates; query head h reads key head
h // (n/m), each key head serving neighbours (repeat_interleave, not tile).

Shape letters: T packed tokens, N sequences, n query heads, m key and value heads, d head size, S
slots, L tokens a slot holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import widen

if TYPE_CHECKING:
    from torch import Tensor

_QUERY_BLOCK = 256


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
    """Write each token's key and value [T, m, d] at its place in its slot; below slot 0 nothing."""
    used = slots_T >= 0
    at = slots_T[used].long(), places_T[used].long()
    pool_k[at] = k_Tmd[used].to(pool_k.dtype)
    pool_v[at] = v_Tmd[used].to(pool_v.dtype)


def attention_prefill_reference(
    q_Tnd: Tensor,
    gate_Tnd: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_N: Tensor,
    cu_seqlens: Tensor,
    start_N: Tensor,
) -> Tensor:
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


def check(q: Tensor, gate: Tensor, pool_k: Tensor, pool_v: Tensor) -> None:
    """Assert that the heads and the pools fit each other."""
    assert pool_k.shape == pool_v.shape, "the pools must have one shape"
    assert pool_k.is_contiguous(), "the key pool must be contiguous"
    assert pool_v.is_contiguous(), "the value pool must be contiguous"
    assert q.shape == gate.shape, "each head of each token has a gate"
    assert q.stride(2) == gate.stride(2) == 1, "heads must be contiguous"
    assert q.dtype == pool_k.dtype == gate.dtype, "q, gate and the pool must have one dtype"
    assert q.shape[2] == pool_k.shape[3], "q and the pool must have one head size"
    assert q.shape[1] % pool_k.shape[2] == 0, "key heads serve equally many query heads"
