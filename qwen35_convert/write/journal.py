"""The journal of finished rows: what a later run need not do again.

First line: the plan's digest. Then the number of each row, appended only after the row's bytes are
on the disk. A torn last line is ignored. The file appears whole, so a crash leaves either none or
one that says whose it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from qwen35_convert.write.sink import sync_folder, writing


class Journal:
    """An append-only file; `done` holds the numbers of finished rows."""

    def __init__(self, path: Path, digest: str, left: str = "nothing was written") -> None:
        self._path, self._digest, self._left = path, digest, left
        self.done: set[int] = set()

    def resume(self) -> bool:
        """Read what an earlier run finished. False: there is none, or it had another plan."""
        if not self._path.is_file():
            return False
        first, *lines = self._path.read_text(errors="replace").split("\n")
        if first != self._digest:
            return False
        self.done = {int(line) for line in lines[:-1] if line.isascii() and line.isdigit()}
        return True

    def forget(self) -> None:
        """Take nothing for finished."""
        self.done = set()

    def start(self) -> None:
        """Begin anew, or drop a torn last line."""
        new = self._path.with_name(f"{self._path.name}.new")
        with writing(self._path, "writing the journal", self._left):
            with new.open("w") as file:
                file.write(self._digest + "\n" + _lines(self.done))
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._path)
            sync_folder(self._path.parent)

    def append(self, finished: Collection[int]) -> None:
        """Add rows whose bytes are durable."""
        with writing(self._path, "writing the journal", self._left), self._path.open("a") as file:
            file.write(_lines(finished))
            file.flush()
            os.fsync(file.fileno())
        self.done |= set(finished)


def _lines(rows: Collection[int]) -> str:
    return "".join(f"{row}\n" for row in sorted(rows))
