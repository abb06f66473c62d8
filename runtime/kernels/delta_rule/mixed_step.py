"""What the next tokens of sequences go through between the projections of a delta-rule layer.

Chosen for: `RULE_STEP`, that is all decoding, in two kernels of its own or by those of others.

    q, k, v = silu(conv(qkv))        o = rule(q, k, v, a, b)        y = gated_norm(o, z)

With few sequences a kernel costs more than the bytes it moves, so there is one, or two: see whole,
several and within. With many sequences conv1d_step runs first, and a program of step has a whole
head, which it norms.

A sequence may have several tokens, drafted ones. They pass one after another through a state that
stays in registers, and each leaves state and history in a slot of its own: whichever of them turns
out to be the last right one, the next step continues from its slot, and nothing is copied. What it
continued from is none of these slots: some programs may still read it when others have written.

Source, traps and rounding: see conv1d, rule, step and norm.gated.

Shape letters: B sequences, D rows, as many for each sequence, C channels of q, k and v, K taps, H
key heads, V value heads, k key size, v value size, S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.cases import SEVERAL, Step
from runtime.kernels.delta_rule.conv1d import taps
from runtime.kernels.delta_rule.conv1d_step import conv1d_step
from runtime.kernels.delta_rule.head import rows_each
from runtime.kernels.delta_rule.rule import heads_first, recurrence
from runtime.kernels.delta_rule.several import several_unscaled
from runtime.kernels.delta_rule.states import gated_delta_step
from runtime.kernels.delta_rule.whole import whole_heads
from runtime.kernels.delta_rule.within import convolved_within
from runtime.kernels.dispatch import RULE_STEP
from runtime.kernels.launch import use_triton, widen
from runtime.kernels.norm.gated import Gate, Unscaled, gated_rmsnorm_reference

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.delta_rule.rule import Rule


def mixed_step_reference(
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
    """Say what `mixed_step` computes, in plain torch; the pools are updated in place."""
    each, o = rows_each(sources_B, slots_D), torch.zeros_like(z_DVv)
    sources, slots = sources_B.tolist(), slots_D.tolist()
    for start, source in zip(range(0, len(slots), each), sources, strict=True):
        if source < 0:
            continue
        rows = slice(start, start + each)
        window = torch.cat([conv_pool[source].T.to(qkv_DC.dtype), qkv_DC[rows]])
        heads = rule.split(taps(window, rule.conv_C1K))
        inputs = heads_first(*heads, a_DV[rows], b_DV[rows], rule.A_log, rule.dt_bias)
        state = state_pool[source]
        for token, slot in enumerate(slots[rows]):
            one = (x[:, token : token + 1] for x in inputs)
            o_V1v, after = recurrence(widen(state), *one)
            o[start + token] = o_V1v[:, 0].to(o.dtype)
            state = state_pool[slot] = after.to(state_pool.dtype)
            conv_pool[slot] = window[token + 1 : token + 1 + conv_pool.shape[2]].T
    return gated_rmsnorm_reference(o, z_DVv, rule.norm_v, rule.eps)


def mixed_step(
    qkv_DC: Tensor,
    z_DVv: Tensor,
    a_DV: Tensor,
    b_DV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    sources_B: Tensor,
    slots_D: Tensor,
    form: str = SEVERAL,
) -> Tensor | Unscaled:
    """Return the normed and gated output [D, V, v] for the next tokens of each sequence.

    It may be left unscaled for a product, whose weight's form is given.

    qkv_DC, z_DVv, a_DV, b_DV  model dtype, rows of one or two products; contiguous but for rows
    conv_pool                  [S, C, K-1], state_pool [S, V, k, v]: each slot contiguous, in place
    sources_B                  the slot that each sequence continues; negative: padding, zeros out
    slots_D                    where each row leaves what it comes to, D/B of them for a sequence;
                               no slot twice; a sequence's source is its slot if that is but one,
                               else none of its own; negative for padding: nothing written
    form                       of the weight of the product after; SEVERAL: the output is needed
    """
    step = _step(
        Step(
            use_triton(qkv_DC),
            slots_D.numel() * rule.values[0],
            slots_D.numel(),
            rows_each(sources_B, slots_D),
            rule.values[0] // rule.keys[0],
            rule.values[1],
            rule.values[0] * rule.values[1],
            form,
        )
    )
    y: Tensor | Unscaled = step(
        qkv_DC, z_DVv, a_DV, b_DV, rule, conv_pool, state_pool, sources_B, slots_D
    )
    return y


def convolved_before(
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
    """Return `mixed_step` of one row each: first convolved, the norm in the rule's kernel."""
    assert sources_B.shape == slots_B.shape, "one row for each sequence"
    qkv = conv1d_step(qkv_BC, rule.conv_C1K, conv_pool, slots_B)
    gates, gate = (a_BV, b_BV, rule.A_log, rule.dt_bias), Gate(z_BVv, rule.norm_v, rule.eps)
    return gated_delta_step(*rule.split(qkv), *gates, state_pool, slots_B, gate)


_step = RULE_STEP.bind(
    mixed_step_reference, whole_heads, several_unscaled, convolved_within, convolved_before
)
