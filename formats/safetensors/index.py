"""Names of files of weights, and the index that says which of them holds which tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from formats.errors import FormatError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = ".safetensors"
MAX_NAME = 255
# An index of any set of files: model.safetensors.index.fp16.json, consolidated.safetensors.index...
INDEX_NAME = re.compile(r".+\.safetensors\.index(?:\.[\w-]+)?\.json")
# One file of several: its stem, its number, how many there are, a variant.
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.[\w-]+)?\.safetensors")


def check_index(raw: dict[str, Any], file: str = INDEX) -> dict[str, str]:
    """Return tensor -> file as an index says; FormatError for what can be no file beside it."""
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{file}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not name.isprintable():
            raise FormatError(f"{file}: {name!r} is not a tensor name")
        if not isinstance(shard, str) or not _is_name(shard):
            raise FormatError(
                f"{file}: {name} is in {shard!r:.120}, expected a .safetensors file of this folder"
            )
    return weight_map


def _is_name(shard: str) -> bool:
    plain = Path(shard).name == shard and "\\" not in shard and shard.isprintable()
    return plain and len(shard) <= MAX_NAME and shard.endswith(WEIGHTS)


def siblings(name: str) -> list[str]:
    """Return all files of the set that a file says it is one of; none if it does not say so.

    >>> siblings("model-00002-of-00002.safetensors")
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    match = SHARD.fullmatch(name)
    if match is None:
        return []
    stem, _, count, variant = match.groups()
    numbers = range(1, int(count) + 1)
    return [f"{stem}-{i:05d}-of-{count}{variant or ''}{WEIGHTS}" for i in numbers]


def shard_sets(names: Iterable[str]) -> list[list[str]]:
    """Return the sets of files that any of these names says it is one of."""
    return [
        list(files) for files in dict.fromkeys(tuple(siblings(name)) for name in names) if files
    ]


def indexes(names: Iterable[str]) -> list[str]:
    """Return the indexes among these files."""
    return sorted(name for name in names if INDEX_NAME.fullmatch(name))
