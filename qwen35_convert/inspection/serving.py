"""How a checkpoint is served: figures, command lines of the engines, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import has_fp8_cache
from qwen35_convert.containers.gguf.mmproj_check import mmproj_beside
from qwen35_convert.errors import RecipeError
from qwen35_convert.serving.artifact import FP8_BLOCK, GGUF, Served, served
from qwen35_convert.serving.commands import Load, Start, lmcache, starts
from qwen35_convert.serving.engines import VLLM
from qwen35_convert.serving.figures import CACHE, WEIGHTS, serving
from qwen35_convert.serving.memory import (
    ALLOCATIONS,
    largest_batch,
    longest_context,
    memory_needed,
)

CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Given:
    """How a checkpoint was named: a path, or a repository and its revision."""

    name: str
    revision: str | None = None
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """How many sequences are to be served, and in how many bytes; None: that is not asked."""

    load: Load
    memory: int | None = None


def ask(context: int | None, batch: int | None, memory: int | None) -> Question | None:
    """Return the question, with usual numbers for what is left out; None: nothing is asked.

    RecipeError for numbers below 1.
    """
    numbers = {"context": context, "batch": batch, "memory": memory}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise RecipeError(f"--{name}", f"is {number}", "1 or more")
    if all(number is None for number in numbers.values()):
        return None
    return Question(Load(context or CONTEXT, batch or 1), memory)


def how_to_serve(
    source: Checkpoint, given: Given | None, question: Question | None = None
) -> dict[str, Any]:
    """Return what `inspect --json` shows under "serving"."""
    figures = _figures(source)
    artifact = None if given is None else _artifact(source, given)
    launches = starts(artifact, question.load if question else None) if artifact else []
    result = (
        figures | {"engines": [start.as_dict() for start in launches]} | _lines(launches, figures)
    )
    if question:
        engines = [s.engine for s in launches if not s.cannot and s.engine in ALLOCATIONS]
        result["memory"] = _memory(source, artifact, question, engines)
    return result


def _figures(source: Checkpoint) -> dict[str, Any]:
    kinds = source.config.layer_types
    stored = {WEIGHTS: source.layout.quantized == FP8_BLOCK, CACHE: has_fp8_cache(source.config)}
    return serving(
        source.config.sizes,
        num_full_layers=kinds.count("full_attention"),
        num_gdn_layers=kinds.count("linear_attention"),
        fp8=[what for what, is_fp8 in stored.items() if is_fp8],
    ).as_dict() | {"cache": "fp8" if stored[CACHE] else "bf16"}


def _artifact(source: Checkpoint, given: Given) -> Served | None:
    """Return it as engines are to be given it: GGUF by its first file, else by its folder."""
    if given.remote:
        return served(source, given.name, revision=given.revision)
    place = source.place if source.container == GGUF else source.folder
    path = given.name if Path(given.name) == place else str(place)
    beside = mmproj_beside(source) if source.container == GGUF else None
    return served(source, path, mmproj=str(beside) if beside else None)


def _lines(launches: list[Start], figures: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's line, and what puts LMCache beside it."""
    vllm = next((start for start in launches if start.engine == VLLM and not start.cannot), None)
    if vllm is None:
        return {"vllm": None, "lmcache": None, "vllm_with_lmcache": None}
    server, client = lmcache(vllm, figures["attention_block_size"][figures["cache"]])
    return {"vllm": vllm.pasted, "lmcache": server, "vllm_with_lmcache": client}


def _memory(
    source: Checkpoint, artifact: Served | None, question: Question, engines: list[str]
) -> dict[str, Any]:
    weights = sum(info.nbytes for info in source.infos().values())
    if artifact and artifact.mmproj:
        weights += Path(artifact.mmproj).stat().st_size
    load = question.load
    return {
        "context": load.context,
        "batch": load.batch,
        "memory_bytes": question.memory,
        "engines": {engine: dict(_of(source, weights, engine, question)) for engine in engines},
    }


def _of(
    source: Checkpoint, weights: int, engine: str, question: Question
) -> Iterator[tuple[str, Any]]:
    """Yield what an engine needs, and what it could do with the memory that there is."""
    load, memory, config = question.load, question.memory, source.config
    needed = memory_needed(config, weights, load.context, load.batch, engine)
    yield from needed.as_dict().items()
    if memory is not None:
        yield "fits", needed.total <= memory
        yield "longest_context", longest_context(config, weights, load.batch, engine, memory)
        yield "largest_batch", largest_batch(config, weights, load.context, engine, memory)
