"""The journal of finished rows: what a later run need not do again.

First line: the plan's digest. Then one line a row: its number and the error sums measured on it,
appended only after the row's bytes are on the disk. A torn last line is ignored.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from quant.measure import Error


class Journal:
    """An append-only file; `done` maps finished rows to their measured error (None: kept)."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        self.done: dict[int, Error | None] = {}

    def resume(self) -> bool:
        """Read what an earlier run finished. False: there is none, or it had another plan."""
        if not self._path.is_file():
            return False
        first, *lines = self._path.read_text().split("\n")
        if first != self._digest:
            return False
        for line in lines[:-1]:
            row, error = json.loads(line)
            self.done[row] = None if error is None else Error(**error)
        return True

    def start(self) -> None:
        """Begin anew, or drop a torn last line."""
        text = self._digest + "\n" + "".join(_line(r, e) for r, e in self.done.items())
        self._path.write_text(text)

    def append(self, finished: dict[int, Error | None]) -> None:
        """Add rows whose bytes are durable."""
        with self._path.open("a") as file:
            file.write("".join(_line(row, error) for row, error in finished.items()))
            file.flush()
            os.fsync(file.fileno())
        self.done |= finished


def _line(row: int, error: Error | None) -> str:
    return json.dumps([row, None if error is None else asdict(error)]) + "\n"
