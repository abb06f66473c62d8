"""Scales of activations in an artifact, held against what its config says of them.

Engines read them where the config promises static inputs or a quantised cache, and drop them, or
stop, where it does not. Without a promise a scale is a leftover; with one, each must be there.

Source: vLLM's `Fp8Config`, `CompressedTensorsConfig` and `ModelOptFp8Config` at 0.33.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from formats.checkpoint import Checkpoint
from formats.family.activation_scales import INPUTS, scaled_by
from qwen35_convert.failure import Failure

PAIR = {"k_scale", "v_scale"}
# Engines of these methods look for scales of the cache by themselves.
ALWAYS = ("fp8", "modelopt")


def input_scales(artifact: Checkpoint) -> set[str]:
    """Return the modules whose inputs have a scale."""
    stored = artifact.layout.activation_scales
    return {name.rpartition(".")[0] for name in stored if scaled_by(name) == INPUTS}


def has_cache_scales(artifact: Checkpoint) -> bool:
    """Whether there are scales of the attention cache."""
    return any(scaled_by(name) != INPUTS for name in artifact.layout.activation_scales)


def stray_scales(artifact: Checkpoint, static: Collection[str]) -> Iterator[Failure]:
    """Yield the scales that the config does not promise.

    static  the modules whose inputs have static scales by it
    """
    block = artifact.config.quantization or {}
    promised = block.get("quant_method") in ALWAYS or bool(block.get("kv_cache_scheme"))
    cache: dict[str, dict[str, str]] = defaultdict(dict)
    for name in artifact.layout.activation_scales:
        module, _, last = name.rpartition(".")
        if scaled_by(name) != INPUTS:
            cache[module.removesuffix(".k_proj").removesuffix(".v_proj")][last] = name
        elif module not in static:
            yield Failure(name, "scales inputs, but config.json promises no static scales of them")
    for stored in cache.values():
        if not promised or stored.keys() & PAIR not in (PAIR, set()):
            what = "without the other one" if promised else "but config.json promises none"
            yield Failure(min(stored.values()), f"scales the attention cache, {what}")
