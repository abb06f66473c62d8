"""GGUF files written by hand, byte by byte, and by `build_header` with seeded bytes."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from formats.gguf.file import ALIGNMENT, GgufFile, build_header
from formats.gguf.header import Kv
from formats.tensor import TensorInfo

STRING, ARRAY, BOOL, U32, I32, F32 = 8, 9, 7, 4, 5, 6
HUGE = (1 << 64) - 1
RANGES = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    **{kind: st.integers(0, (1 << bits) - 1) for kind, bits in RANGES.items()},
    **{
        kind[1:]: st.integers(-1 << (bits - 1), (1 << (bits - 1)) - 1)
        for kind, bits in RANGES.items()
    },
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
}


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data) if length is None else length) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return u32(kind) + u64(count) + items


def tensor(
    name: str | bytes,
    sizes: tuple[int, ...] = (8,),
    kind: int = 0,
    offset: int = 0,
    dims: int | None = None,
) -> bytes:
    count = len(sizes) if dims is None else dims
    return text(name) + u32(count) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


def raw(
    pairs: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 0, **start: Any
) -> bytes:
    """Write a file by hand: this header, padded, and so many zero bytes of data."""
    said = {"magic": b"GGUF", "version": 3} | start
    head = said["magic"] + u32(said["version"])
    head += u64(said.get("num_tensors", len(tensors))) + u64(said.get("num_pairs", len(pairs)))
    head += b"".join(pairs) + b"".join(tensors)
    pad = said.get("pad", -len(head) % said.get("alignment", ALIGNMENT))
    return head + bytes(pad) + bytes(data)


def opened(folder: Path, content: bytes) -> GgufFile:
    path = folder / "x.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def fill(info: TensorInfo, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, info.nbytes, np.uint8).tobytes()


def write(
    path: Path, kvs: list[Kv], infos: list[TensorInfo], alignment: int = ALIGNMENT
) -> dict[str, bytes]:
    """Write a file with `build_header` and seeded bytes, and return the bytes by name."""
    head, offsets = build_header(kvs, infos, alignment)
    content, datas = bytearray(head), {}
    for seed, (info, offset) in enumerate(zip(infos, offsets, strict=True)):
        assert len(content) == offset
        datas[info.name] = fill(info, seed)
        content += datas[info.name]
        content += bytes(-len(content) % alignment)
    path.write_bytes(content)
    return datas


@contextmanager
def costing_less_than(nbytes: int) -> Iterator[None]:
    """Hold what is allocated inside to a bound."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def bytes_of(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()
