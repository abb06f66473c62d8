"""GGUF files as shards: header, tensors, offsets, whole or split."""

from __future__ import annotations

from collections.abc import Sequence

from formats.gguf.file import ALIGNMENT, build_header
from formats.gguf.header import Kv
from formats.gguf.split import split_name, split_pairs
from formats.tensor import TensorInfo
from qwen35_convert.planning.plan import Shard, pack


def gguf_shard(name: str, pairs: Sequence[Kv], infos: Sequence[TensorInfo]) -> Shard:
    """Return a GGUF file: header, offsets and size, zeros after the last tensor included."""
    header, offsets = build_header(pairs, infos)
    end = offsets[-1] + infos[-1].nbytes
    return Shard(name, tuple(infos), header, tuple(offsets), -(-end // ALIGNMENT) * ALIGNMENT)


def gguf_shards(
    infos: Sequence[TensorInfo], pairs: Sequence[Kv], stem: str, limit: int
) -> tuple[Shard, ...]:
    """Pack tensors in order into files of at most `limit` bytes; the first has the metadata."""
    packs = pack(([info] for info in infos), limit)
    if len(packs) == 1:
        return (gguf_shard(f"{stem}.gguf", pairs, infos),)
    count = len(packs)
    return tuple(
        gguf_shard(
            split_name(stem, i, count),
            [*(pairs if i == 1 else ()), *split_pairs(i, count, len(infos))],
            tensors,
        )
        for i, tensors in enumerate(packs, 1)
    )
