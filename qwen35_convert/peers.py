"""Other engines on the same weights, in the same process, for `bench --peer`.

A peer is given the points that were measured and returns them with its own milliseconds: the same
step, a token for each sequence of a batch at a context, or a prompt with the logits of its last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from qwen35_convert.missing import MissingError
from qwen35_convert.recipe import RecipeError

if TYPE_CHECKING:
    from qwen35_convert.bench import Point

REPEAT = 3


def find_peer(name: str) -> Callable[[Checkpoint, Sequence[Point], str], Iterator[Point]]:
    """Return the peer of that name. MissingError if its package is not installed."""
    if name not in PEERS:
        raise RecipeError(f"peer is {name!r}, expected {' or '.join(PEERS)}")
    if find_spec(name) is None:
        raise MissingError(
            f"peer {name} is not installed, expected the package {name}\n  fix   pip install {name}"
        )
    return PEERS[name]


def run_transformers(
    checkpoint: Checkpoint, points: Sequence[Point], device: str
) -> Iterator[Point]:
    """Yield the points with transformers' times; it reads folders of safetensors only."""
    import torch
    from transformers import AutoModelForCausalLM

    if checkpoint.gguf:
        raise RecipeError("peer transformers reads folders of safetensors, this is a GGUF file")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype)
    model = model.to(device).eval()
    for point in points:
        yield replace(point, peer_ms=_transformers_ms(model, point, checkpoint.config.sizes["V"]))


def _transformers_ms(model: Any, point: Point, vocabulary: int) -> float:
    import torch

    ids = torch.randint(vocabulary, (point.batch, point.tokens), device=model.device)
    with torch.inference_mode():
        if point.what == "prefill":
            return _median_ms(lambda: model(ids, use_cache=False, logits_to_keep=1), model)
        cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        # the cache grows by a token each time, which is nothing beside its length
        return _median_ms(lambda: model(ids[:, -1:], past_key_values=cache, use_cache=True), model)


def _median_ms(call: Callable[[], object], model: Any) -> float:
    call()
    return statistics.median(_wall_ms(call, model) for _ in range(REPEAT))


def _wall_ms(call: Callable[[], object], model: Any) -> float:
    import torch

    started = time.perf_counter()
    call()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


PEERS = {"transformers": run_transformers}
