"""How a folder differs from what its source gives: headers by tensor, config.json by field.

With the recipe at hand everything is expected to the byte, and compared there. Without it, an
artifact of another tool is right if what engines obey is the source's: the same sizes, layers, rope
and epsilon. Fields that only record where a file came from may be others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.side_names import CONFIG
from qwen35_convert.containers.safetensors.config_differences import config_sentences
from qwen35_convert.difference import differences, first, misplaced
from qwen35_convert.failure import Failure


def header_differences(path: Path, expected: bytes) -> Iterator[str]:
    """Yield how the header of a safetensors file differs from the expected one."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        got, wanted = json.loads(file.read(length)), json.loads(expected[8:])
    orders = _in_order(got), _in_order(wanted)
    for tensors in (got, wanted):
        for entry in filter(None, tensors.values()):  # metadata may be null
            entry.pop("data_offsets", None)
    sentences = list(first(differences(got, wanted))) or list(misplaced(*orders))
    yield from sentences or ["has a header that is written differently but means the same"]


def _in_order(header: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors as they lie in a file."""
    tensors = [name for name in header if name != "__metadata__"]
    return sorted(tensors, key=lambda name: header[name]["data_offsets"])


def config_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield what engines obey in config.json, and is not the source's."""
    for sentence in config_sentences(artifact, source):
        yield Failure(CONFIG, sentence)
