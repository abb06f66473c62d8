"""The next tokens of sequences through a delta-rule layer, convolved in the kernel of the rule.

Chosen for: `RULE_STEP` with fewer than 256 states, or with several tokens of a sequence, unless
whole or several serves.

A program has some columns of a head's state. It convolves the inputs of that head itself, for all
tokens of its sequence, and takes them through its columns one after another, which stay in
registers meanwhile; after each it stores them in that token's slot. So a sequence's source may be
one of the slots: a program has read all that it overwrites. The second kernel norms whole heads and
writes the histories, which no program reads any more by then.

Source, traps and rounding: see conv1d, rule, step and norm.gated.

Shape letters: as in mixed_step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.conv1d_step import history_after, store_history
from runtime.kernels.delta_rule.head import (
    arguments,
    channels,
    head_before,
    head_convolved,
    head_inputs,
    head_window,
    normed,
    rows_each,
)
from runtime.kernels.delta_rule.step import advance, gates
from runtime.kernels.launch import jit, loaded, power_of_two, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.delta_rule.rule import Rule

_COLUMNS = 16


def convolved_within(
    qkv_DC: Tensor,
    z_DVv: Tensor,
    a_DV: Tensor,
    b_DV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    sources_B: Tensor,
    slots_D: Tensor,
) -> Tensor:
    """Return `mixed_step`, convolved in the kernel of the rule, the norm in one of its own."""
    of_head = arguments(qkv_DC, z_DVv, a_DV, b_DV, rule, conv_pool, state_pool)
    at = {"sources": sources_B, "slots": slots_D, "EACH": rows_each(sources_B, slots_D)}
    (heads, dv), (channels, _, taps) = rule.values, rule.conv_C1K.shape
    o, y = (torch.empty(z_DVv.shape, dtype=qkv_DC.dtype, device=qkv_DC.device) for _ in "oy")
    columns = min(_COLUMNS, power_of_two(dv))
    grid = (-(-dv // columns), heads, len(sources_B))
    _rule_kernel[grid](o=o, BV=columns, **of_head, **at, num_warps=1, **early())
    _norm_kernel[(max(heads, -(-channels // power_of_two(dv))), len(slots_D))](
        o,
        z_DVv,
        rule.norm_v,
        y,
        qkv_DC,
        conv_pool,
        sources_B,
        slots_D,
        channels,
        *(x.stride(0) for x in (z_DVv, qkv_DC, conv_pool)),
        rule.eps,
        EACH=at["EACH"],
        V=heads,
        DV=dv,
        K=taps,
        BV=power_of_two(dv),
        BJ=power_of_two(taps),
        num_warps=1,
        **early(),
    )
    return y


@jit
def _rule_kernel(
    qkv,
    a,
    b,
    filters,
    A_log,
    dt_bias,
    conv_pool,
    pool,
    sources,
    slots,
    o,
    qkv_row,
    a_row,
    b_row,
    conv_row,
    pool_row,
    scale,
    eps,
    EACH: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    start_next()
    h = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BK)
    j = tl.program_id(0) * BV + tl.arange(0, BV)
    source = tl.load(sources + n).to(tl.int64)
    o_at = o + (n * EACH * V + h) * DV + j
    # states, histories and weights do not depend on the kernels before
    keys, columns = i < tl.where(source >= 0, DK, 0), j < tl.where(source >= 0, DV, 0)
    inside = keys[:, None] & columns[None, :]
    state_at = pool + (h * DK + i[:, None]) * DV + j[None, :]
    S_kv = tl.load(state_at + source * pool_row, mask=inside, other=0.0)
    at, history = channels(h, i, j, H, V, DK, DV), conv_pool + source * conv_row
    past = head_before(filters, history, at, keys, columns, K)
    A_h, bias_h = tl.load(A_log + h), tl.load(dt_bias + h)
    t = n * EACH
    targets = loaded(slots + t, source >= 0, 1, EACH)
    wait_for_inputs()
    if source < 0:
        for token in tl.static_range(EACH):
            tl.store(o_at + token * V * DV, tl.zeros((BV,), o.dtype.element_ty), mask=j < DV)
        return

    inputs = head_inputs(qkv + t * qkv_row, qkv_row, at, keys, columns, EACH)
    a_s = loaded(a + t * a_row + h, source >= 0, a_row, EACH)
    b_s = loaded(b + t * b_row + h, source >= 0, b_row, EACH)
    window = head_window(past, inputs)
    for token in tl.static_range(EACH):
        g, beta = gates(a_s[token], b_s[token], A_h, bias_h, b)
        heads = head_convolved(past, window, o, token, K)
        o_v, S_kv = advance(S_kv, *heads, tl.exp(g), beta, scale, eps)
        tl.store(o_at + token * V * DV, o_v.to(o.dtype.element_ty), mask=j < DV)
        S_kv = S_kv.to(pool.dtype.element_ty)
        tl.store(state_at + targets[token].to(tl.int64) * pool_row, S_kv, mask=inside)


@jit
def _norm_kernel(
    o,
    z,
    weight,
    y,
    qkv,
    conv_pool,
    sources,
    slots,
    C,
    z_row,
    qkv_row,
    conv_row,
    eps,
    EACH: tl.constexpr,
    V: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    BJ: tl.constexpr,
):
    """Norm and gate one head of a row; with a sequence's first row write the histories of all.

    They are those of as many channels as a head is wide.
    """
    start_next()
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source = tl.load(sources + n // EACH).to(tl.int64)
    j = tl.arange(0, BV)
    inside = j < tl.where(h < V, DV, 0)
    w_v = tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)
    c = h * BV + j
    first = (source >= 0) & (n % EACH == 0)
    known = c < tl.where(first, C, 0)
    targets = loaded(slots + n, first, 1, EACH)
    wait_for_inputs()
    o_v = tl.load(o + (n * V + h) * DV + j, mask=inside, other=0.0)
    z_v = tl.load(z + n * z_row + h * DV + j, mask=inside, other=0.0)
    x, history = qkv + n * qkv_row + c, conv_pool + source * conv_row + c * (K - 1)
    kept = ()
    for token in tl.static_range(EACH):
        kept += (history_after(x, qkv_row, history, known, token, K, BJ),)  # type: ignore[assignment]
    tl.store(y + (n * V + h) * DV + j, normed(o_v, z_v, w_v, weight, y, eps, DV), mask=inside)
    for token in tl.static_range(EACH):
        slot_at = conv_pool + targets[token].to(tl.int64) * conv_row
        store_history(kept[token], slot_at + c * (K - 1), known, K)
