"""What a source's layers made of a text, kept in a folder for the next artifact to be compared.

A file holds the residual stream after each layer, `layers.{i}` float32 [R, H]: R*H*4 bytes a layer,
0.8 GB for 8192 tokens of 0.8B, 10.7 GB of 27B. With it a comparison gives the same digits without
the source's layers; its head is applied again. For 0.8B that takes half the core seconds (157 of
314).

A file is written aside and renamed, so one in place is whole. Its name is a digest of everything
the streams depend on: the source's files (path, size, time of change), the tokens, the device, the
pieces in which logits are computed, the versions of qwen35 and torch. Files are never removed here.

Shape letters: N texts, T tokens of each, R = N*T rows, H hidden size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.safetensors.file import SafetensorsFile
from formats.safetensors.header import build_header
from formats.tensor import TensorInfo
from qwen35_convert.durable import reserve, write_all, written_aside
from qwen35_convert.errors import OutputError
from qwen35_convert.run.placed import as_bytes
from qwen35_convert.versions import version

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.compare import Kept

LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class LogitsCache:
    """What was computed of one source over one text, if it is kept, or where it will be.

    path   the file
    infos  what it holds: the streams, and then the logits
    """

    path: Path
    infos: tuple[TensorInfo, ...]

    @staticmethod
    def of(folder: Path, source: Checkpoint, ids_NT: Tensor, device: str) -> LogitsCache:
        """Return the place in a folder, which is made. OutputError if that cannot be written."""
        count, sizes = ids_NT.numel(), source.config.sizes
        layers = range(len(source.config.layer_types))
        streams = [TensorInfo(f"layers.{i}", "F32", (count, sizes["H"])) for i in layers]
        infos = (*streams, TensorInfo(LOGITS, "F32", (count * sizes["V"],)))
        path = folder / f"{_digest(source, ids_NT, device)}.safetensors"
        if not path.is_file():
            _check_folder(folder, sum(info.nbytes for info in infos))
        return LogitsCache(path, infos)

    @contextmanager
    def opened(self) -> Iterator[Kept]:
        """Give what is kept; if there is nothing, what keeps it, in place once all is computed."""
        if self.path.is_file():
            yield _Kept(SafetensorsFile(self.path), self.infos)
            return
        header, places = build_header(self.infos, {})
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with _unwritable(self.path), written_aside(self.path, aside) as file:
            reserve(file, places[-1] + self.infos[-1].nbytes)
            write_all(file, memoryview(header), 0)
            yield _Keeping(file, self.infos, places)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Reads what was kept."""

    file: SafetensorsFile
    infos: Sequence[TensorInfo]

    def streams(self, _computed: Iterator[Tensor]) -> Iterator[Tensor]:
        for info in self.infos[:-1]:
            yield self.file.read(info.name)
            self.file.release()

    def logits(self, rows: slice, columns: slice, _compute: Callable[[], Tensor]) -> Tensor:
        place, shape = _tile(self.infos, rows, columns)
        tile = self.file.read(LOGITS)[place : place + prod(shape)].view(shape).clone()
        self.file.release()
        return tile


@dataclass(frozen=True, slots=True)
class _Keeping:
    """Writes what is computed; safe from any thread."""

    file: int
    infos: Sequence[TensorInfo]
    places: Sequence[int]

    def streams(self, computed: Iterator[Tensor]) -> Iterator[Tensor]:
        for place, stream in zip(self.places[:-1], computed, strict=True):
            write_all(self.file, as_bytes(stream), place)
            yield stream

    def logits(self, rows: slice, columns: slice, compute: Callable[[], Tensor]) -> Tensor:
        tile, (first, _) = compute(), _tile(self.infos, rows, columns)
        write_all(self.file, as_bytes(tile), self.places[-1] + first * tile.itemsize)
        return tile


def _tile(infos: Sequence[TensorInfo], rows: slice, columns: slice) -> tuple[int, tuple[int, int]]:
    """Return where a tile of logits begins, by elements, and its shape.

    Strips of the vocabulary follow each other, in each strip blocks of rows.
    """
    shape = rows.stop - rows.start, columns.stop - columns.start
    return columns.start * infos[0].shape[0] + rows.start * shape[1], shape


def _digest(source: Checkpoint, ids_NT: Tensor, device: str) -> str:
    import torch

    from runtime.compare import BLOCK_ROWS, STRIP_CELLS

    files = [(path.resolve(), path.stat()) for path in source.read_files()]
    key = {
        "files": [(str(path), status.st_size, status.st_mtime_ns) for path, status in files],
        "tokens": ids_NT.tolist(),
        "device": device,
        "pieces": [BLOCK_ROWS, STRIP_CELLS],
        "versions": [version(), torch.__version__],
    }
    return sha256(json.dumps(key).encode()).hexdigest()


def _check_folder(folder: Path, nbytes: int) -> None:
    with _unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OutputError(f"{folder} has {free} free bytes, a cache of these logits needs {nbytes}")


@contextmanager
def _unwritable(path: Path) -> Iterator[None]:
    """Turn an OSError into an OutputError that names the path."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from None
