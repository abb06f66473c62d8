"""The gated delta rule over a pool of states: one step for decode, chunks of 64 for prefill.

Chosen for: every prompt, and `RULE_STEP` with 256 states or more.

The rule, its source and its traps: see rule; the kernels: see step and prefill. q, k and v may be
views on the convolution's output: tokens at any stride, the heads of a token one after another.
Padding slots are negative, and slot times stride needs 64 bits.

Shape letters: T packed tokens, B sequences with one token each, N sequences, S slots, H key heads,
V value heads, k key size, v value size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.prefill import launch_prefill
from runtime.kernels.delta_rule.rule import chunks, heads_first, recurrence
from runtime.kernels.delta_rule.step import launch_step
from runtime.kernels.launch import use_triton, widen
from runtime.kernels.norm.gated import Gate, gated_rmsnorm_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_FEW_TOKENS = 8


def gated_delta_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    gate: Gate | None = None,
) -> Tensor:
    """Say what `gated_delta_step` computes, in plain torch; the pool is updated in place."""
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    inputs = heads_first(q, k, v, a, b, A_log, dt_bias)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            one = (x[:, row : row + 1] for x in inputs)
            o_V1v, state = recurrence(widen(state_pool[slot]), *one)
            o[row] = o_V1v[:, 0].to(o.dtype)
            state_pool[slot] = state.to(state_pool.dtype)
    return o if gate is None else gated_rmsnorm_reference(o, gate.z_TVd, gate.weight_d, gate.eps)


def gated_delta_prefill_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    *,
    rule: Rule = recurrence,
) -> Tensor:
    """Say what `gated_delta_prefill` computes, in plain torch; the pool is updated in place.

    rule  `recurrence`, which defines the result, or `chunks`, which reaches it sooner
    """
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    inputs = heads_first(q, k, v, a, b, A_log, dt_bias)
    bounds = cu_seqlens.tolist()
    for slot, start, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        if start == end:
            continue
        state = widen(state_pool[slot] if slot >= 0 else torch.zeros_like(state_pool[0]))
        o_VTv, state = rule(state, *(x[:, start:end] for x in inputs))
        o[start:end] = o_VTv.transpose(0, 1).to(o.dtype)
        if slot >= 0:
            state_pool[slot] = state.to(state_pool.dtype)
    return o


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    gate: Gate | None = None,
) -> Tensor:
    """Return o [B, V, v] in v's dtype for one token of each sequence; its slot moves on.

    q, k [B, H, k], v [B, V, v], a, b [B, V]   model dtype, straight from convolution and linears
    A_log, dt_bias [V]                         any float
    state_pool [S, V, k, v]                    float32 or bfloat16, updated in place
    slots [B]                                  no slot twice; negative: zeros out, nothing written
    gate                                       if there is one, o is what `gated_rmsnorm` makes of o
    """
    _check(q, k, v, a, b, A_log, dt_bias, state_pool)
    assert slots.shape == q.shape[:1], "one slot for each row"
    if not use_triton(q):
        return gated_delta_step_reference(q, k, v, a, b, A_log, dt_bias, state_pool, slots, gate)
    assert gate is None or gate.z_TVd.stride()[1:] == (v.shape[2], 1), "z has the layout of v"
    return launch_step(q, k, v, a, b, A_log, dt_bias, state_pool, slots, gate)


def gated_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Return o [T, V, v] in v's dtype for packed sequences; each one's state replaces its slot.

    q, k [T, H, k], v [T, V, v], a, b [T, V]   model dtype, straight from convolution and linears
    A_log, dt_bias [V]                         any float
    state_pool [S, V, k, v]                    float32 or bfloat16, the states before; in place
    slots [N]                                  no slot twice; negative: from zeros, not kept
    cu_seqlens [N+1]                           int32 or int64, from 0 to T

    A long prompt may come in parts; cut at multiples of 64, the parts compute what the whole does,
    but for rounding where a GPU walks it in halves.
    On a GPU each head of each token must start at a multiple of 16 bytes.
    """
    _check(q, k, v, a, b, A_log, dt_bias, state_pool)
    assert cu_seqlens.shape[0] == slots.shape[0] + 1, "one slot for each sequence"
    if not use_triton(q):
        return gated_delta_prefill_reference(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            state_pool,
            slots,
            cu_seqlens,
            rule=chunks if len(q) > _FEW_TOKENS else recurrence,
        )
    return launch_prefill(q, k, v, a, b, A_log, dt_bias, state_pool, slots, cu_seqlens)


def _check(q, k, v, a, b, A_log, dt_bias, state_pool) -> None:
    num_key_heads, dk = k.shape[1:]
    heads, dv = v.shape[1:]
    assert q.shape == k.shape, "q and k must have one shape"
    assert heads % num_key_heads == 0, "value heads must be a multiple of key heads"
    assert a.shape == b.shape == v.shape[:2], "one a and one b for each value head"
    assert A_log.shape == dt_bias.shape == (heads,), "one A_log and dt_bias for each value head"
    assert q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype"
    for x in (q, k, v):
        assert x.stride()[1:] == (x.shape[2], 1), "heads of a token must follow one another"
    assert a.stride(1) == b.stride(1) == 1, "a and b must be contiguous along heads"
    assert state_pool.shape[1:] == (heads, dk, dv), "the pool is [slots, V, k, v]"
    assert state_pool[0].is_contiguous(), "a state must be contiguous"
