"""The logits of a checkpoint of any size, and those of two checkpoints side by side.

    relative error after a layer   ||x_artifact - x_source|| / ||x_source||

Both checkpoints are walked layer by layer in step (see alike), and the head is applied to a strip
of the vocabulary at a time: neither is ever in memory whole.

Shape letters: N sequences, T tokens of each, R = N*T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config
from quant.measure import same_bits
from runtime.alike import in_step
from runtime.errors import RequestError
from runtime.kernels.linear.cpu import times_rows
from runtime.layerwise import Progress, Walk
from runtime.logits_report import LayerError, LogitsReport, logits_report
from runtime.reader import Change
from runtime.softmax import Divergence
from runtime.workers import Workers

BLOCK_ROWS = 512
STRIP_CELLS = 1 << 21
Block = tuple[slice, Divergence, Tensor, Tensor]


class Kept(Protocol):
    """Gives what was computed of a source before, or keeps what is computed now."""

    def streams(self, computed: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the residual stream after each layer; `computed` computes it when asked for it."""
        ...

    def logits(self, rows: slice, columns: slice, compute: Callable[[], Tensor]) -> Tensor:
        """Return the logits of some rows for some of the vocabulary, to be overwritten."""
        ...


class NothingKept:
    """Keeps nothing: all is computed."""

    def streams(self, computed: Iterator[Tensor]) -> Iterator[Tensor]:
        """Return what is computed."""
        return computed

    def logits(self, _rows: slice, _columns: slice, compute: Callable[[], Tensor]) -> Tensor:
        """Compute."""
        return compute()


NOTHING_KEPT = NothingKept()


@torch.inference_mode()
def streamed_logits(
    checkpoint: Checkpoint, ids_NT: Tensor, *, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield the logits of all rows in strips [R, some of V], one after another to the whole V."""
    walk = _walk(checkpoint, ids_NT, device, fp8_cache=True)
    hidden = walk.hidden(deque(walk.residuals(), maxlen=1).pop())
    for head in _head_strips(walk):
        yield times_rows(hidden, head)


@torch.inference_mode()
def compare_logits(
    source: Checkpoint,
    artifact: Checkpoint,
    ids_NT: Tensor,
    *,
    device: torch.device | str,
    kept: Kept = NOTHING_KEPT,
    progress: Progress = lambda _: None,
) -> LogitsReport:
    """Run both over the same tokens in float32, layer by layer, and compare them.

    ids_NT  [N, T] token ids, each row a text of its own; T at least 2
    kept    what an earlier run computed of the source

    FormatError if either has problems or they are not models of one shape.
    """
    _check_alike(source.config, artifact.config)
    with Workers(device) as workers:
        # a source is what its weights say, whatever cache it is to be served with
        walks = [
            _walk(source, ids_NT, device, workers),
            _walk(artifact, ids_NT, device, workers, fp8_cache=True),
        ]
        layers, ends = _compared_layers(walks, kept, progress)
        return logits_report(ids_NT, _diverged(walks, ends, ids_NT.to(device), kept), layers)


@torch.inference_mode()
def changed_logits(
    source: Checkpoint,
    change: Change,
    ids_NT: Tensor,
    *,
    device: torch.device | str,
    kept: Kept = NOTHING_KEPT,
) -> LogitsReport:
    """Compare a checkpoint with itself after its weights were changed, as `compare_logits` does.

    change  gives what is read in place of each tensor
    """
    with Workers(device) as workers:
        walks = [_walk(source, ids_NT, device, workers) for _ in range(2)]
        walks[1].use_changed(change)
        layers, ends = _compared_layers(walks, kept, lambda _: None)
        return logits_report(ids_NT, _diverged(walks, ends, ids_NT.to(device), kept), layers)


def _compared_layers(
    walks: Sequence[Walk], kept: Kept, progress: Progress
) -> tuple[tuple[LayerError, ...], tuple[Tensor, ...]]:
    """Walk source and artifact in step; return the errors by layer and the last streams."""
    kinds, device = walks[0].config.layer_types, walks[0].loader.device
    layers: list[LayerError] = []
    ends: tuple[Tensor, ...] = ()
    steps = in_step(walks[0], walks[1], kept.streams(walks[0].residuals()))
    for kind in kinds:
        ends = ()  # what the layer before made is not held while this one is computed
        *made, shared = next(steps)
        ends = tuple(x.to(device) for x in made)
        made.clear()
        layers.append(LayerError(len(layers), kind, _relative_error(*ends), shared))
        progress(f"layer {len(layers)} of {len(kinds)}")
    return tuple(layers), ends


def _diverged(
    walks: Sequence[Walk], ends: Sequence[Tensor], ids_NT: Tensor, kept: Kept
) -> list[Divergence]:
    """Return the divergences of blocks of rows after the whole vocabulary."""
    blocks = list(_blocks(walks, ends, ids_NT))
    for source, artifact in zip(*map(_head_strips, walks), strict=True):

        def take(block: Block, source: Tensor = source, artifact: Tensor = artifact) -> None:
            rows, divergence, x_source, x_artifact = block
            columns = slice(divergence.first, divergence.first + len(source))
            logits = kept.logits(rows, columns, lambda: times_rows(x_source, source))
            logits = logits.to(x_artifact.device)
            alike = same_bits(x_source, x_artifact) and same_bits(source, artifact)
            other = logits.clone() if alike else times_rows(x_artifact, artifact)
            divergence.take(logits, other)

        walks[0].workers.run(take, blocks)
    return [divergence for _, divergence, *_ in blocks]


def _blocks(walks: Sequence[Walk], ends: Sequence[Tensor], ids_NT: Tensor) -> Iterator[Block]:
    """Yield ranges of rows, each with the divergence of its tokens and the head's two inputs."""
    targets = torch.split(ids_NT.roll(-1, 1).flatten().long(), BLOCK_ROWS)
    sides = [torch.split(x, BLOCK_ROWS) for x in ends]
    for i, (target, *streams) in enumerate(zip(targets, *sides, strict=True)):
        start = i * BLOCK_ROWS
        source, artifact = (walk.hidden(x) for walk, x in zip(walks, streams, strict=True))
        yield slice(start, start + len(target)), Divergence(target), source, artifact


def _walk(
    checkpoint: Checkpoint,
    ids_NT: Tensor,
    device: torch.device | str,
    workers: Workers | None = None,
    *,
    fp8_cache: bool = False,
) -> Walk:
    if ids_NT.ndim != 2 or ids_NT.shape[0] < 1 or ids_NT.shape[1] < 2:
        raise RequestError(
            f"token ids have shape {list(ids_NT.shape)}, expected rows of at least 2 tokens"
        )
    walk = Walk.over(checkpoint, list(ids_NT), device=device, dtype=torch.float32, workers=workers)
    if fp8_cache:
        walk.use_fp8_cache()
    return walk


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
    norm, error = 0.0, 0.0
    parts = (torch.split(x, BLOCK_ROWS) for x in (source_RH, artifact_RH))
    for source, artifact in zip(*parts, strict=True):
        norm += float(source.double().square().sum())
        error += float((artifact.double() - source).square().sum())
    if norm:
        return math.sqrt(error / norm)
    return math.inf if error > 0 else error  # NaN stays NaN


def _head_strips(walk: Walk) -> Iterator[Tensor]:
    """Yield the rows of the head, [some of V, H], such that a block's logits fit STRIP_CELLS."""
    head = walk.loader.open(walk.head)
    width, step = head.shape[0], max(1, STRIP_CELLS // max(BLOCK_ROWS, head.shape[1]))
    for start in range(0, width, step):
        stop = min(start + step, width)
        yield walk.loader.strip(head, start, stop)
        head.release(start, stop)
