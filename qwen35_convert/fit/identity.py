"""Whether a table of costs is of a source: its tensor files have the SHA-256 that the table has.

Names do not count, nor do side files: a folder may be renamed and its chat template changed. Two
models of the same shapes have the same units, so nothing else tells their tables apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.fit.sensitivity import Sensitivity
from qwen35_convert.options import RunOptions
from qwen35_convert.progress import items_bar
from qwen35_convert.write.digests import Digests
from qwen35_convert.write.receipt import Origin

ENDINGS = (".safetensors", ".gguf")
FIX = (
    "make it with `qwen35 sensitivity` of this source, or choose with `--sensitivity by-role`, "
    "whose costs are of no one model"
)


def check_source(
    table: Sensitivity, source: Checkpoint, origin: Origin, options: RunOptions
) -> None:
    """Refuse a table of other weights. RecipeError; files of other sizes are not hashed."""
    files = table.values["source"]["files"]
    there = {name: file for name, file in files.items() if name.endswith(ENDINGS)}
    paths = {source.name_of(path): path for path in _tensor_files(source)}
    if Counter(path.stat().st_size for path in paths.values()) != _each(there, "size"):
        raise _refusal(table, "tensor files of other sizes")
    here = _hashed(paths, origin, options)
    more = _each(here, "sha256") - _each(there, "sha256")
    if more:
        other = next(name for name, file in here.items() if file["sha256"] in more)
        raise _refusal(table, f"other values in {other}")


def _each(files: Mapping[str, Mapping[str, Any]], key: str) -> Counter[Any]:
    return Counter(file[key] for file in files.values())


def _tensor_files(source: Checkpoint) -> list[Path]:
    """Return the files that hold tensors, an adapter's among them."""
    own = [file.path for _, file in sorted(source.files.items())]
    return own + [path for path in source.overlaid if path.name.endswith(ENDINGS)]


def _hashed(
    paths: Mapping[str, Path], origin: Origin, options: RunOptions
) -> dict[str, dict[str, Any]]:
    with (
        Digests(options.threads(streamed=False)) as digests,
        items_bar(len(paths), "hash", "file", shown=options.progress) as advance,
    ):
        digests.begin(path for name, path in paths.items() if name not in origin.known)
        here: dict[str, dict[str, Any]] = {}
        for name, path in paths.items():
            here |= digests.describe({name: path}, origin.known)
            advance()
        return here


def _refusal(table: Sensitivity, why: str) -> RecipeError:
    repo = table.values["source"].get("repo")
    got = f"was measured of {repo or 'another checkpoint'}, and this source has {why}"
    return RecipeError("--sensitivity", got, "a table of this source's weights", FIX)
