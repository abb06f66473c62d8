"""Fuzzing of safetensors headers: `python -m tests.fuzz.fuzz_safetensors --seconds 600`."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

from formats.errors import FormatError
from formats.safetensors.header import read_header
from formats.tensor import DTYPE_BYTES
from tests.fuzz.loop import main

FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "x.safetensors"
MODULES = ("formats.safetensors.file", "formats.json_file")
WORDS = (
    *(b'"%s"' % name.encode() for name in DTYPE_BYTES),
    b'"dtype":',
    b'"shape":',
    b'"data_offsets":',
    b'"__metadata__":',
    b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',
    b"[]",
    b"{}",
    b"null",
    b"true",
    b"1e400",
    b"NaN",
    b"-0",
    b"\\ud800",
    b"\xed\xa0\x80",
    b"[0,0]",
)


def TestOneInput(data: bytes) -> None:
    """Read a file; its ranges must fill it."""
    FILE.write_bytes(data)
    try:
        header = read_header(FILE)
    except FormatError:
        return
    ranges = sorted(header.ranges.values())
    assert header.infos.keys() == header.ranges.keys()
    assert all(
        info.nbytes == b - a
        for info, (a, b) in zip(header.infos.values(), header.ranges.values(), strict=True)
    )
    assert not ranges or ranges[-1][1] == len(data)
    assert all(a <= b == c for (a, b), (c, _) in pairwise(ranges))


if __name__ == "__main__":
    main("safetensors", MODULES, TestOneInput, WORDS)
