"""The header of a safetensors file: an 8-byte length, then JSON; the tensors' bytes follow it.

    length | {"name": {"dtype", "shape", "data_offsets"}, ..., "__metadata__"} | bytes without gaps

It is checked by our own eyes before anything else, because a file that is short, or whose offsets
overlap, loads elsewhere without a word.

Source: the safetensors format description. Trap: a leaked stub of dtype "" (NeMo Automodel) makes
the whole header unreadable to the library; such a stub holds no bytes and is dropped by name.
"""

from __future__ import annotations

import json
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from formats.content import DOWNLOAD, FIRST, content_of
from formats.errors import FormatError
from formats.json_file import parse_object
from formats.tensor import DTYPE_BYTES, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_HEADER = 100_000_000
MAX_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says: tensors with their byte ranges in the file, metadata, dropped stubs."""

    infos: dict[str, TensorInfo]
    ranges: dict[str, tuple[int, int]]
    metadata: dict[str, str]
    stubs: tuple[str, ...]


def read_header(path: Path) -> Header:
    """Read and check a header. FormatError names the file, the tensor and what disagrees."""
    try:
        size = _size_of(path)
        with path.open("rb") as file:
            first = file.read(FIRST)
            length = header_length(path.name, size, first)
            text = first[8 : 8 + length] + file.read(max(0, length - (FIRST - 8)))
    except OSError as error:
        raise FormatError(f"{path.name} cannot be read: {error.strerror}") from None
    return parse_header(path.name, text, size)


def parse_header(name: str, text: bytes, size: int) -> Header:
    """Return what the JSON of a header says, checked; `name` and `size` are the file's."""
    entries = parse_object(text, f"{name}: the header")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{name}: __metadata__ is not an object of strings")
    return _check_entries(name, entries, metadata, data_start=8 + len(text), size=size)


def _size_of(path: Path) -> int:
    """Return a file's size. FormatError for what is no file: opening a pipe would wait for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path.name} cannot be read: it is not a file")
    return status.st_size


def header_length(name: str, size: int, first: bytes) -> int:
    """Return the bytes of the JSON, as the first bytes of a file of `size` say.

    FormatError, which says what the file is instead if its first bytes (`FIRST`) show it.
    """
    length = int.from_bytes(first[:8], "little")
    too_long = len(first) < 8 or length > min(MAX_HEADER, size - 8)
    if too_long or (length == 0 and content_of(first)):
        raise _no_header(name, size, first, length)
    return length


def _no_header(name: str, size: int, first: bytes, length: int) -> FormatError:
    content = content_of(first)
    if content is not None:
        return FormatError(f"{name} {content.what} ({size} bytes)", fix=content.fix)
    if len(first) < 8:
        least = "a safetensors file (8 at least)"
        return FormatError(name, f"has {size} bytes", least, DOWNLOAD)
    cut = length <= MAX_HEADER and first[8:9] == b"{"
    return FormatError(
        f"{name} says its header has {length} bytes",
        expected=f"at most {min(MAX_HEADER, size - 8)} in a file of {size}",
        fix=f"the file is truncated: {DOWNLOAD}" if cut else "",
    )


def _check_entries(
    file: str, entries: dict[str, Any], metadata: dict[str, str], *, data_start: int, size: int
) -> Header:
    infos: dict[str, TensorInfo] = {}
    ranges: dict[str, tuple[int, int]] = {}
    stubs = []
    for name, entry in entries.items():
        info, start, stop = _entry(file, name, entry)
        if info is None:
            stubs.append(name)
            continue
        infos[name] = info
        ranges[name] = (data_start + start, data_start + stop)
    _check_contiguous(file, ranges, data_start, size)
    return Header(infos, ranges, metadata, tuple(stubs))


def _entry(file: str, name: str, entry: object) -> tuple[TensorInfo | None, int, int]:
    if not name.isprintable():
        raise FormatError(f"{file}: {name!r} is not a tensor name")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{file}: {name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(
            f"{file}: {name} has data_offsets {offsets!r:.120}, expected [start, stop]"
        )
    if dtype == "" and offsets[0] == offsets[1]:
        return None, 0, 0
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise FormatError(f"{file}: {name} has dtype {dtype!r:.120}, expected one of {known}")
    if not _is_sizes(shape) or len(shape) > 8:
        raise FormatError(f"{file}: {name} has shape {shape!r:.120}, expected a list of sizes")
    info = TensorInfo(name, dtype, tuple(shape))
    if info.nbytes != offsets[1] - offsets[0]:
        raise FormatError(
            f"{file}: {name} ({dtype} {list(shape)}) has {offsets[1] - offsets[0]} bytes, "
            f"expected {info.nbytes}"
        )
    return info, offsets[0], offsets[1]


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number <= MAX_SIZE for number in value
    )


def _check_contiguous(
    file: str, ranges: dict[str, tuple[int, int]], data_start: int, size: int
) -> None:
    position, before = data_start, "the header"
    for name, (start, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        if start != position:
            what = "overlaps" if start < position else "leaves a gap after"
            raise FormatError(f"{file}: {name} {what} {before} (byte {start}, not {position})")
        position, before = stop, name
    if position != size:
        short = position > size
        off = f"{position - size} are missing" if short else f"{size - position} too many"
        raise FormatError(
            file,
            f"has {size} bytes",
            f"{position} (header + data): {off}",
            DOWNLOAD if short else "",
        )


def build_header(infos: Iterable[TensorInfo], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """Return the header's bytes and each tensor's byte offset in the file, in the given order.

    Tensors must come with wider types first, so that every one is aligned to its own size.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, position = [], 0
    for info in infos:
        stop = position + info.nbytes
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, stop],
        }
        starts.append(position)
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, [len(head) + start for start in starts]
