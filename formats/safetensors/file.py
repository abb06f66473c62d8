"""One safetensors file, open: its tensors are views on a shared read-only map.

`release` gives their pages back, so that reading needs constant memory.
"""

from __future__ import annotations

import mmap
import warnings
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

from formats.errors import FormatError
from formats.safetensors.header import Header, read_header
from formats.tensor import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from formats.tensor import TensorInfo

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class SafetensorsFile:
    """An open file: `read` gives views on its bytes, `release` gives their pages back."""

    def __init__(self, path: Path, header: Header | None = None) -> None:
        self.path = path
        self.header = header or read_header(path)
        self._map: mmap.mmap | None = None
        self._opening = Lock()

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self.header.infos

    @property
    def ranges(self) -> Mapping[str, tuple[int, int]]:
        """First byte of each tensor in the file, and the one after its last."""
        return self.header.ranges

    def _bytes(self) -> mmap.mmap:
        with self._opening:
            if self._map is None:
                self._map = self._open()
            return self._map

    def _open(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FormatError(f"{self.path.name} cannot be read: {error}") from None
        needed = max(stop for _, stop in self.ranges.values())
        if len(mapped) < needed:
            raise FormatError(
                f"{self.path.name} shrank after it was opened: it has {len(mapped)} bytes, "
                f"expected {needed}"
            )
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return mapped

    def read(self, name: str) -> Tensor:
        """Return a view, not to be written to; a copy where the tensor lies at an odd offset."""
        import torch

        info, (start, stop) = self.header.infos[name], self.header.ranges[name]
        dtype = torch_dtype(info.dtype)
        if info.numel == 0:
            return torch.empty(info.shape, dtype=dtype)
        mapped = self._bytes()
        _quieten_frombuffer()
        if start % DTYPE_BYTES[info.dtype]:
            flat = torch.frombuffer(mapped[start:stop], dtype=dtype)
            self.release()
        else:
            flat = torch.frombuffer(mapped, dtype=dtype, count=info.numel, offset=start)
        return flat.reshape(info.shape)

    def raw(self, name: str) -> bytes | None:
        """Return a copy of a tensor's bytes without torch; None if they are elsewhere."""
        start, stop = self.header.ranges[name]
        return self._bytes()[start:stop] if start < stop else b""

    def release(self) -> None:
        """Drop every page of this file from memory; views stay valid and are read again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's data type for a name such as BF16."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return dtype


@cache
def _quieten_frombuffer() -> None:
    """Spend torch's one warning that a read-only map gives a read-only tensor: it is meant."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
