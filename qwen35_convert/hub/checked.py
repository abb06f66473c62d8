"""Downloaded files, each held to the size and the hash that the hub lists."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from qwen35_convert.errors import FetchError
from qwen35_convert.hub.files import Entry, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Files = dict[str, tuple[int, str]]


def check_file(path: Path, entry: Entry, *, ours: bool) -> tuple[int, str]:
    """Return (size, sha256); a wrong file is refused, and removed if it is `ours`."""
    sha256, wrong = measure(path, entry)
    if wrong is None:
        return entry.size, sha256
    remedy = f"it was there before this run: delete {path.resolve()} and run again"
    if ours:
        path.resolve().unlink(missing_ok=True)  # in the cache, `path` is a link to this
        path.unlink(missing_ok=True)
        remedy = "that download was removed: run again"
    raise FetchError(f"{path.name} is not what the hub lists", *wrong, remedy)


def check_files(entries: Mapping[str, Entry], get: Callable[[str], tuple[Path, bool]]) -> Files:
    """Return (size, sha256) of each file; one is hashed while the next is downloaded."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing frees the GIL
        checks = {}
        for name, entry in entries.items():
            path, ours = get(name)
            checks[name] = pool.submit(check_file, path, entry, ours=ours)
        return {name: check.result() for name, check in checks.items()}
