"""The gated delta rule over a pool of states: one step for decode, chunks of 64 for prefill.

The rule, its source and its traps stand in `delta_rule`. Prefill takes two kernels. One has a
program for each chunk and value head, all at once: it inverts I + L and multiplies q by k. The
other walks the chunks of a sequence with a slice of the state in registers.
q, k and v may be views on the convolution's output: tokens at any stride, the heads of a token one
after another. Padding slots are negative, and slot times stride needs 64 bits.

Shape letters: T packed tokens, B sequences with one token each, N sequences, S slots, H key heads,
V value heads, k key size, v value size, C chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule import CHUNK, EPS, chunks, heads_first, recurrence
from runtime.kernels.launch import (
    jit,
    operand,
    power_of_two,
    ragged_block,
    ragged_blocks,
    tl,
    use_triton,
    widen,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_FEW_TOKENS = 8
_STEP_COLUMNS = 32
_SCAN_COLUMNS = 64


def gated_delta_step_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state_pool: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Say what `gated_delta_step` computes, in plain torch; the pool is updated in place."""
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    inputs = heads_first(q, k, v, a, b, A_log, dt_bias)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            one = (x[:, row : row + 1] for x in inputs)
            o_V1v, state = recurrence(widen(state_pool[slot]), *one)
            o[row] = o_V1v[:, 0].to(o.dtype)
            state_pool[slot] = state.to(state_pool.dtype)
    return o


def gated_delta_prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state_pool: Tensor, slots: Tensor, cu_seqlens: Tensor, *, rule: Rule = recurrence,
) -> Tensor:  # fmt: skip
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
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state_pool: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Return o [B, V, v] in v's dtype for one token of each sequence; its slot moves on.

    q, k [B, H, k], v [B, V, v], a, b [B, V]   model dtype, straight from convolution and linears
    A_log, dt_bias [V]                         any float
    state_pool [S, V, k, v]                    float32 or bfloat16, updated in place
    slots [B]                                  no slot twice; negative: zeros out, nothing written
    """
    _check(q, k, v, a, b, A_log, dt_bias, state_pool)
    assert slots.shape == q.shape[:1], "one slot for each row"
    if not use_triton(q):
        return gated_delta_step_reference(q, k, v, a, b, A_log, dt_bias, state_pool, slots)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    batch, heads, dv = v.shape
    dk = k.shape[2]
    columns = min(_STEP_COLUMNS, power_of_two(dv))
    _step_kernel[(-(-dv // columns), heads, batch)](
        q, k, v, a, b, A_log, dt_bias, state_pool, slots, o,
        *(x.stride(0) for x in (q, k, v, a, b, state_pool)), dk**-0.5, EPS,
        V=heads, REPEAT=heads // k.shape[1], DK=dk, DV=dv,
        BK=power_of_two(dk), BV=columns, num_warps=1,
    )  # fmt: skip
    return o


def gated_delta_prefill(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state_pool: Tensor, slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    """Return o [T, V, v] in v's dtype for packed sequences; each one's state replaces its slot.

    q, k [T, H, k], v [T, V, v], a, b [T, V]   model dtype, straight from convolution and linears
    A_log, dt_bias [V]                         any float
    state_pool [S, V, k, v]                    float32 or bfloat16, the states before; in place
    slots [N]                                  no slot twice; negative: from zeros, not kept
    cu_seqlens [N+1]                           int32 or int64, from 0 to T

    A long prompt may come in parts; cut at multiples of 64, the parts compute what the whole does.
    """
    _check(q, k, v, a, b, A_log, dt_bias, state_pool)
    assert cu_seqlens.shape[0] == slots.shape[0] + 1, "one slot for each sequence"
    if not use_triton(q):
        return gated_delta_prefill_reference(
            q, k, v, a, b, A_log, dt_bias, state_pool, slots, cu_seqlens,
            rule=chunks if len(q) > _FEW_TOKENS else recurrence,
        )  # fmt: skip
    return _launch_prefill(q, k, v, a, b, A_log, dt_bias, state_pool, slots, cu_seqlens)


def _launch_prefill(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state_pool: Tensor, slots: Tensor, cu_seqlens: Tensor,
) -> Tensor:  # fmt: skip
    num_tokens, heads, dv = v.shape
    dk, num_sequences = k.shape[2], slots.shape[0]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    solved = torch.empty((num_tokens, heads, CHUNK), dtype=v.dtype, device=v.device)
    attention = torch.empty_like(solved)
    scales = torch.empty((4, heads, num_tokens), dtype=torch.float32, device=v.device)
    sizes = {
        "V": heads, "REPEAT": heads // k.shape[1], "DK": dk, "C": CHUNK,
        "BK": max(power_of_two(dk), 16), "num_warps": 4,
    }  # fmt: skip
    _solve_kernel[(ragged_blocks(num_tokens, num_sequences, CHUNK), heads)](
        q, k, a, b, A_log, dt_bias, cu_seqlens, solved, attention, scales,
        num_tokens, num_sequences, *(x.stride(0) for x in (q, k, a, b)), dk**-0.5, EPS,
        PRECISION="tf32x3" if v.dtype == torch.float32 else "tf32",
        STEPS=num_sequences.bit_length(), **sizes,
    )  # fmt: skip
    columns = max(16, min(_SCAN_COLUMNS, power_of_two(dv)))
    _scan_kernel[(-(-dv // columns), heads, num_sequences)](
        q, k, v, state_pool, slots, cu_seqlens, solved, attention, scales, o,
        num_tokens, *(x.stride(0) for x in (q, k, v, state_pool)),
        PRECISION="tf32x3", DV=dv, BV=columns,
        num_stages=1 if v.dtype == torch.float32 else 2, **sizes,
    )  # fmt: skip
    return o


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


@jit
def _gates(a, b, A_log, dt_bias, rounded):
    """Return (g, beta) from loaded values; beta is rounded to the dtype `rounded` points to."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    e = tl.exp(-tl.abs(x))
    # log(1 + e) to the last bits also where 1 + e rounds (Kahan)
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    g = -tl.exp(A_log.to(tl.float32)) * (tl.maximum(x, 0.0) + log1p)
    beta = tl.sigmoid(b.to(tl.float32)).to(rounded.dtype.element_ty)
    return g, beta.to(tl.float32)


@jit
def _step_kernel(
    q, k, v, a, b, A_log, dt_bias, pool, slots, o,
    q_row, k_row, v_row, a_row, b_row, pool_row, scale, eps,
    V: tl.constexpr, REPEAT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BK)
    j = tl.program_id(0) * BV + tl.arange(0, BV)
    slot = tl.load(slots + n).to(tl.int64)
    o_at = o + (n * V + h) * DV + j
    if slot < 0:
        tl.store(o_at, tl.zeros((BV,), o.dtype.element_ty), mask=j < DV)
        return
    state_at = pool + slot * pool_row + (h * DK + i[:, None]) * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    S_kv = tl.load(state_at, mask=inside, other=0.0).to(tl.float32)

    key = (h // REPEAT) * DK + i
    q_k = tl.load(q + n * q_row + key, mask=i < DK, other=0.0).to(tl.float32)
    k_k = tl.load(k + n * k_row + key, mask=i < DK, other=0.0).to(tl.float32)
    v_v = tl.load(v + n * v_row + h * DV + j, mask=j < DV, other=0.0).to(tl.float32)
    q_k = q_k * tl.rsqrt(tl.sum(q_k * q_k, 0) + eps) * scale
    k_k = k_k * tl.rsqrt(tl.sum(k_k * k_k, 0) + eps)
    a_ = tl.load(a + n * a_row + h)
    b_ = tl.load(b + n * b_row + h)
    g, beta = _gates(a_, b_, tl.load(A_log + h), tl.load(dt_bias + h), b)

    S_kv = S_kv * tl.exp(g)
    d_v = (v_v - tl.sum(S_kv * k_k[:, None], 0)) * beta
    S_kv = S_kv + k_k[:, None] * d_v[None, :]
    o_v = tl.sum(S_kv * q_k[:, None], 0)
    tl.store(o_at, o_v.to(o.dtype.element_ty), mask=j < DV)
    tl.store(state_at, S_kv.to(pool.dtype.element_ty), mask=inside)


@jit
def _invert(L, row, column, PRECISION: tl.constexpr):
    """Return the inverse of I + L, L strictly lower triangular [64, 64], by doubling blocks.

    With X the inverse of the diagonal blocks, that of the blocks twice as large is X - X L' X,
    L' being what those add. Powers of L would need fewer steps, but overflow: equal keys make
    entries of 10^17 that cancel.
    """
    X = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, L, 0.0)
    for level in tl.static_range(1, 6):
        added = ((row >> (level + 1)) == (column >> (level + 1))) & (
            (row >> level) != (column >> level)
        )
        XL = tl.dot(X, tl.where(added, L, 0.0), input_precision=PRECISION)
        X -= tl.dot(XL, X, input_precision=PRECISION)
    return X


@jit
def _solve_kernel(
    q, k, a, b, A_log, dt_bias, cu_seqlens, solved, attention, scales,
    T, N, q_row, k_row, a_row, b_row, scale, eps,
    V: tl.constexpr, REPEAT: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """For each chunk and value head: (I + L)^-1 beta, the attention within, and row factors.

    Norms and decays stay outside the dot products, whose operands are then exact inputs; the row
    factors carry them to the scan: e^G |k|^-1, e^G |q|^-1 scale, e^(G_C - G) |k|^-1 and e^G_C.
    """
    _, _, end, first = ragged_block(tl.program_id(0), cu_seqlens, N, C, STEPS)
    if first >= end:
        return
    h = tl.program_id(1)
    c = tl.arange(0, C)
    i = tl.arange(0, BK)
    t = first.to(tl.int64) + c
    inside = t < end
    square = inside[:, None] & (i < DK)[None, :]
    key = (h // REPEAT) * DK + i[None, :]
    k_CK = tl.load(k + t[:, None] * k_row + key, mask=square, other=0.0)
    q_CK = tl.load(q + t[:, None] * q_row + key, mask=square, other=0.0)
    k_wide, q_wide = k_CK.to(tl.float32), q_CK.to(tl.float32)
    k_unit = tl.rsqrt(tl.sum(k_wide * k_wide, 1) + eps)
    q_unit = tl.rsqrt(tl.sum(q_wide * q_wide, 1) + eps) * scale
    a_C = tl.load(a + t * a_row + h, mask=inside, other=0.0)
    b_C = tl.load(b + t * b_row + h, mask=inside, other=0.0)
    g_C, beta_C = _gates(a_C, b_C, tl.load(A_log + h), tl.load(dt_bias + h), b)
    g_C = tl.where(inside, g_C, 0.0)
    G_C = tl.cumsum(g_C, 0)
    G_end = tl.sum(tl.where(c == C - 1, G_C, 0.0), 0)  # not the sum of g: it would round otherwise

    row, column = c[:, None], c[None, :]
    decay = tl.exp(tl.where(row >= column, G_C[:, None] - G_C[None, :], float("-inf")))
    decay *= k_unit[None, :]
    k_, q_ = operand(k_CK), operand(q_CK)
    at = (t[:, None] * V + h) * C + column
    qk = tl.dot(q_, tl.trans(k_), input_precision=PRECISION) * q_unit[:, None] * decay
    tl.store(attention + at, qk.to(attention.dtype.element_ty), mask=inside[:, None])
    kk = tl.dot(k_, tl.trans(k_), input_precision=PRECISION) * (beta_C * k_unit)[:, None] * decay
    X = _invert(tl.where(row > column, kk, 0.0), row, column, PRECISION) * beta_C[None, :]
    tl.store(solved + at, X.to(solved.dtype.element_ty), mask=inside[:, None])
    grown = tl.exp(G_C)
    factor, plane = scales + h.to(tl.int64) * T + t, V * T
    tl.store(factor, grown * k_unit, mask=inside)
    tl.store(factor + plane, grown * q_unit, mask=inside)
    tl.store(factor + 2 * plane, tl.exp(G_end - G_C) * k_unit, mask=inside)
    tl.store(factor + 3 * plane, tl.exp(tl.zeros((C,), tl.float32) + G_end), mask=inside)


@jit
def _scan_kernel(
    q, k, v, pool, slots, cu_seqlens, solved, attention, scales, o,
    T, q_row, k_row, v_row, pool_row,
    V: tl.constexpr, REPEAT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk the chunks of one sequence with BV columns of one head's state in registers.

    Everything is transposed, [columns, tokens]: then each product's left side is the result of the
    one before, which a tensor core takes from registers.
    """
    h = tl.program_id(1)
    n = tl.program_id(2)
    slot = tl.load(slots + n).to(tl.int64)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    end = tl.load(cu_seqlens + n + 1).to(tl.int64)
    c = tl.arange(0, C)
    i = tl.arange(0, BK)
    j = tl.program_id(0) * BV + tl.arange(0, BV)
    state_at = pool + slot * pool_row + (h * DK + i[None, :]) * DV + j[:, None]
    kept = (j < tl.where(slot >= 0, DV, 0))[:, None] & (i < DK)[None, :]
    S_vk = tl.load(state_at, mask=kept, other=0.0).to(tl.float32)
    key = (h // REPEAT) * DK + i[None, :]
    value = h * DV + j[None, :]
    dtype = k.dtype.element_ty
    for first in range(start, end, C):
        t = first + c
        inside = t < end
        tokens = t[:, None]
        keys = inside[:, None] & (i < DK)[None, :]
        values = inside[:, None] & (j < DV)[None, :]
        k_CK = operand(tl.load(k + tokens * k_row + key, mask=keys, other=0.0))
        q_CK = operand(tl.load(q + tokens * q_row + key, mask=keys, other=0.0))
        v_CV = operand(tl.load(v + tokens * v_row + value, mask=values, other=0.0))
        at = (tokens * V + h) * C + c[None, :]
        X_CC = operand(tl.load(solved + at, mask=inside[:, None], other=0.0))
        A_CC = operand(tl.load(attention + at, mask=inside[:, None], other=0.0))
        factor = scales + h.to(tl.int64) * T + t
        k_scale = tl.load(factor, mask=inside, other=0.0)[None, :]
        q_scale = tl.load(factor + V * T, mask=inside, other=0.0)[None, :]
        write = tl.load(factor + 2 * V * T, mask=inside, other=0.0)[None, :]
        S_ = operand(S_vk.to(dtype))
        d_vC = tl.trans(v_CV) - tl.dot(S_, tl.trans(k_CK), input_precision=PRECISION) * k_scale
        d_vC = tl.dot(operand(d_vC.to(dtype)), tl.trans(X_CC), input_precision=PRECISION)
        o_vC = tl.dot(S_, tl.trans(q_CK), input_precision=PRECISION) * q_scale
        o_vC += tl.dot(operand(d_vC.to(dtype)), tl.trans(A_CC), input_precision=PRECISION)
        o_at = o + tokens * (V * DV) + value
        tl.store(o_at, tl.trans(o_vC).to(o.dtype.element_ty), mask=values)
        S_vk *= tl.load(scales + (3 * V + h).to(tl.int64) * T + first)
        S_vk += tl.dot(operand((d_vC * write).to(dtype)), k_CK, input_precision=PRECISION)
    tl.store(state_at, S_vk.to(pool.dtype.element_ty), mask=kept)
