"""The next token of each sequence through a delta-rule layer, in one kernel.

Chosen for: `RULE_STEP` with 32 states or fewer, each with a key head of its own.

A program has a whole head: it convolves what the head reads, takes the token through the state, and
norms and gates what comes out. No other program reads the histories of the same channels, so it
writes those, too. Each warp has some rows of the state, and all of their columns.

Trap: with more warps than 128 numbers fill, the compiler loads the inputs again in every layout
that they are needed in, and spills: 8 warps, 488 bytes a thread.

Source, other traps and rounding: see within, conv1d, rule, step and norm.gated.

Shape letters: as in mixed_step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.conv1d_step import convolved, loaded, taps_before, widened
from runtime.kernels.delta_rule.rule import EPS
from runtime.kernels.delta_rule.step import advance, gates
from runtime.kernels.delta_rule.within import check_step
from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.norm.gated import gated_norm
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.delta_rule.rule import Rule


def whole_heads(
    qkv_BC: Tensor,
    z_BVv: Tensor,
    a_BV: Tensor,
    b_BV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    sources_B: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """Return `mixed_step` of one row each, with as many key heads as value heads."""
    check_step(qkv_BC, z_BVv, rule, conv_pool, state_pool)
    (heads, dv), (key_heads, dk) = rule.values, rule.keys
    assert heads == key_heads, "a key head for each value head"
    assert sources_B.shape == slots_B.shape, "one row for each sequence"
    y = torch.empty(z_BVv.shape, dtype=qkv_BC.dtype, device=qkv_BC.device)
    _heads_kernel[(heads, len(slots_B))](
        qkv_BC,
        z_BVv,
        a_BV,
        b_BV,
        rule.conv_C1K,
        rule.A_log,
        rule.dt_bias,
        rule.norm_v,
        conv_pool,
        state_pool,
        slots_B,
        y,
        *(x.stride(0) for x in (qkv_BC, z_BVv, a_BV, b_BV, conv_pool, state_pool)),
        dk**-0.5,
        EPS,
        rule.eps,
        V=heads,
        DK=dk,
        DV=dv,
        K=rule.conv_C1K.shape[2],
        BK=power_of_two(dk),
        BV=power_of_two(dv),
        num_warps=4,
        **early(),
    )
    return y


@jit
def _channels(h, i, j, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """Return which channels are q, k and v of a head."""
    q_c = h * DK + i
    return q_c, q_c + V * DK, 2 * V * DK + h * DV + j


@jit
def _store_history(history, inputs, c, inside, K: tl.constexpr):
    """Store the last K - 1 of K inputs of the channels c."""
    for j in tl.static_range(K - 1):
        at = history + c * (K - 1) + j
        tl.store(at, inputs[j + 1].to(history.dtype.element_ty), mask=inside)


@jit
def _normed(o_v, z_v, w_v, norm, y, eps, DV: tl.constexpr):
    """Return the gated norm of a head in the dtype of `y`, which o is rounded to first."""
    o_v = o_v.to(y.dtype.element_ty).to(tl.float32)
    root = tl.rsqrt(tl.sum(o_v * o_v, 0) / DV + eps)
    return gated_norm(o_v, z_v.to(tl.float32), w_v, root, norm, y).to(y.dtype.element_ty)


@jit
def _heads_kernel(
    qkv,
    z,
    a,
    b,
    filters,
    A_log,
    dt_bias,
    norm,
    conv_pool,
    pool,
    slots,
    y,
    qkv_row,
    z_row,
    a_row,
    b_row,
    conv_row,
    pool_row,
    scale,
    eps,
    norm_eps,
    V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    start_next()
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = tl.arange(0, BK), tl.arange(0, BV)
    slot = tl.load(slots + n).to(tl.int64)
    y_at = y + (n * V + h) * DV + j
    # states, histories and weights do not depend on the kernels before
    keys, columns = i < tl.where(slot >= 0, DK, 0), j < tl.where(slot >= 0, DV, 0)
    inside = keys[:, None] & columns[None, :]
    state_at = pool + slot * pool_row + (h * DK + i[:, None]) * DV + j[None, :]
    S_kv = tl.load(state_at, mask=inside, other=0.0)
    history = conv_pool + slot * conv_row
    q_c, k_c, v_c = _channels(h, i, j, V, DK, DV)
    q_w, q_s, q_old = taps_before(filters, history, q_c, keys, K)
    k_w, k_s, k_old = taps_before(filters, history, k_c, keys, K)
    v_w, v_s, v_old = taps_before(filters, history, v_c, columns, K)
    A_h, bias_h = tl.load(A_log + h), tl.load(dt_bias + h)
    w_v = tl.load(norm + j, mask=columns, other=0.0).to(tl.float32)
    wait_for_inputs()
    if slot < 0:
        tl.store(y_at, tl.zeros((BV,), y.dtype.element_ty), mask=j < DV)
        return

    x = qkv + n * qkv_row
    q_x, k_x = loaded(x + q_c, keys, 0, 1), loaded(x + k_c, keys, 0, 1)
    v_x = loaded(x + v_c, columns, 0, 1)
    a_h, b_h = tl.load(a + n * a_row + h), tl.load(b + n * b_row + h)
    z_v = tl.load(z + n * z_row + h * DV + j, mask=columns, other=0.0)
    q_s, k_s, v_s = q_s + widened(q_x), k_s + widened(k_x), v_s + widened(v_x)
    q_y = convolved(q_s, q_w, q_old, y, 1, K)
    k_y = convolved(k_s, k_w, k_old, y, 1, K)
    v_y = convolved(v_s, v_w, v_old, y, 1, K)
    g, beta = gates(a_h, b_h, A_h, bias_h, b)
    o_v, S_kv = advance(S_kv, q_y[0], k_y[0], v_y[0], tl.exp(g), beta, scale, eps)
    tl.store(state_at, S_kv.to(pool.dtype.element_ty), mask=inside)
    tl.store(y_at, _normed(o_v, z_v, w_v, norm, y, norm_eps, DV), mask=j < DV)
    tl.debug_barrier()  # another warp may still read what this one overwrites
    _store_history(history, q_s, q_c, keys, K)
    _store_history(history, k_s, k_c, keys, K)
    _store_history(history, v_s, v_c, columns, K)
