"""A place in the header of a GGUF file, which nobody vouches for: numbers, names, strings, arrays.

    string  length u64, UTF-8

All is little-endian. Every length is held against what is left of the header before it is used.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

from formats.errors import FormatError

# Kinds of values in the order of their numbers, with struct's letters; a bool is one byte.
KINDS = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "float32": "f", "bool": "B", "string": "", "array": "", "uint64": "Q", "int64": "q",
    "float64": "d",
}  # fmt: skip
NAMES = tuple(KINDS)
ONE = {kind: struct.Struct("<" + letter) for kind, letter in KINDS.items()}


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
        name = self.text(length, subject)
        if not name.isprintable():
            self.fail(subject, f"is named {name!r}, expected printable characters")
        return name

    def kind(self, subject: str) -> str:
        """Return the name of a value type."""
        number = self.integer("uint32", subject)
        if number >= len(NAMES):
            self.fail(subject, f"has value type {number}, expected 0 to {len(NAMES) - 1}")
        return NAMES[number]

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

    def text(self, nbytes: int, subject: str) -> str:
        """Return so many bytes as text. FormatError if they are not UTF-8."""
        start = self.take(nbytes, subject)
        try:
            return str(self.view[start : self.position], "utf-8")
        except UnicodeDecodeError:
            self.fail(subject, f"has bytes that are not UTF-8 at byte {start}")

    def skip_strings(self, count: int, subject: str) -> None:
        """Step over so many strings: only their lengths are read."""
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
        """Return strings that `skip_strings` has passed over."""
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
