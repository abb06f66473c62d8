"""The text model of Qwen3.5, dense and mixture of experts: from token ids to logits.

    x = embed[id]
    x = x + mixer(norm(x));  x = x + feed_forward(norm(x))      each layer, in the model dtype
    logits = head(norm(x))

    MTP head     h' = layer(fc [norm(embed[next id]), norm(h)]);  logits = head(norm(h'))

Source: transformers, modeling_qwen3_5 and modeling_qwen3_5_moe; for the MTP head, which it does not
have, vLLM's qwen3_5_mtp. What mixers compute is in mixers.
Trap: the MTP head takes the embedding first and the hidden state *after* the final norm.

Shape letters: T packed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from formats.family.config import Config
from runtime.context import Context, rope_of
from runtime.kernels.cases import Rows
from runtime.kernels.dispatch import LAYER
from runtime.kernels.draft.inputs import draft_linear
from runtime.kernels.draft.token import draft_token
from runtime.kernels.embed.tokens import embed_tokens
from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import Codes
from runtime.kernels.launch import use_triton
from runtime.kernels.linear.mlp import added_mlp, mlp_update
from runtime.kernels.linear.product import codes_for, linear
from runtime.kernels.linear.row import added_linear, norm_row_linear
from runtime.kernels.linear.weight import Weight
from runtime.kernels.moe.layer import MoeWeights, moe_row, moe_terms
from runtime.kernels.moe.sum import Pairs, add_pairs_rmsnorm
from runtime.kernels.norm.gated import Unscaled
from runtime.kernels.norm.rms import Parts, add_rmsnorm, rmsnorm
from runtime.mixers import attention_heads, mix, rule_heads
from runtime.state import Batch, Pools
from runtime.weights import Attention, Gdn, Layer, Model

Update = Tensor | Pairs | Parts


def begin(model: Model, batch: Batch) -> tuple[Tensor, Context]:
    """Return the embeddings [T, H] of a batch, and the context of all layers."""
    embedded = embed_tokens(batch.ids, batch.positions, model.embed, *rope_of(model.config))
    return embedded[0], Context.of(model.config, batch, model.dtype, embedded[1])


def hidden_states(
    model: Model,
    pools: Sequence[Pools],
    batch: Batch,
    begun: tuple[Tensor, Context] | None = None,
) -> Tensor:
    """Return the hidden states [T, H] after the final norm; the pools move on.

    pools  of each layer, as `State.pools` gives them
    begun  what `begin` made of the batch, where that is known
    """
    (x, context), update = begun or begin(model, batch), None
    for layer, pool in zip(model.layers, pools, strict=True):
        x, update = decoder_layer(x, update, layer, pool, context)
    return final_norm(x, update, model.norm, model.config.eps)


def draft_stream(
    model: Model,
    pools: Pools,
    batch: Batch,
    hidden_TH: Tensor,
    angles: tuple[Tensor, Tensor] | None = None,
    row_1: Tensor | None = None,
) -> Tensor:
    """Return the MTP head's residual stream [1, H] at a row; all keys and values enter the pools.

    Nothing else of the other rows is needed, so that only their projections are computed.

    batch      ids are the tokens *after* those of hidden_TH; positions are those of hidden_TH
    hidden_TH  [T, H] from `hidden_states`
    angles     those of the batch, where they are known
    row_1      [1] int64, which row; None: the only one
    """
    mtp, config = model.mtp, model.config
    assert mtp is not None, "the model has no MTP head"
    norms, layer = (mtp.norm_embedding, hidden_TH, mtp.norm_hidden), mtp.layer
    x, x_1H = draft_linear(batch.ids, model.embed, *norms, config.eps, mtp.fc, row_1)
    context = Context.of(config, batch, model.dtype, angles)
    assert isinstance(layer.mixer, Attention), "the MTP layer attends"
    if _choice(x, layer) is layer_of_few_rows:
        (qkv,) = norm_row_linear(x, layer.input_norm, config.eps, layer.mixer.qkv)
    else:
        qkv = linear(rmsnorm(x, layer.input_norm, config.eps), layer.mixer.qkv)
    mixed = attention_heads(qkv, layer.mixer, pools, context, row_1)
    return row_after(x_1H, mixed, layer, config)


def draft(model: Model, head: Weight, x_1H: Tensor, token_1: Tensor) -> Tensor:
    """Put the token that the MTP head expects next into token_1; return its hidden state [1, H].

    head  the rows of the head that a draft is chosen from
    x_1H  [1, H] from `draft_stream`
    """
    assert model.mtp is not None, "the model has no MTP head"
    return draft_token(x_1H, model.mtp.norm, model.config.eps, head, token_1)


def logits(model: Model, hidden_TH: Tensor) -> Tensor:
    """Return the logits [T, V] in the model dtype."""
    return linear(hidden_TH, model.head)


def final_norm(x: Tensor, update: Update | None, weight: Tensor, eps: float) -> Tensor:
    """Return norm(x + update)."""
    if update is None:
        return rmsnorm(x, weight, eps)
    return add_norm(x, update, weight, eps)[0]


def add_norm(
    x: Tensor, update: Update, weight: Tensor, eps: float, codes: Codes | Lined | None = None
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + update), x + update); codes is filled with those of the norm."""
    if isinstance(update, Pairs):
        return add_pairs_rmsnorm(update, x, weight, eps, codes)
    return add_rmsnorm(update, x, weight, eps, codes)


def decoder_layer(
    x: Tensor, update: Update | None, layer: Layer, pools: Pools, context: Context
) -> tuple[Tensor, Update | None]:
    """Return (x, update): the residual stream after the layer is their sum."""
    after: tuple[Tensor, Update | None] = _choice(x, layer)(x, update, layer, pools, context)
    return after


def _choice(x: Tensor, layer: Layer) -> Callable[..., Any]:
    """Return what computes a layer of the rows x."""
    rows, hidden = x.shape
    return _layer(Rows(use_triton(x), rows, hidden, layer.form))


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
    x: Tensor, update: Update | None, layer: Layer, pools: Pools, context: Context
) -> tuple[Tensor, None]:
    """Return `decoder_layer` of a row, or a few, with norms and additions within the products.

    A layer before it that is stored otherwise may have left an addition, which is done first.
    """
    eps, mixer = context.config.eps, layer.mixer
    if update is not None:
        _, x = add_norm(x, update, layer.input_norm, eps)
    if isinstance(mixer, Gdn):
        qkvz, ba = norm_row_linear(x, layer.input_norm, eps, mixer.qkvz, mixer.ba)
        mixed: Tensor | Unscaled = rule_heads(qkvz, ba, mixer, pools, context)
    else:
        (qkv,) = norm_row_linear(x, layer.input_norm, eps, mixer.qkv)
        mixed = attention_heads(qkv, mixer, pools, context)
    return row_after(x, mixed, layer, context.config), None


def row_after(x: Tensor, mixed: Tensor | Unscaled, layer: Layer, config: Config) -> Tensor:
    """Return a row, or a few, after a layer whose mixer has made `mixed` of them."""
    x, weights = added_linear(mixed, layer.mixer.out, x), layer.feed_forward
    if isinstance(weights, MoeWeights):
        return moe_row(x, layer.post_norm, config.eps, weights, config.sizes["TOPK"])
    return added_mlp(x, layer.post_norm, config.eps, weights.gate_up, weights.down)


_layer = LAYER.bind(layer_of_few_rows, layer_of_rows)
