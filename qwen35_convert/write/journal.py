"""The journal of finished items, which a later run skips.

First line: the plan's digest. Then the number of each item, appended only after the item's bytes
are on the disk. A torn last line is ignored. The file appears whole, so a crash leaves either none
or one with a digest.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from qwen35_convert.durable import append_to_file, replace_file, writing


class Journal:
    """An append-only file; `done` holds the numbers of finished items."""

    def __init__(self, path: Path, digest: str, left: str = "nothing was written") -> None:
        self._path, self._digest, self._left = path, digest, left
        self.done: set[int] = set()

    def resume(self) -> bool:
        """Read what an earlier run finished; False if there is no journal of this plan."""
        if not self._path.is_file():
            return False
        first, *lines = self._path.read_text(errors="replace").split("\n")
        if first != self._digest:
            return False
        self.done = {int(line) for line in lines[:-1] if line.isascii() and line.isdigit()}
        return True

    def forget(self) -> None:
        """Forget all finished items."""
        self.done = set()

    def start(self) -> None:
        """Write the file afresh, without a torn last line."""
        new = self._path.with_name(f"{self._path.name}.new")
        with writing(self._path, "writing the journal", self._left):
            replace_file(self._path, f"{self._digest}\n".encode() + _lines(self.done), new)

    def append(self, finished: Collection[int]) -> None:
        """Add items whose bytes are durable."""
        with writing(self._path, "writing the journal", self._left):
            append_to_file(self._path, _lines(finished))
        self.done |= set(finished)


def _lines(items: Collection[int]) -> bytes:
    return "".join(f"{item}\n" for item in sorted(items)).encode()
