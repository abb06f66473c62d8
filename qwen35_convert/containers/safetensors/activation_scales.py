"""Scales of activations in an artifact, held against what its config says of them.

Engines read them where the config promises static inputs or a quantised cache, and drop them, or
stop, where it does not. Without a promise a scale is a leftover; with one, each must be there.

Source: vLLM's `Fp8Config`, `CompressedTensorsConfig` and `ModelOptFp8Config` at 0.33.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from formats.checkpoint import Checkpoint
from formats.family.activation_scales import INPUTS, scaled_by
from formats.family.cache_scales import (
    FIELD,
    SCALED,
    WRITTEN,
    attentions,
    cache_scales,
    cached_in_fp8,
)
from formats.quant_methods import COMPRESSED, FP8, MODELOPT
from qwen35_convert.failure import Failure

# Engines of these methods look for scales of the cache by themselves.
ALWAYS = (FP8, MODELOPT)
STORED_AS = ("BF16", "F16", "F32")


def input_scales(artifact: Checkpoint) -> set[str]:
    """Return the modules whose inputs have a scale."""
    stored = artifact.layout.activation_scales
    return {name.rpartition(".")[0] for name in stored if scaled_by(name) == INPUTS}


def has_cache_scales(artifact: Checkpoint) -> bool:
    """Whether there are scales of the attention cache."""
    return bool(_of_caches(artifact))


def _of_caches(artifact: Checkpoint) -> list[str]:
    stored = artifact.layout.activation_scales
    return [name for name in stored if scaled_by(name) != INPUTS]


def stray_scales(artifact: Checkpoint, static: Collection[str]) -> Iterator[Failure]:
    """Yield the scales that the config does not promise, and those of a cache that it does.

    static  the modules whose inputs have static scales by it
    """
    for name in artifact.layout.activation_scales:
        if scaled_by(name) == INPUTS and name.rpartition(".")[0] not in static:
            yield Failure(name, "scales inputs, but config.json promises no static scales of them")
    block = artifact.config.quantization or {}
    if block.get("quant_method") in ALWAYS or block.get(FIELD):
        yield from _odd_pairs(artifact)
        yield from _missing(artifact)
        yield from _misshapen(artifact)
    else:
        for name in _of_caches(artifact):
            yield Failure(name, "scales the attention cache, but config.json promises none")


def _odd_pairs(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the scales of layers without a cache, and those without the other one of the pair."""
    attending = attentions(artifact.config, artifact.layout.form.mtp_layers)
    for attention, scales in cache_scales(_of_caches(artifact)).items():
        name = min(scales.values())
        if attention not in attending:
            yield Failure(name, f"scales the attention cache of {attention}, which has none")
        elif len(scales) < len(SCALED):
            yield Failure(name, "scales the attention cache, without the other one")


def _missing(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the layers without scales among those that have them, where a config promises all."""
    if (artifact.config.quantization or {}).get("quant_method") != COMPRESSED:
        return
    stored = cache_scales(_of_caches(artifact))
    for attention in cached_in_fp8(artifact.config) if stored else ():
        if attention not in stored:
            name = artifact.layout.spelling(f"{attention}.{WRITTEN[SCALED[0]]}")
            yield Failure(name, "is missing: engines run this layer's FP8 cache at a scale of 1")


def _misshapen(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield scales of an FP8 cache that are more than one number, or none."""
    stored = cache_scales(_of_caches(artifact))
    for attention in cached_in_fp8(artifact.config):
        for name in dict.fromkeys(stored.get(attention, {}).values()):
            info = artifact.infos()[name]
            if info.numel != 1 or info.dtype not in STORED_AS:
                got = f"is {info.dtype} of shape {list(info.shape)}"
                yield Failure(name, f"{got}, expected one number, in BF16, F16 or F32")
