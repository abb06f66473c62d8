"""Command lines that start engines on an artifact: the table of `serving.engines`, walked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen35_convert.serving.artifact import Served
from qwen35_convert.serving.engines import ENGINES, ROWS, VERSIONS, Engine, Row

NO_PATH = (
    "-",
    "~",
    '"',
    " ",
)  # an option; a home, quotes or nothing to Ollama, whose words they are
LONGEST_NAME = 80  # of a model in Ollama
NO_WORD = re.compile(r"[^A-Za-z0-9._-]+")
KV_TRANSFER = """'{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}'"""


@dataclass(frozen=True, slots=True)
class Load:
    """How many sequences are to be served, of how many tokens each."""

    context: int
    batch: int


@dataclass(frozen=True, slots=True)
class Start:
    """How an engine is started on an artifact.

    least   the oldest version that is known to load it, empty if none is
    cannot  why it does not load it; there are no lines then
    serve   the lines, in order
    draft   the same, drafting tokens with the MTP head; empty where the engine or the artifact
            does not
    """

    engine: str
    least: str
    cannot: str
    serve: tuple[str, ...]
    draft: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def pasted(self) -> str:
        """The lines as one."""
        return ENGINES[self.engine].between.join(self.serve)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"loads": not self.cannot, "line": self.pasted}


def starts(artifact: Served, load: Load | None = None) -> list[Start]:
    """Return what is known of each engine; without those of which nothing is."""
    known = ((engine, _rows(engine.name, artifact)) for engine in ENGINES.values())
    return [_start(engine, rows, artifact, load) for engine, rows in known if rows]


def _rows(engine: str, artifact: Served) -> list[Row]:
    """Return the rows about an artifact; none if one of its needs is in no row."""
    rows = [row for row in ROWS if row.engine == engine and artifact.traits.issuperset(row.traits)]
    refused = any(row.cannot for row in rows)
    known = {trait for row in rows for trait in row.traits}
    return rows if refused or artifact.needs <= known else []


def _start(engine: Engine, rows: list[Row], artifact: Served, load: Load | None) -> Start:
    loader = next((row.loader for row in rows if row.loader), "")
    fill = _filler(engine, artifact, load, loader)
    cannot = next((fill(row.cannot) for row in rows if row.cannot), "")
    if cannot:
        return Start(engine.name, "", cannot, (), (), ())
    flags = "".join(row.flags for row in rows) + _asked(engine, artifact, load)
    drafts = next((row.drafts for row in rows if row.drafts), "")
    plain, drafting = (
        tuple(fill(line.replace("{flags}", more)) for line in engine.lines)
        for more in (flags, flags + drafts)
    )
    return Start(
        engine=engine.name,
        least=_newest(engine.name, rows),
        cannot="",
        serve=plain,
        draft=drafting if drafts else (),
        notes=tuple(dict.fromkeys(row.note for row in rows if row.note)),
    )


def _newest(engine: str, rows: list[Row]) -> str:
    """Return the version that satisfies all rows."""
    order = VERSIONS[engine]
    return max((row.least for row in rows if row.least), key=order.index, default="")


def _asked(engine: Engine, artifact: Served, load: Load | None) -> str:
    revision = engine.revision if artifact.revision else ""
    return revision + (engine.context + engine.batch if load else "")


def _filler(
    engine: Engine, artifact: Served, load: Load | None, loader: str
) -> Callable[[str], str]:
    """Return what puts an artifact into a template: each value as a word of the engine's line."""
    word = repr if engine.python else shlex.quote
    path = f"./{artifact.path}" if artifact.path.startswith(NO_PATH) else artifact.path
    values = {
        "model": word(path),
        "loader": loader,
        "from_model": shlex.quote(f"FROM {path}"),
        "name": short_name(path),
        "mmproj": word(artifact.mmproj or ""),
        "revision": word(artifact.revision or ""),
    }
    if load:
        tokens = load.context * load.batch
        values |= {"context": str(load.context), "batch": str(load.batch), "cells": str(tokens)}
    pattern = re.compile("|".join(rf"\{{{key}\}}" for key in values))
    return lambda text: pattern.sub(lambda found: values[found[0][1:-1]], text)


def short_name(path: str) -> str:
    """Return a name that every engine takes, from that of a file or folder."""
    name = Path(path).name.removesuffix(".gguf")
    return NO_WORD.sub("-", name).strip("-._")[:LONGEST_NAME] or "model"


def lmcache(vllm: Start, block: int) -> Iterator[str]:
    """Yield the lines that put LMCache beside vLLM; `block` is that of vLLM's cache, in tokens.

    Source: LMCache's recipe for Qwen3.5.
    """
    yield (
        f"lmcache server --chunk-size {block} --separate-object-groups "
        "--l1-size-gb 100 --eviction-policy LRU"
    )
    yield (
        f"{vllm.pasted} --enable-prefix-caching --mamba-cache-mode align "
        f"--max-num-batched-tokens {2 * block - 1} --kv-transfer-config {KV_TRANSFER}"
    )
