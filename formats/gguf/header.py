"""The header of a GGUF file, read from bytes that nobody vouches for.

    "GGUF"  version u32  tensors u64  pairs u64    all little-endian
    pair    key, type u32, value                   an array: type u32, count u64, values
    tensor  name, dims u32, sizes u64 (fastest first), type u32, offset u64 (from the data's start)
    string  length u64, UTF-8

Source: ggml's `gguf.h` and its reader. Every length is held against what is left of the header
before it is used, and every count has a limit, so a hostile file costs little. Trap: sizes run the
other way round than torch's shapes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from formats.content import FIRST, content_of
from formats.errors import FormatError
from formats.tensor import TensorInfo

# Kinds of values in the order of their numbers, with struct's letters; a bool is one byte.
KINDS = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "float32": "f", "bool": "B", "string": "", "array": "", "uint64": "Q", "int64": "q",
    "float64": "d",
}  # fmt: skip
NAMES = tuple(KINDS)
ONE = {kind: struct.Struct("<" + letter) for kind, letter in KINDS.items()}
VERSIONS = (2, 3)
MAGIC = b"GGUF"
FIXED = struct.Struct("<4sIQQ")
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


class Cursor:
    """A place in the header: no step passes the end, no length is used before it fits."""

    def __init__(self, file: str, view: memoryview, position: int = 0) -> None:
        self.file = file
        self.view = view
        self.position = position

    def fail(self, subject: str, reason: str) -> NoReturn:
        """Raise FormatError about this file."""
        raise FormatError(f"{self.file}: {subject} {reason}") from None

    def take(self, nbytes: int, subject: str) -> int:
        """Step over so many bytes and return where they start."""
        start, left = self.position, len(self.view) - self.position
        if nbytes > left:
            self.fail(subject, f"needs {nbytes} bytes at byte {start}, expected at most {left}")
        self.position = start + nbytes
        return start

    def integer(self, kind: str, subject: str) -> int:
        """Return a number of one of the integer kinds."""
        one = ONE[kind]
        return int(one.unpack_from(self.view, self.take(one.size, subject))[0])

    def name(self, subject: str, most: int) -> str:
        """Return a key or a tensor's name: printable, and of at most so many bytes."""
        length = self.integer("uint64", subject)
        if not 0 < length <= most:
            self.fail(subject, f"has a name of {length} bytes, expected 1 to {most}")
        name = self._text(length, subject)
        if not name.isprintable():
            self.fail(subject, f"is named {name!r}, expected printable characters")
        return name

    def kind(self, subject: str) -> str:
        """Return the name of a value type."""
        number = self.integer("uint32", subject)
        if number >= len(NAMES):
            self.fail(subject, f"has value type {number}, expected 0 to {len(NAMES) - 1}")
        return NAMES[number]

    def pair(self, key: str) -> Kv | Span:
        """Return what is under a key."""
        kind = self.kind(key)
        if kind == "array":
            return self._span(key)
        if kind == "string":
            return Kv(key, kind, self._text(self.integer("uint64", key), key))
        return Kv(key, kind, self.items(kind, 1, key)[0])

    def items(self, kind: str, count: int, subject: str) -> list[Any]:
        """Return so many values of one kind. FormatError for a bool or text that is neither."""
        if kind == "string":
            return self._strings(count, subject)
        start = self.take(count * ONE[kind].size, subject)
        values = list(struct.unpack_from(f"<{count}{KINDS[kind]}", self.view, start))
        if kind != "bool":
            return values
        odd = next((value for value in values if value > 1), None)
        if odd is not None:
            self.fail(subject, f"has the bool {odd}, expected 0 or 1")
        return [value == 1 for value in values]

    def _text(self, nbytes: int, subject: str) -> str:
        start = self.take(nbytes, subject)
        try:
            return str(self.view[start : self.position], "utf-8")
        except UnicodeDecodeError:
            self.fail(subject, f"has bytes that are not UTF-8 at byte {start}")

    def _span(self, subject: str) -> Span:
        item = self.kind(subject)
        if item == "array":
            self.fail(subject, "is an array of arrays, expected an array of scalars or strings")
        count = self.integer("uint64", subject)
        if count > MAX_ITEMS:
            self.fail(subject, f"has {count} items, expected at most {MAX_ITEMS}")
        start = self.position
        if item == "string":
            self._skip_strings(count, subject)
        else:
            self.take(count * ONE[item].size, subject)
        return Span(item, count, start)

    def _skip_strings(self, count: int, subject: str) -> None:
        read, view, position, end = ONE["uint64"].unpack_from, self.view, self.position, self.end
        for _ in range(count):
            if position > end - 8:
                position = end + 1
                break
            position += 8 + read(view, position)[0]
        if position > end:
            self.fail(subject, f"has {count} strings, expected them to end by byte {end}")
        self.position = position

    def _strings(self, count: int, subject: str) -> list[str]:
        """Return strings that `_skip_strings` has passed over."""
        read, view, position = ONE["uint64"].unpack_from, self.view, self.position
        values: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + read(view, position)[0]
                values.append(str(view[start:position], "utf-8"))
        except UnicodeDecodeError:
            self.fail(f"{subject}[{len(values)}]", "has bytes that are not UTF-8")
        self.position = position
        return values

    @property
    def end(self) -> int:
        """Where the header ends at the latest."""
        return len(self.view)


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
        entries[key] = cursor.pair(key)
    infos, offsets = _read_tensors(cursor, tensors)
    kv = Metadata(file, bytes(view[: cursor.position]), entries)
    return Head(version, kv, infos, offsets, cursor.position)


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
