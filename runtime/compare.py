"""The logits of a checkpoint of any size, and those of two checkpoints side by side.

    relative error after a layer   ||x_artifact - x_source|| / ||x_source||
    KL(source || artifact)         in nats at each token (see softmax)
    perplexity                     exp(-mean log p(next token))

Both checkpoints are walked layer by layer in step, and the head is applied to a strip of the
vocabulary at a time: neither is ever in memory whole.

Shape letters: N sequences, T tokens of each, R = N*T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config
from runtime.errors import RequestError
from runtime.layerwise import Progress, Walk
from runtime.softmax import Divergence, Softmax

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
def streamed_logits(
    checkpoint: Checkpoint, ids_NT: Tensor, *, device: torch.device | str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the logits of all rows in strips [R, some of V], one after another to the whole V."""
    walk = _walk(checkpoint, ids_NT, device, dtype)
    x = deque(walk.residuals(), maxlen=1).pop()
    yield from _strips(walk, x)


@torch.inference_mode()
def compare_logits(
    source: Checkpoint,
    artifact: Checkpoint,
    ids_NT: Tensor,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress = lambda _: None,
) -> LogitsReport:
    """Run both over the same tokens, layer by layer, and compare them.

    ids_NT  [N, T] token ids, each row a text of its own; T at least 2

    FormatError if either has problems or they are not models of one shape.
    """
    _check_alike(source.config, artifact.config)
    kinds = source.config.layer_types
    walks = [_walk(one, ids_NT, device, dtype) for one in (source, artifact)]
    layers: list[LayerError] = []
    ends: deque[tuple[Tensor, ...]] = deque(maxlen=1)
    for streams in zip(*(walk.residuals() for walk in walks), strict=True):
        layers.append(LayerError(len(layers), kinds[len(layers)], _relative_error(*streams)))
        ends.append(streams)
        progress(f"layer {len(layers)} of {len(kinds)}")
    strips = (_strips(walk, x) for walk, x in zip(walks, ends.pop(), strict=True))
    return _report(ids_NT.to(device), zip(*strips, strict=True), tuple(layers))


def _walk(
    checkpoint: Checkpoint, ids_NT: Tensor, device: torch.device | str, dtype: torch.dtype
) -> Walk:
    if ids_NT.ndim != 2 or ids_NT.shape[0] < 1 or ids_NT.shape[1] < 2:
        raise RequestError(
            f"token ids have shape {list(ids_NT.shape)}, expected rows of at least 2 tokens"
        )
    return Walk.over(checkpoint, list(ids_NT), device=device, dtype=dtype)


def _check_alike(source: Config, artifact: Config) -> None:
    for what in ("H", "V"):
        if source.sizes[what] != artifact.sizes[what]:
            raise FormatError(
                f"{artifact.fields[what]} is {artifact.sizes[what]}, "
                f"expected the source's {source.sizes[what]}"
            )
    if source.layer_types != artifact.layer_types:
        raise FormatError("layer_types are not those of the source")


def _relative_error(source_RH: Tensor, artifact_RH: Tensor) -> float:
    norm = source_RH.double().norm()
    error = (artifact_RH.double() - source_RH.double()).norm()
    return float(error / norm) if norm else float(error * torch.inf) if error else 0.0


def _strips(walk: Walk, x_RH: Tensor) -> Iterator[Tensor]:
    """Yield the logits [R, some of V] of a residual stream."""
    hidden, loader = walk.hidden(x_RH), walk.loader
    head = loader.open(walk.head)
    width, step = head.shape[0], max(1, _STRIP_CELLS // max(hidden.shape))
    for start in range(0, width, step):
        stop = min(start + step, width)
        yield hidden @ loader.strip(head, start, stop).T
        head.release(start, stop)


def _report(
    ids_NT: Tensor, strips: Iterator[tuple[Tensor, ...]], layers: tuple[LayerError, ...]
) -> LogitsReport:
    divergence = Divergence(ids_NT.roll(-1, 1).flatten().long())
    for pair in strips:
        divergence.take(*pair)
    kl = divergence.kl
    return LogitsReport(
        kl_mean=float(kl.mean()),
        kl_p999=float(kl.quantile(0.999)),
        top1=float(divergence.agrees.double().mean()),
        ppl_source=_perplexity(divergence.source, ids_NT),
        ppl_artifact=_perplexity(divergence.artifact, ids_NT),
        tokens=ids_NT.numel(),
        layers=layers,
    )


def _perplexity(side: Softmax, ids_NT: Tensor) -> float:
    return float(side.loss.view(ids_NT.shape)[:, :-1].mean().exp())
