"""The side files of one checkpoint, each parsed once, when it is first asked for."""

from __future__ import annotations

from typing import Any

from formats.checkpoint import Checkpoint
from formats.json_file import parse_object


class Sides:
    """Contents by name; what is not there is None, or an object without fields."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._parsed: dict[str, dict[str, Any]] = {}

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return name in self.checkpoint.sides

    def content(self, name: str) -> bytes | None:
        """Return a file's bytes."""
        return self.checkpoint.side(name)

    def object(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; FormatError if it holds none."""
        if name not in self._parsed:
            content = self.content(name)
            self._parsed[name] = {} if content is None else parse_object(content, name)
        return self._parsed[name]
