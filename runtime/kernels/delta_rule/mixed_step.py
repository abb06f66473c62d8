"""What one token goes through between the projections of a delta-rule layer.

Chosen for: `RULE_STEP`, that is all decoding, in two kernels of its own or by those of others.

    q, k, v = silu(conv(qkv))        o = rule(q, k, v, a, b)        y = gated_norm(o, z)

With few sequences a kernel costs more than the bytes it moves, so there are two. The first has a
program for some columns of a head, which convolves the inputs of that head itself; the second norms
whole heads and updates the histories, which no program reads any more by then. With many sequences
conv1d_step runs first, and a program of step has a whole head, which it norms.

Source, traps and rounding: see conv1d, rule, step and norm.gated.

Shape letters: B sequences with one token each, C channels of q, k and v, K taps, H key heads, V
value heads, k key size, v value size, S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.cases import Step
from runtime.kernels.delta_rule.conv1d_step import (
    conv1d_step,
    conv1d_step_reference,
    last_tap,
    mixed,
    older_taps,
    shift_history,
)
from runtime.kernels.delta_rule.rule import EPS
from runtime.kernels.delta_rule.states import gated_delta_step, gated_delta_step_reference
from runtime.kernels.delta_rule.step import advance, gates
from runtime.kernels.dispatch import RULE_STEP
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.norm.gated import Gate, gated_norm
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = 16


class Rule(NamedTuple):
    """A layer's own weights, as conv1d_step, gated_delta_step and gated_rmsnorm take them.

    conv_C1K [C, 1, K], A_log and dt_bias [V], norm_v [v]; heads and sizes are (H, k) and (V, v)
    """

    conv_C1K: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_v: Tensor
    keys: tuple[int, int]
    values: tuple[int, int]
    eps: float

    def split(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the views q, k [T, H, k] and v [T, V, v]."""
        key_width, value_width = self.keys[0] * self.keys[1], self.values[0] * self.values[1]
        q, k, v = torch.split(qkv_TC, [key_width, key_width, value_width], -1)
        return q.view(-1, *self.keys), k.view(-1, *self.keys), v.view(-1, *self.values)


def mixed_step_reference(
    qkv_BC: Tensor,
    z_BVv: Tensor,
    a_BV: Tensor,
    b_BV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """Say what `mixed_step` computes, in plain torch; the pools are updated in place."""
    qkv = conv1d_step_reference(qkv_BC, rule.conv_C1K, conv_pool, slots_B)
    gate = Gate(z_BVv, rule.norm_v, rule.eps)
    return gated_delta_step_reference(
        *rule.split(qkv), a_BV, b_BV, rule.A_log, rule.dt_bias, state_pool, slots_B, gate
    )


def mixed_step(
    qkv_BC: Tensor,
    z_BVv: Tensor,
    a_BV: Tensor,
    b_BV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    *,
    copied: bool = False,
) -> Tensor:
    """Return the normed and gated output [B, V, v] for one token of each sequence; slots move on.

    qkv_BC, z_BVv, a_BV, b_BV  model dtype, rows of one or two products; contiguous but for rows
    conv_pool                  [S, C, K-1], state_pool [S, V, k, v]: each slot contiguous, in place
    slots_B                    no slot twice; negative: zeros out, nothing written
    copied                     the states were written just before: they are not read earlier
    """
    step = _step(Step(use_triton(qkv_BC), qkv_BC.shape[0] * rule.values[0], copied))
    args = qkv_BC, z_BVv, a_BV, b_BV, rule, conv_pool, state_pool, slots_B
    if step is convolved_within:
        return convolved_within(*args, copied=copied)
    y_BVv: Tensor = step(*args)
    return y_BVv


def convolved_before(
    qkv_BC: Tensor,
    z_BVv: Tensor,
    a_BV: Tensor,
    b_BV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """Return `mixed_step`, the convolution in a kernel of its own, the norm in that of the rule."""
    qkv = conv1d_step(qkv_BC, rule.conv_C1K, conv_pool, slots_B)
    gates, gate = (a_BV, b_BV, rule.A_log, rule.dt_bias), Gate(z_BVv, rule.norm_v, rule.eps)
    return gated_delta_step(*rule.split(qkv), *gates, state_pool, slots_B, gate)


def convolved_within(
    qkv_BC: Tensor,
    z_BVv: Tensor,
    a_BV: Tensor,
    b_BV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots_B: Tensor,
    *,
    copied: bool = False,
) -> Tensor:
    """Return `mixed_step`, the convolution in the kernel of the rule, the norm in one of its own.

    copied  the first kernel starts only when those before have finished
    """
    _check(qkv_BC, z_BVv, rule, conv_pool, state_pool)
    (heads, dv), (key_heads, dk), batch = rule.values, rule.keys, len(qkv_BC)
    channels, _, taps = rule.conv_C1K.shape
    o, y = (torch.empty(z_BVv.shape, dtype=qkv_BC.dtype, device=qkv_BC.device) for _ in "oy")
    columns = min(_COLUMNS, power_of_two(dv))
    _rule_kernel[(-(-dv // columns), heads, batch)](
        qkv_BC,
        a_BV,
        b_BV,
        rule.conv_C1K,
        rule.A_log,
        rule.dt_bias,
        conv_pool,
        state_pool,
        slots_B,
        o,
        *(x.stride(0) for x in (qkv_BC, a_BV, b_BV, conv_pool, state_pool)),
        dk**-0.5,
        EPS,
        H=key_heads,
        V=heads,
        DK=dk,
        DV=dv,
        K=taps,
        BK=power_of_two(dk),
        BV=columns,
        num_warps=1,
        **({} if copied else early()),
    )
    _norm_kernel[(max(heads, -(-channels // power_of_two(dv))), batch)](
        o,
        z_BVv,
        rule.norm_v,
        y,
        qkv_BC,
        conv_pool,
        slots_B,
        channels,
        *(x.stride(0) for x in (z_BVv, qkv_BC, conv_pool)),
        rule.eps,
        V=heads,
        DV=dv,
        K=taps,
        BV=power_of_two(dv),
        BJ=power_of_two(taps),
        num_warps=1,
        **early(),
    )
    return y


def _check(qkv: Tensor, z: Tensor, rule: Rule, conv_pool: Tensor, state_pool: Tensor) -> None:
    (heads, dv), (_, dk) = rule.values, rule.keys
    channels, _, taps = rule.conv_C1K.shape
    assert qkv.shape[1] == channels, "one filter for each channel"
    assert qkv.stride(1) == 1, "channels must be contiguous"
    assert z.stride()[1:] == (dv, 1), "heads of a token must follow one another"
    assert rule.conv_C1K.is_contiguous(), "the filters must be contiguous"
    assert conv_pool.shape[1:] == (channels, taps - 1), "the pool of histories is [slots, C, K-1]"
    assert state_pool.shape[1:] == (heads, dk, dv), "the pool of states is [slots, V, k, v]"
    assert conv_pool[0].is_contiguous(), "a history must be contiguous"
    assert state_pool[0].is_contiguous(), "a state must be contiguous"


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
    slots,
    o,
    qkv_row,
    a_row,
    b_row,
    conv_row,
    pool_row,
    scale,
    eps,
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
    slot = tl.load(slots + n).to(tl.int64)
    o_at = o + (n * V + h) * DV + j
    # states, histories and weights do not depend on the kernels before
    keys, columns = i < tl.where(slot >= 0, DK, 0), j < tl.where(slot >= 0, DV, 0)
    state_at = pool + slot * pool_row + (h * DK + i[:, None]) * DV + j[None, :]
    S_kv = tl.load(state_at, mask=keys[:, None] & columns[None, :], other=0.0).to(tl.float32)
    history = conv_pool + slot * conv_row
    q_c = h // (V // H) * DK + i
    k_c = q_c + H * DK
    v_c = 2 * H * DK + h * DV + j
    q_k = older_taps(filters, history + q_c * (K - 1), q_c, keys, K)
    k_k = older_taps(filters, history + k_c * (K - 1), k_c, keys, K)
    v_v = older_taps(filters, history + v_c * (K - 1), v_c, columns, K)
    q_w, k_w = last_tap(filters, q_c, keys, K), last_tap(filters, k_c, keys, K)
    v_w = last_tap(filters, v_c, columns, K)
    A_h, bias_h = tl.load(A_log + h), tl.load(dt_bias + h)
    wait_for_inputs()
    if slot < 0:
        tl.store(o_at, tl.zeros((BV,), o.dtype.element_ty), mask=j < DV)
        return

    x = qkv + n * qkv_row
    q_x = tl.load(x + q_c, mask=keys, other=0.0)
    k_x = tl.load(x + k_c, mask=keys, other=0.0)
    v_x = tl.load(x + v_c, mask=columns, other=0.0)
    g, beta = gates(tl.load(a + n * a_row + h), tl.load(b + n * b_row + h), A_h, bias_h, b)
    q_k = mixed(q_x, q_k, q_w, o).to(tl.float32)
    k_k = mixed(k_x, k_k, k_w, o).to(tl.float32)
    v_v = mixed(v_x, v_v, v_w, o).to(tl.float32)
    q_k = q_k * tl.rsqrt(tl.sum(q_k * q_k, 0) + eps) * scale
    k_k = k_k * tl.rsqrt(tl.sum(k_k * k_k, 0) + eps)
    o_v, S_kv = advance(S_kv, q_k, k_k, v_v, tl.exp(g), beta)
    tl.store(o_at, o_v.to(o.dtype.element_ty), mask=j < DV)
    tl.store(state_at, S_kv.to(pool.dtype.element_ty), mask=keys[:, None] & columns[None, :])


@jit
def _norm_kernel(
    o,
    z,
    weight,
    y,
    qkv,
    conv_pool,
    slots,
    C,
    z_row,
    qkv_row,
    conv_row,
    eps,
    V: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    BJ: tl.constexpr,
):
    """Norm and gate one head, and append to the histories of as many channels as it is wide."""
    start_next()
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    j = tl.arange(0, BV)
    inside = j < tl.where(h < V, DV, 0)
    w_v = tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)
    c = h * BV + j
    known = c < tl.where(slot >= 0, C, 0)
    wait_for_inputs()
    o_v = tl.load(o + (n * V + h) * DV + j, mask=inside, other=0.0).to(tl.float32)
    z_v = tl.load(z + n * z_row + h * DV + j, mask=inside, other=0.0).to(tl.float32)
    x_C = tl.load(qkv + n * qkv_row + c, mask=known, other=0.0)
    root = tl.rsqrt(tl.sum(o_v * o_v, 0) / DV + eps)
    y_v = gated_norm(o_v, z_v, w_v, root, weight, y)
    tl.store(y + (n * V + h) * DV + j, y_v.to(y.dtype.element_ty), mask=inside)
    shift_history(x_C, conv_pool + slot * conv_row + c * (K - 1), known, K, BJ)


_step = RULE_STEP.bind(mixed_step_reference, convolved_within, convolved_before)
