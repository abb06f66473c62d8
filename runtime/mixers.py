"""The mixers of the layers: the gated delta rule and gated attention.

    delta rule   q, k, v = silu(conv(W_qkv x));  out = W_o gated_norm(delta_rule(q, k, v, a, b), z)
    attention    q, gate, k, v = W_qkv x;  out = W_o (attend(rope(norm(q)), rope(norm(k)), v)
                 * sigmoid(gate))

A batch has rows of decoding, then those of prompts; each sort goes through kernels of its own.

Source: transformers, modeling_qwen3_5.

Shape letters: T packed tokens, H hidden size, C channels of q, k and v together, V value heads of
size v, n heads of size d.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from formats.family.config import Config
from runtime.context import Context
from runtime.kernels.attention.decode import attention_decode
from runtime.kernels.attention.prefill import attention_prefill
from runtime.kernels.attention.reference import split_query_gate
from runtime.kernels.attention.step import attention_step
from runtime.kernels.attention.write import norm_rope_write
from runtime.kernels.cases import SEVERAL, Heads, RuleOutput
from runtime.kernels.delta_rule.conv1d import conv1d_prefill
from runtime.kernels.delta_rule.mixed_step import mixed_step
from runtime.kernels.delta_rule.rule import Rule
from runtime.kernels.delta_rule.states import gated_delta_prefill
from runtime.kernels.dispatch import ATTENTION, RULE_OUTPUT
from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import Codes
from runtime.kernels.linear.product import (
    codes_linear,
    linear,
    linear_update,
    linears,
    takes_codes,
)
from runtime.kernels.linear.weight import form_of
from runtime.kernels.norm.gated import Unscaled, gated_rmsnorm, gated_rmsnorm_codes
from runtime.kernels.norm.rms import Parts
from runtime.state import Batch, Pools
from runtime.weights import Attention, Gdn


def mix(
    x: Tensor,
    mixer: Gdn | Attention,
    pools: Pools,
    context: Context,
    codes: Codes | Lined | None = None,
) -> Tensor | Parts:
    """Return what the layer's mixer makes of normed x [T, H], perhaps in parts; the pools move on.

    codes  those of x, if there are any
    """
    if isinstance(mixer, Gdn):
        return gdn(x, mixer, pools, context, codes)
    return attention(x, mixer, pools, context, codes)


def gdn(
    x: Tensor, w: Gdn, pools: Pools, context: Context, codes: Codes | Lined | None = None
) -> Tensor | Parts:
    """Return the gated delta rule's output [T, H]; states and histories move on."""
    (qkvz, ba), sizes = linears(x, (w.qkvz, w.ba), codes), context.config.sizes
    output = RuleOutput(context.batch.num_decodes > 0, sizes["DV"], takes_codes(w.out, x))
    if _rule_norm(output) is not gated_rmsnorm_codes:
        return linear_update(rule_heads(qkvz, ba, w, pools, context), w.out)
    prompts = rule_prompts(rule_inputs(qkvz, ba, w, context), w, pools, context)
    return codes_linear(gated_rmsnorm_codes(*prompts, w.norm, context.config.eps), w.out, x)


def rule_heads(
    qkvz: Tensor, ba: Tensor, w: Gdn, pools: Pools, context: Context
) -> Tensor | Unscaled:
    """Return the rule's gated output [T, V*v]: decode rows in steps, the rest in chunks."""
    rule, batch = rule_of(w, context.config), context.batch
    parts: list[Tensor] = []
    inputs = qkv, z, a, b = rule_inputs(qkvz, ba, w, context)
    if batch.num_decodes:
        rows = slice(0, batch.num_decodes)
        at = batch.sources, batch.states[rows]
        form = SEVERAL if batch.num_prefills else form_of(w.out)[0]
        y = mixed_step(qkv[rows], z[rows], a[rows], b[rows], rule, *pools, *at, form)
        if isinstance(y, Unscaled):
            return y
        parts.append(y)
    if batch.num_prefills:
        prompts = rule_prompts(inputs, w, pools, context)
        parts.append(gated_rmsnorm(*prompts, w.norm, rule.eps))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def rule_inputs(
    qkvz: Tensor, ba: Tensor, w: Gdn, context: Context
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return qkv [T, C], z [T, V, v], a and b [T, V] as views."""
    heads, width = context.config.sizes["NV"], context.config.sizes["DV"]
    qkv, z = torch.split(qkvz, [w.conv.shape[0], heads * width], -1)
    b, a = ba.chunk(2, -1)
    return qkv, z.view(-1, heads, width), a, b


def rule_prompts(
    inputs: Sequence[Tensor], w: Gdn, pools: Pools, context: Context
) -> tuple[Tensor, Tensor]:
    """Return (the rule's output, z) of the prompts' rows of `rule_inputs`, both [T, V, v]."""
    rule, batch = rule_of(w, context.config), context.batch
    rows, bounds = slice(batch.num_decodes, None), batch.cu_seqlens
    qkv, z, a, b = (x[rows] for x in inputs)
    slots, gates = batch.states[rows], (a, b, w.A_log, w.dt_bias)
    heads = rule.split(conv1d_prefill(qkv, w.conv, pools[0], slots, bounds))
    return gated_delta_prefill(*heads, *gates, pools[1], slots, bounds), z


def rule_of(w: Gdn, config: Config) -> Rule:
    """Return what the rule takes of a layer's weights."""
    s = config.sizes
    keys, values = (s["NK"], s["DK"]), (s["NV"], s["DV"])
    return Rule(w.conv, w.A_log, w.dt_bias, w.norm, keys, values, config.eps)


def attention(
    x: Tensor, w: Attention, pools: Pools, context: Context, codes: Codes | Lined | None = None
) -> Tensor | Parts:
    """Return gated attention's output [T, H]; the tokens' keys and values enter the pools."""
    return linear_update(attention_heads(linear(x, w.qkv, codes), w, pools, context), w.out)


def attention_heads(
    qkv: Tensor, w: Attention, pools: Pools, context: Context, rows_R: Tensor | None = None
) -> Tensor:
    """Return the gated attention [T, n*d] from its inputs' projections, or some rows of it.

    rows_R  [R] int64, the rows that are wanted: see `attention_step`; None: all
    """
    sizes, batch = context.config.sizes, context.batch
    heads, kv_heads, dim = sizes["NH"], sizes["NKV"], sizes["HD"]
    widths = [2 * heads * dim, kv_heads * dim, kv_heads * dim]
    query_gate, k, v = torch.split(qkv, widths, -1)
    q, gate = split_query_gate(query_gate, heads, dim)
    k, v = k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
    rope = w.q_norm, w.k_norm, *context.angles, context.config.eps
    rows = Heads(batch.num_decodes, batch.each, kv_heads, batch.num_prefills > 0)
    if w.cache is None and _attention(rows) is attention_step:
        at = batch.slots, batch.lengths
        return attention_step(q, gate, k, v, *rope, *pools, *at, batch.each, rows_R).flatten(1)
    q = norm_rope_write(q, k, v, *rope, *pools, batch.token_slots, batch.positions)
    if w.cache is not None:
        w.cache.round(*pools, batch.token_slots, batch.positions)
    attended = attend(q, gate, pools, batch).flatten(1)
    return attended if rows_R is None else attended.index_select(0, rows_R)


def attend(q: Tensor, gate: Tensor, pools: Pools, batch: Batch) -> Tensor:
    """Return the gated attention [T, n, d] of the decode rows, then of the prefills."""
    decodes, prefills = slice(0, batch.num_decodes), slice(batch.num_decodes, None)
    parts = []
    if batch.num_decodes:
        rows, late = (batch.slots[decodes], batch.lengths), batch.each
        parts.append(attention_decode(q[decodes], gate[decodes], *pools, *rows, late))
    if batch.num_prefills:
        at = batch.slots[prefills], batch.cu_seqlens, batch.starts
        parts.append(attention_prefill(q[prefills], gate[prefills], *pools, *at))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


_rule_norm = RULE_OUTPUT.bind(gated_rmsnorm, gated_rmsnorm_codes)
_attention = ATTENTION.bind(attention_step, norm_rope_write)
