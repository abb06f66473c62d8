"""One decoder layer over packed texts, on all cores; an observer sees the input of every linear.

Cores work on groups of about 512 tokens each: small enough for the caches and for memory that the
allocator uses again, large enough for the products to run at full speed. Experts get their tokens
of all groups at once, so that each is decoded once.

Shape letters: T packed tokens of all texts, H hidden size, K columns of a weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from formats.family.config import Config
from runtime.context import Context
from runtime.kernels.linear.mlp import silu_mul
from runtime.kernels.linear.product import linear
from runtime.kernels.linear.weight import Weight
from runtime.kernels.moe.layer import MoeWeights, moe_block, router_logits
from runtime.kernels.moe.routing import route
from runtime.kernels.norm.rms import rmsnorm
from runtime.mixers import attention_heads, rule_heads
from runtime.state import Batch, Pools, Room, Span, State
from runtime.weights import Attention, Gdn, Layer, Mlp
from runtime.workers import Piece, Result, Workers

GROUP_TOKENS = 512
MLP_CELLS = 7 << 20
GDN_IN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
Show = Callable[[str, Sequence[str], Tensor], None]
# Takes the name of an attention, and the pools [S, L, m, d] of its keys and values as they are
# cached; unused places hold zeros. Called from any thread, in any order.
SeeCache = Callable[[str, Tensor, Tensor], None]


class Observer(Protocol):
    """Sees what enters the linears of a walk."""

    def observe(self, names: Sequence[str], x_TK: Tensor) -> None:
        """Take an input [T, K] of the named weights, which share it.

        A weight may get its tokens in several calls, but an expert gets all of them in one. T is 0
        for an expert that no token reached.
        """


@dataclass(frozen=True)
class Group:
    """Texts that go through a mixer together: their rows among the T tokens, and their batch."""

    rows: slice
    room: Room
    context: Context

    def pools(self, kind: str) -> Pools:
        """Return empty pools of a kind of layer, for these texts alone."""
        config, (cos, _) = self.context.config, self.context.angles
        one = replace(config, layer_types=(kind,))
        state = State.allocate(one, self.room, device=cos.device, dtype=cos.dtype)
        return state.pools()[0]


def grouped(
    lengths: Sequence[int], config: Config, device: torch.device, dtype: torch.dtype
) -> Iterator[Group]:
    """Yield groups of consecutive texts of these lengths, of 512 tokens or one text each."""
    start, texts = 0, list(lengths)
    while texts:
        count = 1
        while count < len(texts) and sum(texts[: count + 1]) <= GROUP_TOKENS:
            count += 1
        group, texts = texts[:count], texts[count:]
        batch = Batch.pack([], [Span([0] * n, 0, i, -1) for i, n in enumerate(group)], device)
        rows = slice(start, start + sum(group))
        yield Group(rows, Room(count, max(group)), Context.of(config, batch, dtype))
        start = rows.stop


@dataclass(frozen=True)
class LayerPass:
    """What a layer needs beside its weights.

    observer   sees the pieces in their order; None: nobody looks, and nothing is spent on it
    see_cache  called with the keys and values of each group of texts
    """

    config: Config
    groups: Sequence[Group]
    workers: Workers
    observer: Observer | None = None
    see_cache: SeeCache | None = None

    def run(self, x_TH: Tensor, layer: Layer, prefix: str) -> Tensor:
        """Return the residual stream [T, H] after a layer whose names begin with `prefix`."""
        out, eps = torch.empty_like(x_TH), self.config.eps

        def mix(group: Group, show: Show) -> None:
            x = x_TH[group.rows]
            normed = rmsnorm(x, layer.input_norm, eps)
            mixed = _mix(normed, layer.mixer, group, prefix, show, self.see_cache)
            torch.add(mixed, x, out=out[group.rows])

        deque(self._each(mix, self.groups), maxlen=0)
        if isinstance(layer.feed_forward, MoeWeights):
            out += self._moe(
                rmsnorm(out, layer.post_norm, eps), layer.feed_forward, prefix + "mlp."
            )
        else:
            self._add_mlp(out, layer, layer.feed_forward, prefix + "mlp.")
        return out

    def show(self, prefix: str, names: Sequence[str], x_TK: Tensor) -> None:
        """Show an input of weights to the observer, if there is one."""
        if self.observer is not None:
            self.observer.observe([prefix + name for name in names], x_TK)

    def _each(
        self, function: Callable[[Piece, Show], Result], pieces: Sequence[Piece]
    ) -> Iterator[Result]:
        """Yield the function's result for each piece; show in order what it shows."""
        if self.observer is None:
            yield from self.workers.each(lambda piece: function(piece, _show_nobody), pieces)
            return

        def run(piece: Piece) -> tuple[Result, list[tuple[str, Sequence[str], Tensor]]]:
            shown: list[tuple[str, Sequence[str], Tensor]] = []
            result = function(piece, lambda *what: shown.append(what))
            return result, shown

        for result, shown in self.workers.each(run, pieces):
            for what in shown:
                self.show(*what)
            yield result

    def _add_mlp(self, x: Tensor, layer: Layer, w: Mlp, prefix: str) -> None:
        """Add to the stream [T, H] what a dense feed-forward makes of its norm."""

        def add(part: Tensor, show: Show) -> None:
            normed = rmsnorm(part, layer.post_norm, self.config.eps)
            part += _expert(normed, w.gate_up, w.down, prefix, show)

        deque(self._each(add, _parts(x, w.gate_up)), maxlen=0)

    def _moe(self, x: Tensor, w: MoeWeights, prefix: str) -> Tensor:
        """Return what `moe_block` returns, to rounding; on a CPU, or observed, expert by expert."""
        num_experts, k = self.config.sizes["E"], self.config.sizes["TOPK"]
        if x.is_cuda and self.observer is None:
            return moe_block(x, w, k)
        router, gate, gate_up, down = _parted(w, num_experts)
        self.show(prefix, ["gate", "shared_expert_gate"], x)
        weights, experts = route(router_logits(x, router), k)

        def shared(part: Tensor, show: Show) -> Tensor:
            out = _expert(part, gate_up, down, prefix + "shared_expert.", show)
            return torch.sigmoid(linear(part, gate)) * out

        def terms(expert: int, show: Show) -> tuple[Tensor, Tensor]:
            rows, place = (experts == expert).nonzero(as_tuple=True)
            name = f"{prefix}experts.{expert}."
            if not len(rows):
                _show_none(name, self.config, show)
                return rows, x[:0]
            out = _expert(x[rows], w.gate_up[expert], w.down[expert], name, show)
            return rows, out * weights[rows, place, None]

        out = torch.cat(list(self._each(shared, _parts(x, gate_up))))
        for rows, term in self._each(terms, range(num_experts)):
            out.index_add_(0, rows, term)
        return out


def _show_nobody(prefix: str, names: Sequence[str], x_TK: Tensor) -> None:
    """Do nothing: there is no observer."""


def _mix(
    x: Tensor,
    w: Gdn | Attention,
    group: Group,
    prefix: str,
    show: Show,
    see_cache: SeeCache | None,
) -> Tensor:
    if isinstance(w, Gdn):
        prefix, pools = prefix + "linear_attn.", group.pools("linear_attention")
        show(prefix, GDN_IN, x)
        projected = linear(x, w.qkvz), linear(x, w.ba)
        heads = rule_heads(*projected, w, pools, group.context)
        assert isinstance(heads, Tensor), "a product scales only rows of decoding"
        show(prefix, ["out_proj"], heads)
    else:
        prefix, pools = prefix + "self_attn.", group.pools("full_attention")
        show(prefix, QKV, x)
        heads = attention_heads(linear(x, w.qkv), w, pools, group.context)
        if see_cache is not None:
            see_cache(prefix.removesuffix("."), *pools)
        show(prefix, ["o_proj"], heads)
    return linear(heads, w.out)


def _expert(x: Tensor, gate_up: Weight, down: Weight, prefix: str, show: Show) -> Tensor:
    show(prefix, GATE_UP, x)
    inner = silu_mul(linear(x, gate_up))
    show(prefix, ["down_proj"], inner)
    return linear(inner, down)


def _show_none(prefix: str, config: Config, show: Show) -> None:
    """Show that no token reached an expert."""
    for names, size in ((GATE_UP, "H"), (("down_proj",), "F")):
        show(prefix, names, torch.zeros(0, config.sizes[size]))


def _parts(x_TH: Tensor, gate_up: Weight) -> tuple[Tensor, ...]:
    """Return the rows in parts whose inner activations fit MLP_CELLS."""
    rows = max(1, min(GROUP_TOKENS, MLP_CELLS // gate_up.shape[0]))
    return torch.split(x_TH, rows)


def _parted(w: MoeWeights, num_experts: int) -> tuple[Tensor, Tensor, Weight, Weight]:
    """Return the router, and gate, gate_up and down of the shared expert, absorbed or not."""
    if w.shared_gate is None:
        router, gate = w.router[:num_experts].contiguous(), w.router[num_experts:]
        return router, gate, w.gate_up[num_experts], w.down[num_experts]
    assert w.shared_gate_up is not None, "a shared expert of its own has gate and up"
    assert w.shared_down is not None, "a shared expert of its own has a down projection"
    return w.router, w.shared_gate, w.shared_gate_up, w.shared_down
