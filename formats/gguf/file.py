"""One GGUF file: a header of keys and of tensors, then the tensors' bytes, each aligned.

    header | zeros | tensor | zeros | tensor | zeros | ...

Every tensor starts at a multiple of `general.alignment` (32), in the header's order and without
further gaps: ggml refuses anything else, and so do we. Tensors are views on a shared read-only map;
`release` gives their pages back. Headers are written by the `gguf` package.

Source: ggml's `gguf.cpp`. Trap: the zeros after the last tensor may be missing.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from formats.content import DOWNLOAD
from formats.errors import FormatError
from formats.gguf.header import FIXED, MAGIC, MAX_NAME, Head, Kv, parse_header
from formats.gguf.writer import written
from formats.safetensors.file import TORCH_NAMES, SafetensorsFile
from formats.safetensors.header import MAX_HEADER, Header
from formats.tensor import TensorInfo, block_of

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 32


def begins_as_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does, whatever its name: Ollama names blobs by their hash."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _read_head(path: Path) -> tuple[Head, int]:
    """Return the header and the size of the file."""
    try:
        size = path.stat().st_size
        if size < FIXED.size:
            raise FormatError(f"{path.name} has {size} bytes, expected a GGUF file")
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as whole,
            whole[:MAX_HEADER] as view,
        ):
            return parse_header(path.name, view), size
    except OSError as error:
        raise FormatError(f"{path.name} cannot be read: {error.strerror}") from None


def _alignment(file: str, kv: Mapping[str, Kv]) -> int:
    pair = kv.get("general.alignment", Kv("", "uint32", ALIGNMENT))
    if pair.kind != "uint32" or pair.value < 8 or pair.value & (pair.value - 1):
        raise FormatError(
            f"{file}: general.alignment is {pair.value!r} ({pair.kind}), "
            "expected a power of two of 8 or more (uint32)"
        )
    return int(pair.value)


def _place(file: str, head: Head, alignment: int, size: int) -> dict[str, tuple[int, int]]:
    """Return each tensor's bytes in a file of `size` bytes, which they must fill without gaps."""
    data = position = _padded(head.length, alignment)
    before, ranges = "the header", {}
    for info, offset in zip(head.infos.values(), head.offsets, strict=True):
        start = data + offset
        if offset % alignment:
            raise FormatError(
                f"{file}: {info.name} is at offset {offset}, expected a multiple of {alignment}"
            )
        if start != position:
            what = "overlaps" if start < position else "leaves a gap after"
            raise FormatError(
                f"{file}: {info.name} {what} {before} (offset {offset}, not {position - data})"
            )
        stop = start + _nbytes(file, info)
        if stop > size:
            raise FormatError(
                f"{file}: {info.name} ends at byte {stop}, expected at most {size}, the file's end",
                fix=f"the file is truncated: {DOWNLOAD}",
            )
        ranges[info.name] = (start, stop)
        position, before = _padded(stop, alignment), info.name
    if size > position:
        raise FormatError(
            f"{file} has {size} bytes, expected {position}: {size - position} too many"
        )
    return ranges


def _nbytes(file: str, info: TensorInfo) -> int:
    try:
        return info.nbytes
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from None


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class GgufFile:
    """An open file: metadata, tensors, and their bytes as views.

    `ranges` are absolute bytes. FormatError names the file, the subject and what disagrees.
    """

    def __init__(self, path: Path) -> None:
        head, size = _read_head(path)
        self.path = path
        self.version = head.version
        self.kv: Mapping[str, Kv] = head.kv
        self.alignment = _alignment(path.name, head.kv)
        self.infos = head.infos
        self.ranges = _place(path.name, head, self.alignment, size)
        stored = {name: _stored(info) for name, info in head.infos.items()}
        self._data = SafetensorsFile(path, Header(stored, self.ranges, {}, ()))

    def read(self, name: str) -> Tensor:
        """Return a view, not to be written to: block formats as uint8 [..., bytes of a row]."""
        return self._data.read(name)

    def raw(self, name: str) -> bytes | None:
        """Return a copy of a tensor's bytes; it needs no torch."""
        return self._data.raw(name)

    def release(self) -> None:
        """Drop every page of this file from memory; views stay valid and are read again."""
        self._data.release()


def _stored(info: TensorInfo) -> TensorInfo:
    """Return the same tensor in a type that torch has."""
    if info.dtype in TORCH_NAMES:
        return info
    block, size = block_of(info.dtype)
    return TensorInfo(info.name, "U8", (*info.shape[:-1], info.shape[-1] // block * size))


def build_header(
    kvs: Sequence[Kv], infos: Sequence[TensorInfo], alignment: int = ALIGNMENT
) -> tuple[bytes, list[int]]:
    """Return the header, padded to `alignment`, and each tensor's absolute byte offset.

    Pairs and tensors keep their order. Tensors are to be followed by zeros up to `alignment`, the
    last one too. FormatError for a row that is not a whole number of blocks.
    """
    _check_output(kvs, infos, alignment)
    head = written(kvs, infos, alignment)
    head += bytes(_padded(len(head), alignment) - len(head))
    offsets, position = [], len(head)
    for info in infos:
        offsets.append(position)
        position = _padded(position + info.nbytes, alignment)
    return head, offsets


def _check_output(kvs: Sequence[Kv], infos: Sequence[TensorInfo], alignment: int) -> None:
    keys, names = [kv.key for kv in kvs], [info.name for info in infos]
    for words in (keys, names):
        twice = [word for word, times in Counter(words).items() if times > 1]
        assert not twice, f"written twice: {twice}"
    stated = next((kv.value for kv in kvs if kv.key == "general.alignment"), ALIGNMENT)
    assert stated == alignment, f"general.alignment is {stated}, the file's is {alignment}"
    empty = [kv.key for kv in kvs if kv.kind.startswith("array[") and not kv.value]
    assert not empty, f"ggml's package writes no empty array: {empty}"
    long = [name for name in names if not 0 < len(name.encode()) <= MAX_NAME]
    assert not long, f"llama.cpp reads names of up to {MAX_NAME} bytes: {long}"
