"""The journal of finished rows: what a later run need not do again.

First line: the plan's digest. Then the number of each row, appended only after the row's bytes are
on the disk. A torn last line is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


class Journal:
    """An append-only file; `done` holds the numbers of finished rows."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        self.done: set[int] = set()

    def resume(self) -> bool:
        """Read what an earlier run finished. False: there is none, or it had another plan."""
        if not self._path.is_file():
            return False
        first, *lines = self._path.read_text().split("\n")
        if first != self._digest:
            return False
        self.done = {int(line) for line in lines[:-1]}
        return True

    def start(self) -> None:
        """Begin anew, or drop a torn last line."""
        self._path.write_text(self._digest + "\n" + _lines(self.done))

    def append(self, finished: Collection[int]) -> None:
        """Add rows whose bytes are durable."""
        with self._path.open("a") as file:
            file.write(_lines(finished))
            file.flush()
            os.fsync(file.fileno())
        self.done |= set(finished)


def _lines(rows: Collection[int]) -> str:
    return "".join(f"{row}\n" for row in sorted(rows))
