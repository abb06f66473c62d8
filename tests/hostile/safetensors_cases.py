"""Hostile safetensors files: lengths, JSON, entries, offsets, types; each in a whole checkpoint."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.case import (
    TARGET,
    WEIGHTS,
    Case,
    Harm,
    harm_entry,
    harm_file,
    harm_header,
    hole,
    read_file,
    replace,
    with_header,
)

ONE = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
SHAPES: dict[str, Any] = {
    "negative": [-160, 96],
    "two-negatives": [-160, -96],
    "zero": [0, 96],
    "huge": [1 << 62, 96],
    "over-64-bits": [1 << 70, 1],
    "wraps-to-right": [(1 << 63) + 160, 96, 2],
    "float": [160.0, 96],
    "nan-word": ["NaN", 96],
    "boolean": [True, 15360],
    "null": None,
    "number": 15360,
    "text": "160,96",
    "nested": [[160, 96]],
    "object": {"0": 160},
    "swapped": [96, 160],
    "flat": [15360],
    "scalar": [],
    "many": [1] * 9,
    "very-many": [1] * 100_000,
    "trailing-one": [160, 96, 1],
    "one-row-short": [159, 96],
    "one-row-long": [161, 96],
    "huge-product": [1 << 40] * 8,
}
DTYPES: dict[str, Any] = {
    "unknown": "F33",
    "lower": "bf16",
    "empty": "",
    "null": None,
    "list": ["BF16"],
    "number": 16,
    "object": {},
    "half-the-bytes": "U8",
    "twice-the-bytes": "F32",
    "same-bytes-integer": "I16",
    "same-bytes-unsigned": "U16",
    "complex": "C64",
    "four-bits": "F4",
    "long": "B" * 10_000,
    "escape": "\x1b[2J",
    "surrogate": "\ud800",
}
OFFSETS: dict[str, Any] = {
    "negative": [-1, 30719],
    "backwards": [30720, 0],
    "empty": [0, 0],
    "huge": [0, 1 << 63],
    "over-64-bits": [1 << 64, (1 << 64) + 30720],
    "float": [0.0, 30720.0],
    "one": [0],
    "three": [0, 1, 2],
    "null": None,
    "text": "0,30720",
    "boolean": [False, True],
    "none": [],
    "past-the-end": [1 << 30, (1 << 30) + 30720],
    "nested": [[0], [1]],
    "object": {"0": 1},
}
TEXTS = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "number": b"7",
    "text": b'"x"',
    "open": b"{",
    "cut": b'{"a":{"dtype":',
    "trailing": b"{} {}",
    "comma": b"{" + ONE + b",}",
    "single-quotes": b"{'a':1}",
    "nan": b'{"a":NaN}',
    "infinity": b'{"a":-Infinity}',
    "1e400": b'{"a":1e400}',
    "long-number": b'{"a":' + b"9" * 100_000 + b"}",
    "utf-16": "{}".encode("utf-16"),
    "bom": b"\xef\xbb\xbf{}",
    "bad-utf-8": b'{"\xff\xfe":1}',
    "overlong-utf-8": b'{"\xc0\xaf":1}',
    "nul": b'{"a\x00":1}',
    "lone-surrogate": b'{"\\ud800":1}',
    "deep-lists": b'{"a":' + b"[" * 500_000,
    "deep-objects": b'{"a":' * 200_000,
    "twice": b"{" + ONE + b"," + ONE + b"}",
    "field-twice": b'{"a":{"dtype":"U8","dtype":"U8"}}',
    "twice-by-escape": b'{"ab":1,"\\u0061b":1}',
    "metadata-list": b'{"__metadata__":[1]}',
    "metadata-numbers": b'{"__metadata__":{"a":1}}',
    "metadata-text": b'{"__metadata__":"x"}',
    "metadata-nested": b'{"__metadata__":{"a":{"b":"c"}}}',
    "spaces": b" " * 100_000,
    "pickle": b"\x80\x04\x95",
    "zip": b"PK\x03\x04" + bytes(100),
    "entry-null": b'{"a":null}',
    "entry-list": b'{"a":[]}',
    "entry-number": b'{"a":5}',
    "entry-empty": b'{"a":{}}',
    "name-empty": b'{"":' + ONE[4:] + b"}",
    "name-newline": b'{"\\n":' + ONE[4:] + b"}",
    "name-escape": b'{"\\u001b[31m":' + ONE[4:] + b"}",
    "name-path": b'{"../../x":' + ONE[4:] + b"}",
    "name-right-to-left": b'{"\\u202egnp.exe":' + ONE[4:] + b"}",
    "name-long": b'{"' + b"x" * 1_000_000 + b'":' + ONE[4:] + b"}",
}
LENGTHS = {
    "one-over": lambda size: size - 7,
    "over-100-mb": lambda _: 100_000_001,
    "4-gib": lambda _: 1 << 32,
    "negative": lambda _: (1 << 64) - 1,
    "2-63": lambda _: 1 << 63,
    "zero": lambda _: 0,
    "one": lambda _: 1,
    "half": lambda size: size // 2,
}


def cases() -> Iterator[Case]:
    """Yield every case of this kind."""
    for field, table in (("shape", SHAPES), ("dtype", DTYPES), ("data_offsets", OFFSETS)):
        for name, value in table.items():
            yield Case("safetensors", f"{field}-{name}", harm_entry(**{field: value}))
    for name, text in TEXTS.items():
        content = with_header(text, b"\0" if ONE[4:] in text else b"")
        yield Case("safetensors", f"header-{name}", harm_file(WEIGHTS, content))
    for name, length in LENGTHS.items():
        yield Case("safetensors", f"length-{name}", _says_length(length))
    yield from _files()
    yield from _entries()
    yield from _large()


def _says_length(length: Any) -> Harm:
    def harm(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        replace(folder / WEIGHTS, struct.pack("<Q", length(len(content))) + content[8:])

    return harm


def _files() -> Iterator[Case]:
    whole = "safetensors"
    for nbytes in (0, 1, 7, 8, 9):
        yield Case(whole, f"file-of-{nbytes}", harm_file(WEIGHTS, bytes(nbytes)))
    for name, cut in (("one-missing", -1), ("half-missing", None), ("header-only", 0)):
        yield Case(whole, f"data-{name}", _cut(cut))
    yield Case(whole, "data-one-too-many", _grown(1))
    yield Case(whole, "data-a-gib-too-many", _grown(1 << 30))
    yield Case(whole, "is-a-folder", _as_folder)
    yield Case(whole, "is-a-fifo", _as_fifo)
    yield Case(whole, "stray-is-a-fifo", _stray_fifo)
    yield Case(whole, "named-fifo", _as_fifo, source=WEIGHTS)
    yield Case(whole, "is-absent", lambda folder: (folder / WEIGHTS).unlink())
    yield Case(whole, "only-a-pickle", _only_pickle)


def _cut(nbytes: int | None) -> Harm:
    def harm(folder: Path) -> None:
        header, data = read_file(folder / WEIGHTS)
        kept = data[: len(data) // 2] if nbytes is None else data[:nbytes]
        replace(folder / WEIGHTS, with_header(json.dumps(header).encode(), kept))

    return harm


def _grown(nbytes: int) -> Harm:
    def harm(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        hole(folder / WEIGHTS, len(content) + nbytes, content)

    return harm


def _as_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def _as_fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def _stray_fifo(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    os.mkfifo(folder / "b.safetensors")


def _only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")


def _entries() -> Iterator[Case]:
    changes = {
        "missing": lambda h: h.pop(TARGET),
        "renamed": lambda h: h.update({TARGET + "x": h.pop(TARGET)}),
        "extra-field": lambda h: h[TARGET].update(stride=[96, 1]),
        "without-shape": lambda h: h[TARGET].pop("shape"),
        "without-dtype": lambda h: h[TARGET].pop("dtype"),
        "without-offsets": lambda h: h[TARGET].pop("data_offsets"),
        "two-share-bytes": lambda h: h.update({TARGET + "x": h[TARGET]}),
        "overlap-by-one": lambda h: h[TARGET]["data_offsets"].__setitem__(
            0, h[TARGET]["data_offsets"][0] - 1
        ),
        "swapped-with-another": _swap,
        "all-shifted": _shift,
        "empty-stub-with-bytes": lambda h: h.update({"s": _stub(0, 4)}),
        "a-stub-stands-for-a-weight": lambda h: h[TARGET].update(_stub(0, 0)),
        "unknown-tensor-of-no-bytes": lambda h: h.update(
            {"evil": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
        ),
    }
    for name, change in changes.items():
        yield Case("safetensors", f"entry-{name}", harm_header(change))


def _swap(header: dict[str, Any]) -> None:
    """Give two tensors of unlike sizes each other's bytes."""
    one, other = header[TARGET], header["model.norm.weight"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def _shift(header: dict[str, Any]) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]


def _stub(start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "", "shape": [], "data_offsets": [start, stop]}


def _large() -> Iterator[Case]:
    """Yield what is small to write and could be large to read."""

    def holes(folder: Path) -> None:
        hole(folder / WEIGHTS, 100_000_100, struct.pack("<Q", 100_000_001))

    yield Case("safetensors", "header-of-100-mb-and-one", holes)
    lists = b'{"a":[' + b"[]," * 4_000_000 + b"[]]}"
    objects = b'{"a":[' + b"{}," * 4_000_000 + b"{}]}"
    names = b"{" + b'"a":0,' * 4_000_000 + b"}"
    fewer = b"{" + b",".join(b'"%x":{}' % i for i in range(100_000)) + b"}"
    numbers = b'{"a":[' + b"0.5," * 4_000_000 + b"0]}"
    for name, text in (
        ("lists", lists),
        ("objects", objects),
        ("names", names),
        ("numbers", numbers),
        ("few-names", fewer),
    ):
        content = with_header(text)
        yield Case(
            "safetensors",
            f"header-of-millions-of-{name}",
            harm_file(WEIGHTS, content),
            memory=3 * len(content) + (64 << 20),
        )
