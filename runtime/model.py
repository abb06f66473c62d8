"""The text model of Qwen3.5, dense and mixture of experts: from token ids to logits.

    x = embed[id]
    x = x + mixer(norm(x));  x = x + feed_forward(norm(x))      each layer, in the model dtype
    logits = head(norm(x))

    delta rule   q, k, v = silu(conv(W_qkv x));  out = W_o gated_norm(delta_rule(q, k, v, a, b), z)
    attention    q, gate, k, v = W_qkv x;  out = W_o (attend(rope(norm(q)), rope(norm(k)), v)
                 * sigmoid(gate))
    MTP head     h' = layer(fc [norm(embed[next id]), norm(h)]);  logits = head(norm(h'))

Source: transformers, modeling_qwen3_5 and modeling_qwen3_5_moe; for the MTP head, which it does not
have, vLLM's qwen3_5_mtp.
Traps: sizes are those of config.json, never derived (head_dim is not hidden / heads). q_proj holds
for each head its query, then its gate. The MTP head takes the embedding first and the hidden state
*after* the final norm.

Shape letters: T packed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from formats.family.config import Config
from runtime.kernels.attention.decode import attention_decode
from runtime.kernels.attention.fp8_cache import Fp8Cache
from runtime.kernels.attention.prefill import attention_prefill
from runtime.kernels.attention.reference import split_query_gate
from runtime.kernels.attention.rope import rope_cos_sin
from runtime.kernels.attention.step import attention_step
from runtime.kernels.attention.write import norm_rope_write
from runtime.kernels.cases import SEVERAL, Heads, Rows, RuleOutput
from runtime.kernels.delta_rule.conv1d import conv1d_prefill
from runtime.kernels.delta_rule.mixed_step import mixed_step
from runtime.kernels.delta_rule.rule import Rule
from runtime.kernels.delta_rule.states import gated_delta_prefill
from runtime.kernels.dispatch import ATTENTION, LAYER, RULE_OUTPUT
from runtime.kernels.draft.inputs import draft_inputs
from runtime.kernels.encode.rows import Codes
from runtime.kernels.launch import use_triton
from runtime.kernels.linear.mlp import added_mlp, mlp, mlp_update
from runtime.kernels.linear.product import (
    codes_for,
    codes_linear,
    linear,
    linear_update,
    linears,
    takes_codes,
)
from runtime.kernels.linear.row import added_linear, norm_row_linear
from runtime.kernels.linear.weight import Weight, form_of
from runtime.kernels.moe.layer import MoeWeights, moe_block, moe_row, moe_terms
from runtime.kernels.moe.sum import Pairs, add_pairs_rmsnorm
from runtime.kernels.norm.gated import gated_rmsnorm, gated_rmsnorm_codes
from runtime.kernels.norm.rms import Parts, add_rmsnorm, rmsnorm
from runtime.state import Batch, Pools


@dataclass(frozen=True)
class Gdn:
    """Gated delta rule. Rows of qkvz: q, k, v, z; of ba: b, which becomes beta, then a, the decay.

    qkvz [C + V*v, H], ba [2V, H], conv [C, 1, K], dt_bias and A_log [V], norm [v], out [H, V*v]
    """

    qkvz: Weight
    ba: Weight
    conv: Tensor
    dt_bias: Tensor
    A_log: Tensor
    norm: Tensor
    out: Weight


@dataclass(frozen=True)
class Attention:
    """Gated attention. Rows of qkv: query and gate of each head in turn, all keys, all values.

    qkv [(2*nh + 2*nkv) * d, H], q_norm and k_norm [d], out [H, nh*d]
    cache  how keys and values are rounded in the pools; None: to the model dtype
    """

    qkv: Weight
    q_norm: Tensor
    k_norm: Tensor
    out: Weight
    cache: Fp8Cache | None = None


@dataclass(frozen=True)
class Mlp:
    """Dense feed-forward: gate_up [2I, H], gate rows first, and down [H, I]."""

    gate_up: Weight
    down: Weight


FeedForward = Mlp | MoeWeights
Update = Tensor | Pairs | Parts
DRAFTED = 1 << 16


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    input_norm: Tensor
    mixer: Gdn | Attention
    post_norm: Tensor
    feed_forward: FeedForward

    @cached_property
    def form(self) -> str:
        """Return how its large weights are stored, SEVERAL if not all alike or of experts."""
        mixer, weights = self.mixer, self.feed_forward
        if isinstance(weights, MoeWeights):
            return SEVERAL
        first = mixer.qkvz if isinstance(mixer, Gdn) else mixer.qkv
        forms = {form_of(w)[0] for w in (first, mixer.out, weights.gate_up, weights.down)}
        return forms.pop() if len(forms) == 1 else SEVERAL


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction head: fc [H, 2H] and one full-attention layer between norms [H]."""

    norm_embedding: Tensor
    norm_hidden: Tensor
    fc: Weight
    layer: Layer
    norm: Tensor


@dataclass(frozen=True)
class Model:
    """All weights. A tied head is `embed` itself."""

    config: Config
    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Weight
    mtp: Mtp | None

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the model dtype: that of the residual stream."""
        return self.embed.dtype

    @property
    def draft_head(self) -> Weight:
        """Return the rows of the head that drafts are chosen from: all, unless it is tied.

        Small models tie it. It is a third of the bytes of a step of 0.8B, and would be read again
        for each draft. Tokens are numbered by how common they are, so the first do for most drafts.
        """
        return self.embed[:DRAFTED] if self.head is self.embed else self.head


@dataclass(frozen=True)
class Context:
    """What all layers of a forward pass share: the batch and its (cos, sin)."""

    config: Config
    batch: Batch
    angles: tuple[Tensor, Tensor]

    @staticmethod
    def of(
        config: Config,
        batch: Batch,
        dtype: torch.dtype,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Context:
        """Return the context of a batch.

        angles  those of the batch, where they are known
        """
        return Context(config, batch, angles or angles_of(config, batch, dtype))


def angles_of(config: Config, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of the rows; text has one position for each token, so plain rope."""
    rope = config.rope
    rotated = int(config.sizes["HD"] * rope.partial)
    return rope_cos_sin(batch.positions, rotated, rope.theta, None, dtype, rope.scaling)


def hidden_states(
    model: Model,
    pools: Sequence[Pools],
    batch: Batch,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the hidden states [T, H] after the final norm; the pools move on.

    pools   of each layer, as `State.pools` gives them
    angles  those of the batch, where they are known
    """
    x, update = F.embedding(batch.ids, model.embed), None
    context = Context.of(model.config, batch, model.dtype, angles)
    for layer, pool in zip(model.layers, pools, strict=True):
        x, update = decoder_layer(x, update, layer, pool, context)
    return final_norm(x, update, model.norm, model.config.eps)


def draft_states(
    model: Model,
    pools: Pools,
    batch: Batch,
    hidden_TH: Tensor,
    angles: tuple[Tensor, Tensor] | None = None,
    rows_R: Tensor | None = None,
) -> Tensor:
    """Return the MTP head's hidden states [T, H]: `logits` of them predict one token further on.

    batch      ids are the tokens *after* those of hidden_TH; positions are those of hidden_TH
    hidden_TH  [T, H] from `hidden_states`
    angles     those of the batch, where they are known
    rows_R     [R] int64, which rows are wanted; None: all
    """
    mtp, config = model.mtp, model.config
    assert mtp is not None, "the model has no MTP head"
    norms = mtp.norm_embedding, hidden_TH, mtp.norm_hidden
    x = linear(draft_inputs(batch.ids, model.embed, *norms, config.eps), mtp.fc)
    context = Context.of(config, batch, model.dtype, angles)
    x, update = decoder_layer(x, None, mtp.layer, pools, context)
    return final_norm(x, update, mtp.norm, config.eps, rows_R)


def logits(model: Model, hidden_TH: Tensor) -> Tensor:
    """Return the logits [T, V] in the model dtype."""
    return linear(hidden_TH, model.head)


def draft_logits(model: Model, hidden_TH: Tensor) -> Tensor:
    """Return the logits [T, D] of the tokens that are drafted, the first of the vocabulary."""
    return linear(hidden_TH, model.draft_head)


def final_norm(
    x: Tensor, update: Update | None, weight: Tensor, eps: float, rows_R: Tensor | None = None
) -> Tensor:
    """Return norm(x + update), or some rows of it."""
    if update is None:
        return rmsnorm(x, weight, eps, rows_R=rows_R)
    normed = add_norm(x, update, weight, eps)[0]
    return normed if rows_R is None else normed.index_select(0, rows_R)


def add_norm(
    x: Tensor, update: Update, weight: Tensor, eps: float, codes: Codes | None = None
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + update), x + update); codes is filled with those of the norm."""
    if isinstance(update, Pairs):
        return add_pairs_rmsnorm(update, x, weight, eps, codes)
    return add_rmsnorm(update, x, weight, eps, codes)


def decoder_layer(
    x: Tensor, update: Update | None, layer: Layer, pools: Pools, context: Context
) -> tuple[Tensor, Update | None]:
    """Return (x, update): the residual stream after the layer is their sum."""
    rows, hidden = x.shape
    compute = _layer(Rows(use_triton(x), rows, hidden, layer.form))
    after: tuple[Tensor, Update | None] = compute(x, update, layer, pools, context)
    return after


def layer_of_rows(
    x: Tensor, update: Update | None, layer: Layer, pools: Pools, context: Context
) -> tuple[Tensor, Update | None]:
    """Return `decoder_layer` with norms in kernels of their own.

    The last addition, and that of a token's experts, is left to the next norm, which does it in the
    same kernel. A norm's kernel also quantises, where the products that follow take codes.
    """
    eps, mixer, weights = context.config.eps, layer.mixer, layer.feed_forward
    codes = codes_for(mixer.qkvz if isinstance(mixer, Gdn) else mixer.qkv, x)
    if update is None:
        normed = rmsnorm(x, layer.input_norm, eps, codes)
    else:
        normed, x = add_norm(x, update, layer.input_norm, eps, codes)
    mixed = mix(normed, mixer, pools, context, codes)
    codes = codes_for(weights.gate_up, x)
    normed, x = add_norm(x, mixed, layer.post_norm, eps, codes)
    if isinstance(weights, MoeWeights):
        return x, moe_terms(normed, weights, context.config.sizes["TOPK"], codes)
    return x, mlp_update(normed, weights.gate_up, weights.down, codes)


def layer_of_few_rows(
    x: Tensor, update: None, layer: Layer, pools: Pools, context: Context
) -> tuple[Tensor, None]:
    """Return `decoder_layer` of a row, or a few, with norms and additions within the products."""
    assert update is None, "a layer of few rows leaves no update to the next"
    eps, mixer, weights = context.config.eps, layer.mixer, layer.feed_forward
    if isinstance(mixer, Gdn):
        qkvz, ba = norm_row_linear(x, layer.input_norm, eps, mixer.qkvz, mixer.ba)
        mixed = rule_heads(qkvz, ba, mixer, pools, context).flatten(1)
    else:
        (qkv,) = norm_row_linear(x, layer.input_norm, eps, mixer.qkv)
        mixed = attention_heads(qkv, mixer, pools, context)
    x = added_linear(mixed, mixer.out, x)
    if isinstance(weights, MoeWeights):
        return moe_row(x, layer.post_norm, eps, weights, context.config.sizes["TOPK"]), None
    return added_mlp(x, layer.post_norm, eps, weights.gate_up, weights.down), None


def mix(
    x: Tensor, mixer: Gdn | Attention, pools: Pools, context: Context, codes: Codes | None = None
) -> Tensor | Parts:
    """Return what the layer's mixer makes of normed x [T, H], perhaps in parts; the pools move on.

    codes  those of x, if there are any
    """
    if isinstance(mixer, Gdn):
        return gdn(x, mixer, pools, context, codes)
    return attention(x, mixer, pools, context, codes)


def feed_forward(x: Tensor, weights: FeedForward, config: Config) -> Tensor:
    """Return what the layer's feed-forward makes of normed x [T, H]."""
    if isinstance(weights, Mlp):
        return mlp(x, weights.gate_up, weights.down)
    return moe_block(x, weights, config.sizes["TOPK"])


def gdn(
    x: Tensor, w: Gdn, pools: Pools, context: Context, codes: Codes | None = None
) -> Tensor | Parts:
    """Return the gated delta rule's output [T, H]; states and histories move on."""
    (qkvz, ba), sizes = linears(x, (w.qkvz, w.ba), codes), context.config.sizes
    output = RuleOutput(context.batch.num_decodes > 0, sizes["DV"], takes_codes(w.out, x))
    if _rule_norm(output) is not gated_rmsnorm_codes:
        return linear_update(rule_heads(qkvz, ba, w, pools, context).flatten(1), w.out)
    prompts = rule_prompts(rule_inputs(qkvz, ba, w, context), w, pools, context)
    return codes_linear(gated_rmsnorm_codes(*prompts, w.norm, context.config.eps), w.out, x)


def rule_heads(qkvz: Tensor, ba: Tensor, w: Gdn, pools: Pools, context: Context) -> Tensor:
    """Return the rule's gated output [T, V, v]: decode rows in steps, the rest in chunks."""
    rule, batch, parts = rule_of(w, context.config), context.batch, []
    inputs = qkv, z, a, b = rule_inputs(qkvz, ba, w, context)
    if batch.num_decodes:
        rows = slice(0, batch.num_decodes)
        at = batch.sources, batch.states[rows]
        parts.append(mixed_step(qkv[rows], z[rows], a[rows], b[rows], rule, *pools, *at))
    if batch.num_prefills:
        prompts = rule_prompts(inputs, w, pools, context)
        parts.append(gated_rmsnorm(*prompts, w.norm, rule.eps))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    x: Tensor, w: Attention, pools: Pools, context: Context, codes: Codes | None = None
) -> Tensor | Parts:
    """Return gated attention's output [T, H]; the tokens' keys and values enter the pools."""
    return linear_update(attention_heads(linear(x, w.qkv, codes), w, pools, context), w.out)


def attention_heads(qkv: Tensor, w: Attention, pools: Pools, context: Context) -> Tensor:
    """Return the gated attention [T, n*d] from its inputs' projections."""
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
        return attention_step(q, gate, k, v, *rope, *pools, *at, batch.each).flatten(1)
    q = norm_rope_write(q, k, v, *rope, *pools, batch.token_slots, batch.positions)
    if w.cache is not None:
        w.cache.round(*pools, batch.token_slots, batch.positions)
    return attend(q, gate, pools, batch).flatten(1)


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


_layer = LAYER.bind(layer_of_few_rows, layer_of_rows)
_rule_norm = RULE_OUTPUT.bind(gated_rmsnorm, gated_rmsnorm_codes)
_attention = ATTENTION.bind(attention_step, norm_rope_write)
