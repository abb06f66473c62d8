"""A checkpoint's layers, run one after another over texts; one layer is in memory at a time.

    x = embed[ids];   x = layer_i(x) for each i;   hidden = norm(x);   MTP head on hidden and ids

The comparison of logits reads the residual stream after each layer. An observer sees the input of
every linear by our names: the importance matrix sums its squares, a Hessian would sum x^T x.
Embedding rows are gathered from the mapped file; on a CPU an expert is decoded when tokens reach
it, once for all of them. Texts are packed in groups of about 2048 tokens for the mixers.

The MTP head sees the embedding of the next token and the state after the final norm, so for it each
text is a token shorter.

Shape letters: T packed tokens of all texts, H hidden size, K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.family.config import Config
from runtime.errors import RequestError
from runtime.kernels.linear.mlp import silu_mul
from runtime.kernels.linear.product import linear
from runtime.kernels.linear.weight import Weight
from runtime.kernels.moe.layer import MoeWeights, moe_block, router_logits
from runtime.kernels.moe.routing import route
from runtime.kernels.norm.rms import add_rmsnorm, rmsnorm
from runtime.load import Loader, check
from runtime.model import Attention, Context, Gdn, Layer, Mlp, attention_heads, rule_heads
from runtime.state import Batch, Room, Span, State

GROUP_TOKENS = 2048
MLP_CELLS = 1 << 24
GDN_IN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
Progress = Callable[[str], None]


class Observer(Protocol):
    """Sees what enters the linears of a walk."""

    def observe(self, names: Sequence[str], x_TK: Tensor) -> None:
        """Take an input [T, K] of the named weights, which share it.

        A weight may get its tokens in several calls. T is 0 for an expert that no token reached.
        """


class Walk:
    """Texts on their way through a checkpoint.

    groups    for each group of texts its rows among the T tokens, and its context
    observer  None: nobody looks, and nothing is spent on it
    """

    def __init__(
        self, loader: Loader, texts: Sequence[Tensor], observer: Observer | None = None
    ) -> None:
        self.loader, self.config, self.observer = loader, loader.config, observer
        self.texts = texts
        groups = _grouped([len(ids) for ids in texts])
        self.groups = [(rows, self._context(lengths)) for rows, lengths in groups]
        one_of_each = replace(self.config, layer_types=("linear_attention", "full_attention"))
        sizes = [lengths for _, lengths in groups]
        room = Room(max(map(len, sizes)), max(map(max, sizes)))
        state = State.allocate(one_of_each, room, device=loader.device, dtype=loader.dtype)
        self.pools = dict(zip((Gdn, Attention), state.pools(), strict=True))

    @staticmethod
    def over(
        checkpoint: Checkpoint,
        texts: Sequence[Tensor],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        observer: Observer | None = None,
    ) -> Walk:
        """Return a walk of texts [T] of token ids, each of 2 at least.

        FormatError if the checkpoint has problems, RequestError for other texts than that or ids
        outside the vocabulary.
        """
        check(checkpoint)
        check_texts(texts, checkpoint.config)
        device = torch.device(device)
        loader = Loader(checkpoint, device, dtype, lazy_experts=device.type == "cpu")
        return Walk(loader, texts, observer)

    @torch.inference_mode()
    def residuals(self) -> Iterator[Tensor]:
        """Yield the residual stream [T, H] after each layer; only that layer's weights are read."""
        x = self._embedded()
        for i in range(len(self.config.layer_types)):
            x = self._through(x, self.loader.layer(i), f"layers.{i}.")
            yield x

    @torch.inference_mode()
    def hidden(self, x_TH: Tensor) -> Tensor:
        """Return the final norm of the last residual stream [T, H]: the input of the head."""
        hidden = rmsnorm(x_TH, self.loader.tensor("norm"), self.config.eps)
        self._observe("", [self.head], hidden)
        return hidden

    @property
    def head(self) -> str:
        """Return the name of the head's weight, which is the embedding's if they are tied."""
        return "embed_tokens" if self.loader.checkpoint.layout.tied else "lm_head"

    @torch.inference_mode()
    def mtp(self, hidden_TH: Tensor) -> Tensor:
        """Return the residual stream [T - texts, H] after the MTP head's layer.

        hidden_TH  from `hidden`
        """
        mtp, eps = self.loader.mtp(), self.config.eps
        by_text = torch.split(hidden_TH, [len(ids) for ids in self.texts])
        states = torch.cat([part[:-1] for part in by_text])
        rest = Walk(self.loader, [ids[1:] for ids in self.texts], self.observer)
        x = torch.cat(
            [
                rmsnorm(rest._embedded(), mtp.norm_embedding, eps),
                rmsnorm(states, mtp.norm_hidden, eps),
            ],
            -1,
        )
        self._observe("mtp.", ["fc"], x)
        return rest._through(linear(x, mtp.fc), mtp.layer, "mtp.layers.0.")

    def _context(self, lengths: Sequence[int]) -> Context:
        spans = [Span([0] * length, 0, slot, -1) for slot, length in enumerate(lengths)]
        batch = Batch.pack([], spans, self.loader.device)
        return Context.of(self.config, batch, self.loader.dtype)

    def _embedded(self) -> Tensor:
        embed = self.loader.open("embed_tokens")
        x = self.loader.rows(embed, torch.cat(list(self.texts)))
        embed.release(0, len(embed.data))
        return x

    def _through(self, x: Tensor, layer: Layer, prefix: str) -> Tensor:
        """Return the residual stream [T, H] after a layer."""
        eps = self.config.eps
        normed = rmsnorm(x, layer.input_norm, eps)
        parts = [self._mix(normed[rows], layer.mixer, at, prefix) for rows, at in self.groups]
        normed, x = add_rmsnorm(torch.cat(parts), x, layer.post_norm, eps)
        return x + self._feed_forward(normed, layer.feed_forward, prefix + "mlp.")

    def _mix(self, x: Tensor, w: Gdn | Attention, context: Context, prefix: str) -> Tensor:
        if isinstance(w, Gdn):
            prefix += "linear_attn."
            self._observe(prefix, GDN_IN, x)
            pools = self.pools[Gdn]
            heads = rule_heads(linear(x, w.qkvz), linear(x, w.ba), w, pools, context).flatten(1)
            self._observe(prefix, ["out_proj"], heads)
        else:
            prefix += "self_attn."
            self._observe(prefix, QKV, x)
            heads = attention_heads(linear(x, w.qkv), w, self.pools[Attention], context)
            self._observe(prefix, ["o_proj"], heads)
        return linear(heads, w.out)

    def _feed_forward(self, x: Tensor, w: Mlp | MoeWeights, prefix: str) -> Tensor:
        if isinstance(w, Mlp):
            size = max(1, min(GROUP_TOKENS, MLP_CELLS // w.gate_up.shape[0]))
            parts = [self._expert(part, w.gate_up, w.down, prefix) for part in torch.split(x, size)]
            return torch.cat(parts)
        if self.observer is None:  # all rows at once let each expert be decoded once
            return moe_block(x, w, self.config.sizes["TOPK"])
        return self._moe(x, w, prefix)

    def _moe(self, x: Tensor, w: MoeWeights, prefix: str) -> Tensor:
        """Return what `moe_block` returns, to rounding, expert by expert under observation."""
        num_experts, k = self.config.sizes["E"], self.config.sizes["TOPK"]
        router, gate, gate_up, down = _parted(w, num_experts)
        self._observe(prefix, ["gate", "shared_expert_gate"], x)
        weights, experts = route(router_logits(x, router), k)
        shared = self._expert(x, gate_up, down, prefix + "shared_expert.")
        out = torch.sigmoid(linear(x, gate)) * shared
        for e in range(num_experts):
            rows, place = (experts == e).nonzero(as_tuple=True)
            name = f"{prefix}experts.{e}."
            if len(rows):
                expert = self._expert(x[rows], w.gate_up[e], w.down[e], name)
                out.index_add_(0, rows, expert * weights[rows, place, None])
            else:
                self._observe_none(name)
        return out

    def _expert(self, x: Tensor, gate_up: Weight, down: Weight, prefix: str) -> Tensor:
        self._observe(prefix, GATE_UP, x)
        inner = silu_mul(linear(x, gate_up))
        self._observe(prefix, ["down_proj"], inner)
        return linear(inner, down)

    def _observe_none(self, prefix: str) -> None:
        """Let an expert be observed that no token reached."""
        for names, size in ((GATE_UP, "H"), (("down_proj",), "F")):
            self._observe(prefix, names, torch.zeros(0, self.config.sizes[size]))

    def _observe(self, prefix: str, names: Sequence[str], x: Tensor) -> None:
        if self.observer is not None:
            self.observer.observe([prefix + name for name in names], x)


def check_texts(texts: Sequence[Tensor], config: Config) -> None:
    """Raise RequestError unless these are texts of at least two ids of the vocabulary."""
    if not texts or any(ids.ndim != 1 or len(ids) < 2 for ids in texts):
        shapes = [list(ids.shape) for ids in texts]
        raise RequestError(f"token ids have shapes {shapes}, expected texts of 2 tokens at least")
    low, high = min(int(ids.min()) for ids in texts), max(int(ids.max()) for ids in texts)
    if low < 0 or high >= config.sizes["V"]:
        raise RequestError(
            f"token ids reach from {low} to {high}, expected 0 to {config.sizes['V'] - 1}"
        )


def _grouped(lengths: Sequence[int]) -> list[tuple[slice, list[int]]]:
    """Part texts, in order, into groups of about 2048 tokens; return each one's rows, lengths."""
    groups: list[tuple[slice, list[int]]] = []
    stop = 0
    for length in lengths:
        start, stop = stop, stop + length
        if groups and stop - groups[-1][0].start <= GROUP_TOKENS:
            rows, others = groups.pop()
            groups.append((slice(rows.start, stop), [*others, length]))
        else:
            groups.append((slice(start, stop), [length]))
    return groups


def _parted(w: MoeWeights, num_experts: int) -> tuple[Tensor, Tensor, Weight, Weight]:
    """Return the router, and gate, gate_up and down of the shared expert, absorbed or not."""
    if w.shared_gate is None:
        router, gate = w.router[:num_experts].contiguous(), w.router[num_experts:]
        return router, gate, w.gate_up[num_experts], w.down[num_experts]
    assert w.shared_gate_up is not None, "a shared expert of its own has gate and up"
    assert w.shared_down is not None, "a shared expert of its own has a down projection"
    return w.router, w.shared_gate, w.shared_gate_up, w.shared_down
