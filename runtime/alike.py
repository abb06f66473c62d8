"""Two checkpoints beside each other, layer by layer; what both have in common is computed once.

While both streams are equal to the bit and a layer of both holds the same numbers, what leaves it
is the same: a checkpoint that keeps every weight costs one reading of it. The first number that
differs ends that; weights are compared a few megabytes at a time.

Trap: equal weights under another config are another model.

Shape letters: T packed tokens of all texts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from formats.family.cache_scales import has_fp8_cache
from quant.measure import same_bits
from quant.stored import Value
from runtime.layerwise import Walk


def in_step(
    source: Walk, artifact: Walk, streams: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the residual streams [T, H] of both after each layer, and whether it was run once.

    streams  of the source, wherever they are
    """
    x_TH = artifact.embedded()
    alike = _same_config(source, artifact) and same_bits(source.embedded(), x_TH)
    for i, stream in enumerate(streams):
        alike = alike and _same_layer(source, artifact, i)
        x_TH = stream.to(artifact.loader.device) if alike else artifact.layer(i, x_TH)
        yield stream, x_TH, alike


def _same_config(source: Walk, artifact: Walk) -> bool:
    """Whether nothing but their weights can make layers compute something else."""
    if any(walk.loader.fp8_cache and has_fp8_cache(walk.config) for walk in (source, artifact)):
        return False
    ours, theirs = artifact.config, source.config
    return (
        all(theirs.sizes.get(key, size) == size for key, size in ours.sizes.items())
        and ours.layer_types == theirs.layer_types
        and ours.eps == theirs.eps
        and replace(ours.rope, stated={}) == replace(theirs.rope, stated={})
    )


def _same_layer(source: Walk, artifact: Walk, i: int) -> bool:
    """Whether a layer of both holds the same numbers under the same names."""
    names, others = (_names(walk, i) for walk in (source, artifact))
    sides = source.loader, artifact.loader
    return names == others and all(
        _same_values(*(side.open(name) for side in sides)) for name in sorted(names)
    )


def _names(walk: Walk, i: int) -> set[str]:
    prefix = f"layers.{i}."
    return {name for name in walk.loader.checkpoint.layout.atoms if name.startswith(prefix)}


def _same_values(one: Value, other: Value) -> bool:
    """Whether two values are the same numbers to the bit, in whatever they are stored."""
    if one.shape != other.shape:
        return False
    for start, stop in one.chunks(held=one.cost().read + other.cost().read):
        left, right = (value.exact(start, stop) for value in (one, other))
        if left.dtype != right.dtype:
            left, right = left.float(), right.float()
        same = same_bits(left, right)
        for value in (one, other):
            value.release(start, stop)
        if not same:
            return False
    return True
