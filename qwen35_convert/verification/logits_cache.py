"""What a source's layers made of a text, kept in a folder for the next artifact to be compared.

A file holds the residual stream after each layer, `layers.{i}` float32 [R, H]: R*H*4 bytes a layer,
0.8 GB for 8192 tokens of 0.8B, 10.7 GB of 27B. With it a comparison gives the same digits without
the source's layers; its head is applied again. For 0.8B that takes 0.76 of the core seconds (265 of
350), for larger models, whose heads are a smaller part, nearer half.

A file is written aside and renamed, so one in place is whole. Its name is a digest of everything
the streams depend on: the source's files (path, size, time of change), the tokens, the device, the
versions of qwen35 and torch. Files are never removed here.

Shape letters: N texts, T tokens of each, R = N*T rows, H hidden size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.safetensors.file import SafetensorsFile, build_header
from formats.tensor import TensorInfo
from qwen35_convert.durable import write_all, written_aside
from qwen35_convert.errors import OutputError
from qwen35_convert.run.items import as_bytes
from qwen35_convert.write.receipt import version

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitsCache:
    """The streams of one source over one text, if they are kept, or where they will be.

    path   the file of these streams
    infos  what it holds
    """

    path: Path
    infos: tuple[TensorInfo, ...]

    @staticmethod
    def of(folder: Path, source: Checkpoint, ids_NT: Tensor, device: str) -> LogitsCache:
        """Return the place in a folder, which is made. OutputError if that cannot be written."""
        shape = (ids_NT.numel(), source.config.sizes["H"])
        layers = range(len(source.config.layer_types))
        infos = tuple(TensorInfo(f"layers.{i}", "F32", shape) for i in layers)
        path = folder / f"{_digest(source, ids_NT, device)}.safetensors"
        if not path.is_file():
            _check_folder(folder, sum(info.nbytes for info in infos))
        return LogitsCache(path, infos)

    def streams(self, computed: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the kept streams; if there are none, those that are computed, and keep them."""
        return self._kept() if self.path.is_file() else self._kept_from_now_on(computed)

    def _kept(self) -> Iterator[Tensor]:
        file = SafetensorsFile(self.path)
        for info in self.infos:
            yield file.read(info.name)
            file.release()

    def _kept_from_now_on(self, computed: Iterator[Tensor]) -> Iterator[Tensor]:
        header, _ = build_header(self.infos, {})
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with _unwritable(self.path), written_aside(self.path, aside) as file:
            write_all(file, memoryview(header), 0)
            place = len(header)
            for _, stream in zip(self.infos, computed, strict=True):
                data = as_bytes(stream)
                write_all(file, data, place)
                place += data.nbytes
                yield stream


def _digest(source: Checkpoint, ids_NT: Tensor, device: str) -> str:
    import torch

    files = [(path.resolve(), path.stat()) for path in source.read_files()]
    key = {
        "files": [(str(path), status.st_size, status.st_mtime_ns) for path, status in files],
        "tokens": ids_NT.tolist(),
        "device": device,
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
