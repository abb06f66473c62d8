"""Logits of a checkpoint of any size, one layer in memory at a time, and of two side by side.

    relative error after a layer   ||x_artifact - x_source|| / ||x_source||
    KL(source || artifact)         sum_v p_v (log p_v - log q_v)   at each token
    perplexity                     exp(-mean log p(next token))

Embedding rows are gathered from the mapped file; experts are decoded when tokens reach them; the
head is applied to a strip of the vocabulary at a time, from which the sums behind each softmax are
carried along in float64. KL is a small difference of large numbers there: float32 would leave 1e-6.

Shape letters: N sequences, T tokens of each, R = N*T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.config import Config
from formats.tensor import FormatError
from runtime.kernels.norm.rms import add_rmsnorm, rmsnorm
from runtime.load import Loader, check
from runtime.model import Context, Layer, Mlp, feed_forward, mix
from runtime.sample import RequestError
from runtime.state import Batch, Pools, Room, Span, State

Progress = Callable[[str], None]

_MIXER_ROWS = 2048
_MLP_ROWS = 1024
_STRIP_CELLS = 1 << 20


@dataclass(frozen=True)
class LayerError:
    """How far the residual stream of the artifact is from its source's after a layer."""

    layer: int
    kind: str
    relative_error: float


@dataclass(frozen=True)
class LogitsReport:
    """How the artifact's predictions compare with its source's. KL is in nats per token."""

    kl_mean: float
    kl_p999: float
    top1: float
    ppl_source: float
    ppl_artifact: float
    tokens: int
    layers: tuple[LayerError, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers]}


@torch.inference_mode()
def stream_layers(
    checkpoint: Checkpoint, ids_NT: Tensor, *, device: torch.device | str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the residual stream [R, H] after each layer; only that layer's weights are read.

    FormatError if the checkpoint has problems, RequestError for ids outside its vocabulary.
    """
    check(checkpoint)
    check_rows(ids_NT, checkpoint.config)
    loader = _loader(checkpoint, device, dtype)
    walk = _Walk.over(checkpoint.config, ids_NT, loader)
    embed = loader.open("embed_tokens")
    x = loader.rows(embed, ids_NT.flatten())
    embed.release(0, len(embed.data))
    for i, kind in enumerate(checkpoint.config.layer_types):
        x = walk.through(x, loader.layer(i), kind)
        yield x


@torch.inference_mode()
def stream_logits(
    checkpoint: Checkpoint, ids_NT: Tensor, *, device: torch.device | str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the logits of all rows in strips [R, some of V], one after another to the whole V."""
    stream = stream_layers(checkpoint, ids_NT, device=device, dtype=dtype)
    x = deque(stream, maxlen=1).pop()
    yield from _strips(_loader(checkpoint, device, dtype), x)


@torch.inference_mode()
def compare_streams(
    source: Checkpoint, artifact: Checkpoint, ids_NT: Tensor, *, device: torch.device | str,
    dtype: torch.dtype, progress: Progress = lambda _: None,
) -> LogitsReport:  # fmt: skip
    """Run both over the same tokens, layer by layer, and compare them.

    ids_NT  [N, T] token ids, each row a text of its own; T at least 2

    FormatError if either has problems or they are not models of one shape.
    """
    _check_alike(source.config, artifact.config)
    kinds = source.config.layer_types
    streams = (stream_layers(one, ids_NT, device=device, dtype=dtype) for one in (source, artifact))
    layers: list[LayerError] = []
    ends: deque[tuple[Tensor, Tensor]] = deque(maxlen=1)
    for x_source, x_artifact in zip(*streams, strict=True):
        error = _relative_error(x_artifact, x_source)
        layers.append(LayerError(len(layers), kinds[len(layers)], error))
        ends.append((x_source, x_artifact))
        progress(f"layer {len(layers)} of {len(kinds)}")
    strips = (
        _strips(_loader(one, device, dtype), x)
        for one, x in zip((source, artifact), ends.pop(), strict=True)
    )
    return _report(ids_NT.to(device), zip(*strips, strict=True), tuple(layers))


def check_rows(ids_NT: Tensor, config: Config) -> None:
    """Raise RequestError unless these are rows of at least two ids of the vocabulary."""
    if ids_NT.ndim != 2 or ids_NT.shape[0] < 1 or ids_NT.shape[1] < 2:
        raise RequestError(
            f"token ids have shape {list(ids_NT.shape)}, expected rows of at least 2 tokens"
        )
    low, high = int(ids_NT.min()), int(ids_NT.max())
    if low < 0 or high >= config.sizes["V"]:
        raise RequestError(
            f"token ids reach from {low} to {high}, expected 0 to {config.sizes['V'] - 1}"
        )


def _check_alike(source: Config, artifact: Config) -> None:
    for what in ("H", "V"):
        if source.sizes[what] != artifact.sizes[what]:
            raise FormatError(
                f"{artifact.fields[what]} is {artifact.sizes[what]}, "
                f"expected the source's {source.sizes[what]}"
            )
    if source.layer_types != artifact.layer_types:
        raise FormatError("layer_types are not those of the source")


def _loader(checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype) -> Loader:
    device = torch.device(device)
    return Loader(checkpoint, device, dtype, lazy_experts=device.type == "cpu")


@dataclass(frozen=True)
class _Walk:
    """What every layer shares: the rows of groups of sequences, and pools for one group."""

    config: Config
    groups: list[tuple[slice, Context]]
    pools: dict[str, Pools]

    @staticmethod
    def over(config: Config, ids_NT: Tensor, loader: Loader) -> _Walk:
        num_sequences, length = ids_NT.shape
        step = max(1, _MIXER_ROWS // length)
        groups = []
        for start in range(0, num_sequences, step):
            count = min(step, num_sequences - start)
            spans = [Span([0] * length, 0, slot, -1) for slot in range(count)]
            batch = Batch.pack([], spans, loader.device)
            rows = slice(start * length, (start + count) * length)
            groups.append((rows, Context.of(config, batch, loader.dtype)))
        one_of_each = replace(config, layer_types=tuple(dict.fromkeys(config.layer_types)))
        room = Room(min(step, num_sequences), length)
        state = State.allocate(one_of_each, room, device=loader.device, dtype=loader.dtype)
        pools = dict(zip(one_of_each.layer_types, state.pools(), strict=True))
        return _Walk(config, groups, pools)

    def through(self, x: Tensor, layer: Layer, kind: str) -> Tensor:
        """Return the residual stream [R, H] after a layer."""
        eps = self.config.eps
        normed = rmsnorm(x, layer.input_norm, eps)
        mixed = torch.cat([
            mix(normed[rows], layer.mixer, self.pools[kind], context)
            for rows, context in self.groups
        ])  # fmt: skip
        normed, x = add_rmsnorm(mixed, x, layer.post_norm, eps)
        # all rows at once let each expert be decoded once
        size = _MLP_ROWS if isinstance(layer.feed_forward, Mlp) else len(x)
        parts = [
            feed_forward(part, layer.feed_forward, self.config)
            for part in torch.split(normed, size)
        ]
        return x + torch.cat(parts)


def _strips(loader: Loader, x: Tensor) -> Iterator[Tensor]:
    """Yield the logits [R, some of V] of a residual stream."""
    hidden = rmsnorm(x, loader.tensor("norm"), loader.config.eps)
    tied = loader.checkpoint.layout.tied
    head = loader.open("embed_tokens" if tied else "lm_head")
    width, step = head.shape[0], max(1, _STRIP_CELLS // max(hidden.shape))
    for start in range(0, width, step):
        stop = min(start + step, width)
        yield hidden @ loader.strip(head, start, stop).T
        head.release(start, stop)


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    norm = theirs.double().norm()
    return float((ours.double() - theirs.double()).norm() / norm) if norm else 0.0


class _Softmax:
    """What is kept of one side's logits, carried in float64 from strip to strip of the vocabulary.

    top, total  the largest logit and the sum of e^(logit - top), [R] each
    best        the token of the largest logit
    target      the logit of the token that comes next
    """

    def __init__(self, targets_R: Tensor) -> None:
        self.targets = targets_R
        self.top = torch.full(
            targets_R.shape, -torch.inf, dtype=torch.float64, device=targets_R.device
        )
        self.total = torch.zeros_like(self.top)
        self.target = torch.zeros_like(self.top)
        self.best = torch.zeros_like(targets_R)

    def take(self, strip: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Take logits [R, n] of tokens from `first`; return (shrink [R], powers [R, n]).

        powers are e^(logit - top); sums of earlier powers are to be multiplied by shrink
        """
        highest, place = strip.max(-1)
        self.best = torch.where(highest > self.top, first + place, self.best)
        top = torch.maximum(self.top, highest)
        shrink, powers = (self.top - top).exp(), (strip - top[:, None]).exp()
        self.top, self.total = top, self.total * shrink + powers.sum(-1)
        column, last = self.targets - first, strip.shape[1] - 1
        picked = strip.gather(1, column.clamp(0, last)[:, None])[:, 0]
        self.target = torch.where((column >= 0) & (column <= last), picked, self.target)
        return shrink, powers

    @property
    def log_sum(self) -> Tensor:
        """Return the logarithm of the sum of e^logit [R]."""
        return self.top + self.total.log()


def _report(
    ids_NT: Tensor, pairs: Iterator[tuple[Tensor, Tensor]], layers: tuple[LayerError, ...]
) -> LogitsReport:
    """Carry both softmaxes through the strips; of `weighted` comes E_p[logit - other logit]."""
    targets = ids_NT.roll(-1, 1).flatten().long()
    source, artifact = _Softmax(targets), _Softmax(targets)
    weighted, first = torch.zeros_like(source.total), 0
    for p_strip, q_strip in pairs:
        p, q = p_strip.double(), q_strip.double()
        shrink, powers = source.take(p, first)
        artifact.take(q, first)
        weighted = weighted * shrink + (powers * (p - q)).sum(-1)
        first += p.shape[1]
    kl = (weighted / source.total - source.log_sum + artifact.log_sum).clamp(min=0)
    return LogitsReport(
        kl_mean=float(kl.mean()),
        kl_p999=float(kl.quantile(0.999)),
        top1=float((source.best == artifact.best).double().mean()),
        ppl_source=_perplexity(source, ids_NT),
        ppl_artifact=_perplexity(artifact, ids_NT),
        tokens=ids_NT.numel(),
        layers=layers,
    )


def _perplexity(side: _Softmax, ids_NT: Tensor) -> float:
    loss_NT = (side.log_sum - side.target).view(ids_NT.shape)
    return float(loss_NT[:, :-1].mean().exp())
