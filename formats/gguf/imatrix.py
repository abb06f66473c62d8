"""llama.cpp's importance matrix as it lies on a disk: a GGUF file, or the older `imatrix.dat`.

    GGUF    NAME.in_sum2 [E, K]  NAME.counts [E, 1]   sums of squares, tokens that came by
    older   entries i32, then for each: length i32, name, calls i32, values i32, float32 values
            and at the end, in newer ones: chunks i32, length i32, name of the text

Which it is, its first bytes say: both are called .dat, .gguf and .imatrix. An older value is a mean
square times the calls, so dividing by those gives the same. It has no count for each expert: one
that no token reached has zeros, or was left out with its whole tensor.

Source: llama.cpp's `common/imatrix-loader.cpp`, which falls back in the same way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import FormatError
from formats.gguf.file import GgufFile, begins_as_gguf
from formats.gguf.header import MAX_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SUMS, COUNTS = ".in_sum2", ".counts"
TYPE, DATASETS, CHUNKS = "general.type", "imatrix.datasets", "imatrix.chunk_count"
IMATRIX = "imatrix"
MAX_BYTES = 4 << 30
MAX_ENTRIES = 1 << 16
FORMS = "llama.cpp's imatrix, as GGUF or in its older form"


@dataclass(frozen=True, slots=True)
class ImatrixFile:
    """What a file holds.

    entries   (sums, counts) by the name of the tensor, as many counts as experts, or one
    datasets  the texts it was made of
    chunks    of them; None: not said
    """

    entries: Mapping[str, tuple[Tensor, Tensor]]
    datasets: tuple[str, ...] = ()
    chunks: int | None = None


def is_imatrix(path: Path) -> bool:
    """Whether a GGUF file says that it is an imatrix; False for one that cannot be read."""
    try:
        pair = GgufFile(path).kv.get(TYPE)
    except FormatError:
        return False
    return pair is not None and pair.value == IMATRIX


def read_imatrix(path: Path) -> ImatrixFile:
    """Read a file of either form. FormatError if it is none, or cut short."""
    return _read_gguf(GgufFile(path)) if begins_as_gguf(path) else _read_older(path)


def _read_gguf(file: GgufFile) -> ImatrixFile:
    kind = file.kv[TYPE].value if TYPE in file.kv else IMATRIX
    if kind != IMATRIX:
        raise FormatError(f"{file.path.name}: {TYPE}", f"is {kind!r}", repr(IMATRIX))
    names = [name.removesuffix(SUMS) for name in file.infos if name.endswith(SUMS)]
    if not names:
        raise FormatError(file.path.name, f"has no tensor NAME{SUMS}", FORMS)
    for stored in (name + part for name in names for part in (SUMS, COUNTS)):
        dtype = file.infos[stored].dtype if stored in file.infos else "missing"
        if dtype != "F32":
            raise FormatError(f"{file.path.name}: {stored}", f"is {dtype}", "F32")
    datasets = file.kv[DATASETS].value if DATASETS in file.kv else []
    chunks = file.kv[CHUNKS].value if CHUNKS in file.kv else None
    return ImatrixFile(
        {name: (file.read(name + SUMS), file.read(name + COUNTS)) for name in names},
        tuple(map(str, datasets)) if isinstance(datasets, list) else (),
        chunks if isinstance(chunks, int) else None,
    )


def _read_older(path: Path) -> ImatrixFile:
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MAX_BYTES:
            raise FormatError(path.name, f"has {size} bytes", FORMS)
        data = path.read_bytes()
    except OSError as error:
        fix = "give a file that exists, such as qwen35 imatrix makes, or leave it out"
        raise FormatError(f"{path} cannot be read: {error.strerror}", fix=fix) from None
    reader = _Older(path.name, data)
    count = reader.integer("the number of entries", 1, MAX_ENTRIES)
    entries = dict(reader.entry(i) for i in range(1, count + 1))
    return ImatrixFile(entries, *reader.tail())


class _Older:
    """Bytes that nobody vouches for, read from the start on; every length is held against them."""

    def __init__(self, file: str, data: bytes) -> None:
        self._file, self._data, self._at = file, data, 0

    def integer(self, what: str, least: int, most: int) -> int:
        """Return a number of 32 bits within bounds."""
        (value,) = struct.unpack("<i", self._take(4, what))
        if not least <= value <= most:
            self._fail(f"{what} is {value}")
        return int(value)

    def entry(self, i: int) -> tuple[str, tuple[Tensor, Tensor]]:
        """Return the name of entry `i`, its sums and its calls."""
        import torch

        raw = self._take(self.integer(f"the name of entry {i}", 1, MAX_NAME), f"entry {i}")
        name = raw.split(b"\0")[0].decode("utf-8", errors="replace")
        calls = self.integer(f"the calls of {name}", -(1 << 31), (1 << 31) - 1)
        values = self.integer(f"the number of values of {name}", 1, len(self._data) // 4)
        sums = torch.frombuffer(bytearray(self._take(4 * values, name)), dtype=torch.float32)
        # as llama-quantize does: without calls, values are means already
        return name, (sums, torch.tensor([float(max(calls, 1))]))

    def tail(self) -> tuple[tuple[str, ...], int | None]:
        """Return the texts and the number of chunks, where the file says them."""
        rest = self._data[self._at :]
        if len(rest) < 8:
            return (), None
        chunks, length = struct.unpack("<ii", rest[:8])
        text = rest[8 : 8 + max(length, 0)].split(b"\0")[0].decode("utf-8", errors="replace")
        return ((text,) if text else ()), (chunks if chunks > 0 else None)

    def _take(self, count: int, what: str) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            self._fail(f"ends in {what}")
        self._at += count
        return taken

    def _fail(self, reason: str) -> None:
        raise FormatError(self._file, f"is not an imatrix: {reason}", FORMS)
