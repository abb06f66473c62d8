"""Cases of the gated delta rule and of attention: the kernels that keep something of a sequence."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases.setting import (
    BITS,
    DEEP,
    EPS,
    SEVERAL,
    Bound,
    Case,
    Part,
    Setting,
    poisoned,
    size,
)
from runtime.kernels.attention import decode as attention_decode
from runtime.kernels.attention import prefill as attention_prefill
from runtime.kernels.attention import reference as attention
from runtime.kernels.attention import step as attention_step
from runtime.kernels.delta_rule import states as gated_delta
from runtime.kernels.delta_rule.rule import CHUNK, chunks, recurrence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

STEP = Bound(0.002, atol=2e-2, rtol=1e-2)
CHUNKED = Bound(0.005)
STATE = {
    torch.float32: Bound(1e-5, atol=1e-4, rtol=1e-4),
    torch.bfloat16: Bound(0.002, atol=1e-4, rtol=2**-8 * 1.01),
}
MOST_STEPS = 1100  # token by token the reference takes 0.1 ms for each


def _rule_inputs(s: Setting, tokens: int) -> list[Tensor]:
    """Return (q, k, v, a, b, A_log, dt_bias): views, decays from almost none to almost all."""
    qkv = s.normal(tokens, sum(s.widths)).split(s.widths, 1)
    b, a = s.normal(tokens, 2 * s.value_heads).chunk(2, 1)
    A_log = torch.empty(s.value_heads).uniform_(math.log(0.01), math.log(16)).to(s.device)
    heads = (x.unflatten(1, (-1, s.d)) for x in qkv)
    return [*heads, a, b, A_log, s.normal(s.value_heads) - 1]


def _exact(inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs in float64, but for b: beta is rounded to its dtype."""
    return [x if i == 4 else x.double() for i, x in enumerate(inputs)]


def _others(whole: Tensor, slots: Tensor) -> Tensor:
    """Return the numbers of the slots of a whole pool, its first included, that none may touch."""
    touched = torch.zeros(len(whole), dtype=torch.bool, device=whole.device)
    touched[1 + slots[slots >= 0].long()] = True
    return (~touched).nonzero().flatten()


def _state_parts(
    whole: Tensor, before: Tensor, expected: Tensor, slots: Tensor, bound: Bound
) -> list[Part]:
    others = _others(whole, slots)
    return [
        Part("state", whole[1:], expected, bound),
        Part("untouched", whole[others], before[others], BITS),
    ]


def gated_delta_step(s: Setting, batch: int, state: torch.dtype) -> Case:
    """Return one step of each sequence."""
    inputs, slots = _rule_inputs(s, batch), s.slots(batch)
    whole = s.normal(batch + 4, s.value_heads, s.d, s.d, dtype=state)
    call = partial(gated_delta.gated_delta_step, *inputs, whole[1:], slots)

    def check() -> list[Part]:
        before, pool = whole.clone(), whole[1:].double()
        o = gated_delta.gated_delta_step_reference(*_exact(inputs), pool, slots)
        parts = [Part("o", poisoned(call), o, STEP)]
        return parts + _state_parts(whole, before, pool, slots, STATE[state])

    moved = 2 * size(whole[:batch]) + size(*inputs[:3]) + size(inputs[2])
    return Case(call, check, moved, 9 * whole[:batch].numel())


def gated_delta_prefill(s: Setting, lengths: Sequence[int], *, equal_keys: bool = False) -> Case:
    """Return packed sequences; equal keys that are never forgotten are the worst to invert."""
    inputs, slots = _rule_inputs(s, sum(lengths)), s.slots(len(lengths))
    if equal_keys:
        inputs[1][:] = inputs[1][:1]
        inputs[3][:], inputs[4][:] = -30, 30
    whole = s.normal(len(lengths) + 4, s.value_heads, s.d, s.d, dtype=torch.float32)
    args = slots, s.bounds(lengths)
    call = partial(gated_delta.gated_delta_prefill, *inputs, whole[1:], *args)

    def check() -> list[Part]:
        before, pool = whole.clone(), whole[1:].double()
        rule = recurrence if sum(lengths) < MOST_STEPS else chunks
        o = gated_delta.gated_delta_prefill_reference(*_exact(inputs), pool, *args, rule=rule)
        parts = [Part("o", poisoned(call), o, CHUNKED)]
        return parts + _state_parts(whole, before, pool, slots, CHUNKED)

    token_heads = sum(lengths) * s.value_heads
    flops = token_heads * (6 * s.d**2 + 8 * CHUNK * s.d + 2 * CHUNK**2 / 3)
    moved = size(*inputs[:5]) + size(inputs[2]) + 2 * size(whole[: len(lengths)])
    return Case(call, check, moved, flops)


def _key_pools(s: Setting, slots: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return whole pools [1 + slots, L, m, d]: NaN but for each context."""
    shape = (len(lengths) + 4, max(lengths) + 37, s.kv_heads, s.head_dim)
    wholes = [torch.full(shape, torch.nan, dtype=s.dtype, device=s.device) for _ in range(2)]
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        for whole in wholes:
            if slot >= 0:
                whole[1 + slot, :length] = s.normal(length, s.kv_heads, s.head_dim)
    return wholes


def _queries(s: Setting, tokens: int) -> tuple[Tensor, Tensor]:
    qg = s.normal(tokens, s.heads * 2 * s.head_dim)
    return attention.split_query_gate(qg, s.heads, s.head_dim)


def _attention(
    kernels: tuple[Any, Any],
    queries: tuple[Tensor, Tensor],
    wholes: list[Tensor],
    args: tuple[Tensor, ...],
    seen: tuple[float, float],
) -> Case:
    """Return a case; `seen` is how many keys are read and how many pairs of query and key meet."""
    kernel, reference = kernels
    pools = [whole[1:] for whole in wholes]
    call = partial(kernel, *queries, *pools, *args)

    def check() -> list[Part]:
        exact = (x.double() for x in (*queries, *pools))
        expected = reference(*exact, *args)
        return [Part("y", poisoned(call), expected, DEEP)]

    keys, pairs = seen
    moved = 3 * size(queries[0]) + 2 * keys * size(wholes[0][0, 0])
    return Case(call, check, moved, 4 * queries[0][0].numel() * pairs)


def prefill(s: Setting, lengths: Sequence[int], starts: Sequence[int]) -> Case:
    """Return packed chunks of prompts that begin after `starts` tokens."""
    slots = s.slots(len(lengths))
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    args = slots, s.bounds(lengths), s.tensor(starts)
    used = [slot >= 0 for slot in slots.tolist()]
    shapes = zip(used, starts, lengths, strict=True)
    pairs = sum(length * (start + (length + 1) / 2) for use, start, length in shapes if use)
    keys = sum(context for use, context in zip(used, contexts, strict=True) if use)
    return _attention(
        (attention_prefill.attention_prefill, attention.attention_prefill_reference),
        _queries(s, sum(lengths)),
        _key_pools(s, slots, contexts),
        args,
        (keys, pairs),
    )


def decode(s: Setting, lengths: Sequence[int]) -> Case:
    """Return one token of each sequence that looks back on `lengths` tokens."""
    slots = s.slots(len(lengths))
    args = slots, s.tensor(lengths)
    keys = sum(length for slot, length in zip(slots.tolist(), lengths, strict=True) if slot >= 0)
    return _attention(
        (attention_decode.attention_decode, attention_decode.attention_decode_reference),
        _queries(s, len(lengths)),
        _key_pools(s, slots, lengths),
        args,
        (keys, keys),
    )


def step(s: Setting, lengths: Sequence[int]) -> Case:
    """Return the same from the projections on: the newest places are NaN, and are written."""
    slots, count = s.slots(len(lengths)), s.tensor(lengths)
    wholes, (q, gate) = _key_pools(s, slots, lengths), _queries(s, len(lengths))
    used = slots >= 0
    newest = 1 + slots[used].long(), count[used].long() - 1
    for whole in wholes:
        whole[newest] = torch.nan
    k, v = (s.normal(len(lengths), s.kv_heads, s.head_dim) for _ in range(2))
    angles = s.normal(len(lengths), s.head_dim // 4).clamp(-1, 1).chunk(2, 1)
    weights = s.normal(s.head_dim), s.normal(s.head_dim)
    inputs = q, gate, k, v, *weights, *(x.contiguous() for x in angles)
    call = partial(
        attention_step.attention_step, *inputs, EPS, *(x[1:] for x in wholes), slots, count
    )

    def check() -> list[Part]:
        expected = [whole.double() for whole in wholes]
        y = attention_step.attention_step_reference(
            *(x.double() for x in inputs), EPS, *(x[1:] for x in expected), slots, count
        )
        got = poisoned(call)
        parts = [Part("y", got, y, DEEP)]
        for name, whole, pool in zip(("k", "v"), wholes, expected, strict=True):
            parts.append(Part(name, whole[newest], pool[newest], SEVERAL))
            whole[newest] = pool[newest] = torch.nan
            parts.append(Part(f"other {name}", whole.nan_to_num(9), pool.nan_to_num(9), BITS))
        return parts

    keys = sum(length for slot, length in zip(slots.tolist(), lengths, strict=True) if slot >= 0)
    moved = 3 * size(q) + 2 * keys * size(wholes[0][0, 0])
    return Case(call, check, moved, 4 * q[0].numel() * keys)
