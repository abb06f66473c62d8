"""Tensors of an artifact, to be changed and written back: safetensors and GGUF alike.

    with editing(artifact) as tensors:
        tensors.store("layers.0.mlp.up_proj.weight", 2 * tensors.values("layers.0.mlp..."))

`values` decodes and `store` encodes again in the scheme that is stored; `entry` has the bytes
themselves. Tensors are named as on the hub, without `model.language_model.`, or by the symbols of
`tests.planted.models`: `{full}.self_attn.q_proj.weight`. In a GGUF file an expert is one entry of
its stack, and values are those of the file (heads tiled, norms 1 + w).
Files that are not changed are written back to the same bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from formats.family.names import place
from formats.gguf.file import GgufFile
from formats.gguf.file import build_header as gguf_header
from formats.gguf.header import Kv
from formats.gguf.names import gguf_name
from formats.safetensors.file import TORCH_NAMES, torch_dtype
from formats.safetensors.header import build_header
from formats.tensor import DTYPE_BYTES, TensorInfo
from quant.fp8.reference import dequantize, quantize
from quant.ggml import codec
from tests.planted.artifact import Artifact
from tests.planted.models import NUM_LAYERS, symbols

INDEX = "model.safetensors.index.json"
DTYPES = {torch_dtype(name): name for name in TORCH_NAMES}


@dataclass(slots=True)
class Entry:
    """One stored tensor: its header and its bytes."""

    info: TensorInfo
    data: NDArray[np.uint8]

    def view(self) -> torch.Tensor:
        """Return the elements of a plain type, to be changed in place."""
        return torch.from_numpy(self.data).view(torch_dtype(self.info.dtype)).view(self.info.shape)

    def blocks(self) -> NDArray[np.uint8]:
        """Return the blocks of a GGUF tensor, [rows, bytes of a row], to be changed in place."""
        return self.data.reshape(int(np.prod(self.info.shape[:-1])), -1)

    def put(self, values: torch.Tensor) -> None:
        """Hold these values, in their type and shape."""
        self.info = TensorInfo(self.info.name, DTYPES[values.dtype], tuple(values.shape))
        self.data = values.contiguous().view(-1).view(torch.uint8).numpy().copy()

    def renamed(self, name: str) -> Entry:
        """Return the same tensor under another name."""
        return Entry(replace(self.info, name=name), self.data.copy())


@dataclass(slots=True)
class TensorFile:
    """A file of tensors, in order; `metadata` or `pairs` is what else its header says."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    pairs: list[Kv] = field(default_factory=list)

    def content(self) -> bytes:
        """Return the file's bytes."""
        entries = list(self.entries.values())
        if self.path.suffix == ".gguf":
            header, _ = gguf_header(self.pairs, [entry.info for entry in entries])
            return header + b"".join(_padded(entry.data.tobytes()) for entry in entries)
        # wider types first, so that every tensor is aligned to its own size
        entries.sort(key=lambda entry: -DTYPE_BYTES[entry.info.dtype])
        header, _ = build_header([entry.info for entry in entries], self.metadata)
        return header + b"".join(entry.data.tobytes() for entry in entries)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def read_file(path: Path) -> TensorFile:
    """Read a whole file."""
    return _read_gguf(path) if path.suffix == ".gguf" else _read_safetensors(path)


def _read_gguf(path: Path) -> TensorFile:
    file, content = GgufFile(path), path.read_bytes()
    entries = {
        name: Entry(info, np.frombuffer(content[slice(*file.ranges[name])], np.uint8).copy())
        for name, info in file.infos.items()
    }
    return TensorFile(path, entries, pairs=list(file.kv.values()))


def _read_safetensors(path: Path) -> TensorFile:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__", {})
    entries = {}
    for name, said in header.items():
        info = TensorInfo(name, said["dtype"], tuple(said["shape"]))
        piece = data[slice(*said["data_offsets"])]
        entries[name] = Entry(info, np.frombuffer(piece, np.uint8).copy())
    return TensorFile(path, entries, metadata)


@dataclass(slots=True)
class Tensors:
    """Every tensor of an artifact, whatever file it is in."""

    artifact: Artifact
    files: list[TensorFile]

    def home(self, stored: str) -> TensorFile:
        """Return the file that holds a tensor."""
        return next(file for file in self.files if stored in file.entries)

    def entry(self, stored: str) -> Entry:
        """Return a tensor by its stored name."""
        return self.home(stored).entries[stored]

    def names(self) -> list[str]:
        """Return all stored names."""
        return [name for file in self.files for name in file.entries]

    def pairs(self) -> list[Kv]:
        """Return the metadata of a GGUF file."""
        return self.files[0].pairs

    def stored(self, hub: str) -> str:
        """Return the stored name of a tensor that the hub names so."""
        return self._place(hub)[0]

    def at(self, hub: str) -> Entry:
        """Return a tensor by its hub name; of a stack, the whole."""
        return self.entry(self.stored(hub))

    def scale(self, hub: str) -> Entry | None:
        """Return the scale of an FP8 weight; None if it has none."""
        base = self.stored(hub)
        names = set(self.names())
        found = [base + suffix for suffix in ("_scale_inv", "_scale") if base + suffix in names]
        return self.entry(found[0]) if found else None

    def values(self, hub: str) -> torch.Tensor:
        """Return a tensor's values in float32."""
        entry, index = self.at(hub), self._place(hub)[1]
        scale = self.scale(hub)
        if scale is not None:
            return dequantize(entry.view(), scale.view(), block_of(entry, scale))
        if entry.info.dtype in TORCH_NAMES:
            values = entry.view().float()
        else:
            rows = torch.from_numpy(entry.blocks())
            values = codec.decode(entry.info.dtype, rows, entry.info.shape[-1])
            values = values.reshape(entry.info.shape)
        return values.clone() if index is None else values[index].clone()

    def store(self, hub: str, values: torch.Tensor) -> str:
        """Encode values in the scheme of a tensor; return its stored name."""
        entry, (stored, index) = self.at(hub), self._place(hub)
        scale = self.scale(hub)
        if scale is not None:
            _store_fp8(entry, scale, values)
        elif entry.info.dtype in TORCH_NAMES:
            view = entry.view() if index is None else entry.view()[index]
            view.copy_(values.to(view.dtype))
        else:
            rows = values.reshape(-1, values.shape[-1]).contiguous()
            start = 0 if index is None else index * len(rows)
            blocks = codec.encode(entry.info.dtype, rows).numpy()
            entry.blocks()[start : start + len(rows)] = blocks
        return stored

    def swap(self, one: str, two: str) -> tuple[str, str]:
        """Let two tensors of one shape hold each other's values."""
        first, second = self.values(one), self.values(two)
        return self.store(one, second), self.store(two, first)

    def _place(self, hub: str) -> tuple[str, int | None]:
        base = self.artifact.base
        name = hub.format_map(symbols(base.model))
        if base.gguf:
            return gguf_name(name, NUM_LAYERS[base.model])
        return place(name, base.namespace), None


def block_of(entry: Entry, scale: Entry) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    channel = scale.info.shape[0] == entry.info.shape[0]
    return (1, entry.info.shape[-1]) if channel else (128, 128)


def _store_fp8(entry: Entry, scale: Entry, values: torch.Tensor) -> None:
    block = block_of(entry, scale)
    mode = "pow2" if block[0] == 128 else "bfloat16"
    codes, scales = quantize(values, block, mode)
    entry.view().copy_(codes)
    scale.view().copy_(scales)


def reading(artifact: Artifact) -> Tensors:
    """Return the tensors, of which nothing is written back."""
    return Tensors(artifact, [read_file(path) for path in artifact.tensor_files()])


@contextmanager
def editing(artifact: Artifact) -> Iterator[Tensors]:
    """Give the tensors to be changed; files and index are written anew."""
    tensors = reading(artifact)
    yield tensors
    save(tensors)


def save(tensors: Tensors) -> None:
    """Write every file, and an index that agrees with them."""
    artifact = tensors.artifact
    for file in tensors.files:
        artifact.write(file.path.name, file.content())
    if not artifact.base.gguf:
        where = {name: file.path.name for file in tensors.files for name in file.entries}
        total = sum(len(e.data) for file in tensors.files for e in file.entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        artifact.write(INDEX, json.dumps(index, indent=2) + "\n")
