"""A model in several GGUF files: what they are called, and what each says of the others.

Source: ggml's `gguf-split`. Trap: only the first file holds the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from formats.errors import FormatError
from formats.gguf.file import GgufFile
from formats.gguf.header import Kv

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def split_name(stem: str, index: int, count: int) -> str:
    """Return the name of one file of a split model; `index` counts from 1.

    >>> split_name("model", 1, 3)
    'model-00001-of-00003.gguf'
    """
    assert 1 <= index <= count <= 99_999, f"file {index} of {count}"
    return f"{stem}-{index:05d}-of-{count:05d}.gguf"


def split_pairs(index: int, count: int, tensors: int) -> list[Kv]:
    """Return what file `index` (from 1) of `count` says of the split; `tensors` are all files'."""
    return [
        Kv("split.no", "uint16", index - 1),
        Kv("split.count", "uint16", count),
        Kv("split.tensors.count", "int32", tensors),
    ]


def files_of(path: Path) -> list[Path]:
    """Return every file of a model from any one of them, in order. FormatError if one is missing.

    What the headers say of the split is checked by `open_files`.
    """
    match = SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, index, count = match[1], int(match[2]), int(match[3])
    if not 1 <= index <= count:
        raise FormatError(f"{path.name} is file {index} of {count}, expected 1 to {count}")
    names = [split_name(stem, i, count) for i in range(1, count + 1)]
    present = {file.name for file in path.parent.iterdir() if file.is_file()}
    missing = [name for name in names if name not in present]
    if missing:
        raise FormatError(
            f"{path.name}: {missing[0]} is missing ({len(missing)} of {count} files are)",
            fix="download it too, into the same folder",
        )
    return [path.with_name(name) for name in names]


def open_files(path: Path) -> list[GgufFile]:
    """Open every file of a model, the one with the metadata first.

    FormatError if a header and a name disagree about the split, if the tensors are not as many as
    promised, or if one stands in two files.
    """
    files = [GgufFile(file) for file in files_of(path)]
    total = sum(len(file.infos) for file in files)
    seen: dict[str, str] = {}
    for index, file in enumerate(files, 1):
        _check_split(file, split_pairs(index, len(files), total), alone=len(files) == 1)
        for name in file.infos:
            if name in seen:
                raise FormatError(f"{file.path.name}: {name} is in {seen[name]} too")
            seen[name] = file.path.name
    return files


def _check_split(file: GgufFile, pairs: Sequence[Kv], *, alone: bool) -> None:
    for pair in pairs:
        own = file.kv.get(pair.key)
        if own is None and alone:
            continue
        if own is None or own.value != pair.value:
            got = "missing" if own is None else repr(own.value)
            raise FormatError(f"{file.path.name}: {pair.key} is {got}, expected {pair.value}")
