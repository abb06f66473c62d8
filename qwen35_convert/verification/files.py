"""Every file of an artifact against the one that its recipe makes of its source.

Headers are compared to the byte and, where they differ, tensor by tensor and key by key; whole
files (config.json, the index, tokenizer and templates) by their fields. A card or a licence may be
written anew; a file more that an engine obeys may not lie there, whatever a receipt says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.safetensors.folder import DOCUMENTS
from qwen35_convert.containers.registry import container_of
from qwen35_convert.difference import of_file
from qwen35_convert.failure import Failure
from qwen35_convert.planning.plan import Plan, Shard


def file_failures(plan: Plan, artifact: Checkpoint) -> Iterator[Failure]:
    """Yield what is missing, what differs, by its field, and what engines obey besides."""
    for name, content in plan.files.items():
        if name not in DOCUMENTS:
            yield from _whole(artifact.folder, name, content())
    for shard in plan.shards:
        yield from _shard(artifact, shard)
    made = {*plan.files, *(shard.name for shard in plan.shards)}
    for name in container_of(artifact).unlisted(artifact, made):
        yield Failure(name, "is obeyed by engines, but the recipe does not make it")


def _whole(folder: Path, name: str, expected: bytes) -> Iterator[Failure]:
    path = folder / name
    if not path.is_file():
        yield Failure(name, "is missing: the recipe keeps it")
        return
    for sentence in of_file(path.name, path.read_bytes(), expected):
        yield Failure(name, sentence)


def _shard(artifact: Checkpoint, shard: Shard) -> Iterator[Failure]:
    path = artifact.folder / shard.name
    if not path.is_file():
        yield Failure(shard.name, "is missing: the recipe makes it")
        return
    with path.open("rb") as file:
        same = file.read(len(shard.header)) == shard.header
    if not same:
        for sentence in container_of(artifact).header_differences(path, shard.header):
            yield Failure(shard.name, sentence)
    elif path.stat().st_size != shard.nbytes:
        yield Failure(shard.name, f"has {path.stat().st_size} bytes, expected {shard.nbytes}")
