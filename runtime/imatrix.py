"""An importance matrix: the squares of every linear's inputs, summed over a text.

    in_sum2_k = sum over tokens of x_k^2         counts = how many tokens reached the weight

One layer is in memory at a time, experts as tokens reach them. The forward pass is float32, sums
are float64. Weights with one input share a row: q, k, v; gate, up; the four of the delta rule.
Rows are keyed by our names and in the hub's order of columns. GGUF tiles the value heads along the
columns of out_proj, so its row must be tiled as well: `Imatrix.row` takes the order.

The head's row is the input of `lm_head`, or of `embed_tokens` if it is tied. The MTP head sees the
embedding of the next token and the state after the final norm, so each text is a token shorter.

Source: llama.cpp's tools/imatrix/imatrix.cpp, whose sums are the same but in float32.

Shape letters: T packed tokens, H hidden size, K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.config import Config
from runtime.kernels.linear.mlp import silu_mul
from runtime.kernels.linear.product import linear
from runtime.kernels.linear.weight import Weight
from runtime.kernels.moe.layer import MoeWeights, router_logits
from runtime.kernels.moe.routing import route
from runtime.kernels.norm.rms import add_rmsnorm, rmsnorm
from runtime.load import Loader, check
from runtime.model import (
    Attention,
    Context,
    FeedForward,
    Gdn,
    Layer,
    Mlp,
    attention_heads,
    rule_heads,
)
from runtime.sample import RequestError
from runtime.state import Batch, Pools, Room, Span, State

GROUP_TOKENS = 2048
GDN_IN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
Progress = Callable[[str], None]


@dataclass
class Imatrix:
    """Sums [K] float64 and counts by our names; `tokens` of the text.

    unseen  experts, as `layers.3.mlp.experts.7`, that no token reached: their sums are zero
    """

    tokens: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)

    def add(self, names: Sequence[str], x_TK: Tensor) -> None:
        """Add the squares of an input that the named weights share."""
        squares = x_TK.double().square().sum(0).cpu()
        for name in names:
            before = self.sums.get(name)
            self.sums[name] = squares if before is None else before + squares
            self.counts[name] = self.counts.get(name, 0) + len(x_TK)

    def row(self, name: str, order: Tensor | None = None) -> tuple[Tensor, int]:
        """Return sums [K] and count of a weight; `order` says which column comes to each place."""
        sums = self.sums[name]
        return (sums if order is None else sums[order]), self.counts[name]

    def stacked(
        self, naming: Callable[[str], tuple[str, int | None]],
        order: Callable[[str], Tensor | None] = lambda _: None,
    ) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
        """Return (in_sum2 [E, K], counts [E]) float32 by the names of a file that stacks experts.

        naming  from our name to the file's, and the place if it is an expert's
        order   from our name to the order of its columns, if the file has another
        """
        parts: dict[str, list[tuple[int, Tensor, int]]] = {}
        for name in self.sums:
            stack, index = naming(name)
            parts.setdefault(stack, []).append((index or 0, *self.row(name, order(name))))
        return {stack: _stack(rows) for stack, rows in parts.items()}


def _stack(rows: list[tuple[int, Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows.sort(key=lambda row: row[0])
    assert [row[0] for row in rows] == list(range(len(rows))), "experts of a stack are numbered"
    counts = torch.tensor([float(row[2]) for row in rows])
    return torch.stack([row[1] for row in rows]).float(), counts


@torch.inference_mode()
def collect(
    checkpoint: Checkpoint, token_ids: Sequence[Tensor], *, device: torch.device | str = "cpu",
    progress: Progress = lambda _: None,
) -> Imatrix:  # fmt: skip
    """Return what a text's tokens bring to every linear, the MTP head's too.

    token_ids  texts [T] of their own, each of 2 tokens at least; all are held, T*H float32

    FormatError if the checkpoint has problems, RequestError for ids outside its vocabulary.
    """
    check(checkpoint)
    _check_texts(token_ids, checkpoint.config)
    device, config = torch.device(device), checkpoint.config
    loader = Loader(checkpoint, device, torch.float32, lazy_experts=device.type == "cpu")
    found = Imatrix(sum(len(ids) for ids in token_ids))
    embed = loader.open("embed_tokens")
    walk = _Walk(config, loader, found, _groups(token_ids))
    x = loader.rows(embed, torch.cat(list(token_ids)))
    for i, kind in enumerate(config.layer_types):
        x = walk.through(x, loader.layer(i), kind, f"layers.{i}.")
        progress(f"layer {i + 1} of {len(config.layer_types)}")
    hidden = rmsnorm(x, loader.tensor("norm"), config.eps)
    found.add(["embed_tokens" if checkpoint.layout.tied else "lm_head"], hidden)
    if checkpoint.layout.form.mtp_layers:
        _collect_mtp(loader, found, token_ids, hidden)
        progress("MTP head")
    return found


def _collect_mtp(
    loader: Loader, found: Imatrix, token_ids: Sequence[Tensor], hidden_TH: Tensor
) -> None:
    mtp, config = loader.mtp(), loader.config
    by_text = torch.split(hidden_TH, [len(ids) for ids in token_ids])
    states = torch.cat([part[:-1] for part in by_text])
    following = [ids[1:] for ids in token_ids]
    embedding = loader.rows(loader.open("embed_tokens"), torch.cat(following))
    both = [rmsnorm(embedding, mtp.norm_embedding, config.eps),
            rmsnorm(states, mtp.norm_hidden, config.eps)]  # fmt: skip
    x = torch.cat(both, -1)
    found.add(["mtp.fc"], x)
    walk = _Walk(config, loader, found, _groups(following))
    walk.through(linear(x, mtp.fc), mtp.layer, "full_attention", "mtp.layers.0.")


def _check_texts(token_ids: Sequence[Tensor], config: Config) -> None:
    """Raise RequestError unless these are texts of at least two ids of the vocabulary."""
    if not token_ids or any(ids.ndim != 1 or len(ids) < 2 for ids in token_ids):
        shapes = [list(ids.shape) for ids in token_ids]
        raise RequestError(f"token ids have shapes {shapes}, expected texts of 2 tokens at least")
    low, high = (int(f(torch.stack([f(ids) for ids in token_ids]))) for f in (torch.min, torch.max))
    if low < 0 or high >= config.sizes["V"]:
        raise RequestError(
            f"token ids reach from {low} to {high}, expected 0 to {config.sizes['V'] - 1}"
        )


def _groups(token_ids: Sequence[Tensor]) -> list[list[int]]:
    """Part the lengths of texts, in order, into groups of about 2048 tokens."""
    groups: list[list[int]] = [[]]
    for ids in token_ids:
        if groups[-1] and sum(groups[-1]) + len(ids) > GROUP_TOKENS:
            groups.append([])
        groups[-1].append(len(ids))
    return groups


class _Walk:
    """What every layer shares: the rows of groups of texts, and pools for one group."""

    def __init__(
        self, config: Config, loader: Loader, found: Imatrix, groups: Sequence[Sequence[int]]
    ) -> None:
        self.config, self.loader, self.found = config, loader, found
        self.groups = list(self._contexts(groups))
        one_of_each = replace(config, layer_types=("linear_attention", "full_attention"))
        room = Room(max(map(len, groups)), max(map(max, groups)))
        state = State.allocate(one_of_each, room, device=loader.device, dtype=loader.dtype)
        self.pools = dict(zip(one_of_each.layer_types, state.pools(), strict=True))

    def _contexts(self, groups: Sequence[Sequence[int]]) -> Iterator[tuple[slice, Context]]:
        start = 0
        for lengths in groups:
            spans = [Span([0] * length, 0, slot, -1) for slot, length in enumerate(lengths)]
            batch = Batch.pack([], spans, self.loader.device)
            stop = start + sum(lengths)
            yield slice(start, stop), Context.of(self.config, batch, self.loader.dtype)
            start = stop

    def through(self, x: Tensor, layer: Layer, kind: str, prefix: str) -> Tensor:
        """Return the residual stream [T, H] after a layer whose inputs are added."""
        normed = rmsnorm(x, layer.input_norm, self.config.eps)
        pools = self.pools[kind]
        mixed = torch.cat([
            self._mix(normed[rows], layer.mixer, pools, context, prefix)
            for rows, context in self.groups
        ])  # fmt: skip
        normed, x = add_rmsnorm(mixed, x, layer.post_norm, self.config.eps)
        return x + self._feed_forward(normed, layer.feed_forward, prefix + "mlp.")

    def _mix(
        self, x: Tensor, w: Gdn | Attention, pools: Pools, context: Context, prefix: str
    ) -> Tensor:
        if isinstance(w, Gdn):
            self.found.add(_named(prefix + "linear_attn.", GDN_IN), x)
            heads = rule_heads(linear(x, w.qkvz), linear(x, w.ba), w, pools, context).flatten(1)
            self.found.add([prefix + "linear_attn.out_proj"], heads)
        else:
            self.found.add(_named(prefix + "self_attn.", QKV), x)
            heads = attention_heads(linear(x, w.qkv), w, pools, context)
            self.found.add([prefix + "self_attn.o_proj"], heads)
        return linear(heads, w.out)

    def _feed_forward(self, x: Tensor, w: FeedForward, prefix: str) -> Tensor:
        if isinstance(w, Mlp):
            return torch.cat([
                self._expert(part, w.gate_up, w.down, prefix)
                for part in torch.split(x, GROUP_TOKENS)
            ])  # fmt: skip
        return self._moe(x, w, prefix)

    def _expert(self, x: Tensor, gate_up: Weight, down: Weight, prefix: str) -> Tensor:
        self.found.add(_named(prefix, GATE_UP), x)
        inner = silu_mul(linear(x, gate_up))
        self.found.add([prefix + "down_proj"], inner)
        return linear(inner, down)

    def _moe(self, x: Tensor, w: MoeWeights, prefix: str) -> Tensor:
        """Return the sparse feed-forward, expert by expert."""
        num_experts, k = self.config.sizes["E"], self.config.sizes["TOPK"]
        router, gate, gate_up, down = _parted(w, num_experts)
        self.found.add([prefix + "gate", prefix + "shared_expert_gate"], x)
        weights, experts = route(router_logits(x, router), k)
        shared = self._expert(x, gate_up, down, f"{prefix}shared_expert.")
        out = torch.sigmoid(linear(x, gate)) * shared
        for e in range(num_experts):
            name = f"{prefix}experts.{e}"
            rows, place = (experts == e).nonzero(as_tuple=True)
            if not len(rows):
                self.found.unseen.append(name)
                self._add_nothing(name)
                continue
            made = self._expert(x[rows], w.gate_up[e], w.down[e], f"{name}.")
            out.index_add_(0, rows, made * weights[rows, place, None])
        return out

    def _add_nothing(self, name: str) -> None:
        """Leave sums of zero, so that a stack is whole."""
        for part, size in (("gate_proj", "H"), ("up_proj", "H"), ("down_proj", "F")):
            self.found.add([f"{name}.{part}"], torch.zeros(0, self.config.sizes[size]))


def _named(prefix: str, names: Sequence[str]) -> list[str]:
    return [prefix + name for name in names]


def _parted(w: MoeWeights, num_experts: int) -> tuple[Tensor, Tensor, Weight, Weight]:
    """Return the router, and gate, gate_up and down of the shared expert, absorbed or not."""
    if w.shared_gate is None:
        router, gate = w.router[:num_experts].contiguous(), w.router[num_experts:]
        return router, gate, w.gate_up[num_experts], w.down[num_experts]
    assert w.shared_gate_up is not None, "a shared expert of its own has gate and up"
    assert w.shared_down is not None, "a shared expert of its own has a down projection"
    return w.router, w.shared_gate, w.shared_gate_up, w.shared_down
