"""The header of a GGUF file, read from bytes that nobody vouches for.

    "GGUF"  version u32  tensors u64  pairs u64    all little-endian
    pair    key, type u32, value                   an array: type u32, count u64, values
    tensor  name, dims u32, sizes u64 (fastest first), type u32, offset u64 (from the data's start)

Source: ggml's `gguf.h` and its reader. `cursor` holds every length against what is left, and every
count has a limit, so a hostile file costs little. Trap: sizes run the other way round than torch's
shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any

from formats.content import FIRST, content_of
from formats.errors import FormatError
from formats.gguf.cursor import ONE, Cursor
from formats.tensor import TensorInfo

VERSIONS = (2, 3)
MAGIC = b"GGUF"
FIXED = Struct("<4sIQQ")
# The largest release has about 2,000 tensors, 60 keys, and arrays of 248,320 strings.
MAX_TENSORS = 1 << 16
MAX_PAIRS = 1 << 16
MAX_ITEMS = 1 << 20
MAX_KEY = (1 << 16) - 1
MAX_NAME = 63
MAX_SIZE = 1 << 40
MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class Kv:
    """One pair of the metadata. `kind` is "uint32", "string", "array[int32]" and so on."""

    key: str
    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class Span:
    """An array that was stepped over: the kind of its items, how many, where the first one is."""

    item: str
    count: int
    start: int


class Metadata(Mapping[str, Kv]):
    """Pairs by key. Arrays are decoded each time they are asked for: opening costs no vocabulary.

    FormatError where an array holds text that is not UTF-8, or a bool that is neither 0 nor 1.
    """

    def __init__(self, file: str, header: bytes, entries: dict[str, Kv | Span]) -> None:
        self._file = file
        self._header = header
        self._entries = entries

    def __getitem__(self, key: str) -> Kv:
        entry = self._entries[key]
        if isinstance(entry, Kv):
            return entry
        cursor = Cursor(self._file, memoryview(self._header), entry.start)
        return Kv(key, f"array[{entry.item}]", cursor.items(entry.item, entry.count, key))

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class Head:
    """What a header says; `offsets` are the tensors' from the start of the data, `length` its own.

    Neither offsets nor sizes are checked here: that takes the size of the file.
    """

    version: int
    kv: Metadata
    infos: dict[str, TensorInfo]
    offsets: list[int]
    length: int


def parse_header(file: str, view: memoryview) -> Head:
    """Read the header at the start of `view`; `file` is its name in errors.

    FormatError names the file, the key or tensor, what stands there and what was expected.
    """
    cursor = Cursor(file, view)
    magic, version, tensors, pairs = FIXED.unpack_from(view, cursor.take(FIXED.size, "the header"))
    _check_start(file, bytes(view[:FIRST]), magic, version)
    for what, count, most in (("keys", pairs, MAX_PAIRS), ("tensors", tensors, MAX_TENSORS)):
        if count > most:
            cursor.fail("the header", f"promises {count} {what}, expected at most {most}")
    entries: dict[str, Kv | Span] = {}
    for i in range(pairs):
        key = cursor.name(f"key {i}", MAX_KEY)
        if key in entries:
            cursor.fail(key, "is duplicated, expected once")
        entries[key] = _pair(cursor, key)
    infos, offsets = _read_tensors(cursor, tensors)
    kv = Metadata(file, bytes(view[: cursor.position]), entries)
    return Head(version, kv, infos, offsets, cursor.position)


def _pair(cursor: Cursor, key: str) -> Kv | Span:
    """Return what is under a key; arrays are stepped over."""
    kind = cursor.kind(key)
    if kind == "array":
        return _span(cursor, key)
    if kind == "string":
        return Kv(key, kind, cursor.text(cursor.integer("uint64", key), key))
    return Kv(key, kind, cursor.items(kind, 1, key)[0])


def _span(cursor: Cursor, key: str) -> Span:
    item = cursor.kind(key)
    if item == "array":
        cursor.fail(key, "is an array of arrays, expected an array of scalars or strings")
    count = cursor.integer("uint64", key)
    if count > MAX_ITEMS:
        cursor.fail(key, f"has {count} items, expected at most {MAX_ITEMS}")
    start = cursor.position
    if item == "string":
        cursor.skip_strings(count, key)
    else:
        cursor.take(count * ONE[item].size, key)
    return Span(item, count, start)


def _check_start(file: str, first: bytes, magic: bytes, version: int) -> None:
    if magic != MAGIC:
        content = content_of(first)
        why = f"\n  why   it {content.what}" if content else ""
        raise FormatError(
            f"{file} starts with {magic!r}, expected b'GGUF'{why}",
            fix=content.fix if content else "",
        )
    if version & 0xFFFF == 0:
        raise FormatError(f"{file} is a big-endian GGUF file, expected a little-endian one")
    if version not in VERSIONS:
        raise FormatError(f"{file} is GGUF version {version}, expected 2 or 3")


def _read_tensors(cursor: Cursor, count: int) -> tuple[dict[str, TensorInfo], list[int]]:
    from gguf import GGML_QUANT_SIZES

    types = {int(kind): kind.name for kind in GGML_QUANT_SIZES}
    infos: dict[str, TensorInfo] = {}
    offsets = []
    for i in range(count):
        name = cursor.name(f"tensor {i}", MAX_NAME)
        if name in infos:
            cursor.fail(name, "is duplicated, expected once")
        shape = _shape(cursor, name)
        number = cursor.integer("uint32", name)
        if number not in types:
            known = ", ".join(f"{n} {types[n]}" for n in sorted(types))
            cursor.fail(name, f"has tensor type {number}, expected one of {known}")
        infos[name] = TensorInfo(name, types[number], shape)
        offsets.append(cursor.integer("uint64", name))
    return infos, offsets


def _shape(cursor: Cursor, name: str) -> tuple[int, ...]:
    dims = cursor.integer("uint32", name)
    if dims > MAX_DIMS:
        cursor.fail(name, f"has {dims} dimensions, expected at most {MAX_DIMS}")
    sizes = [cursor.integer("uint64", name) for _ in range(dims)]
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        cursor.fail(name, f"has sizes {sizes}, expected 1 to {MAX_SIZE}")
    return tuple(reversed(sizes))
