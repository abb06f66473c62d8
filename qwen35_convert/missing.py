"""What a machine lacks: a GPU, an optional extra."""

from __future__ import annotations


class MissingError(ValueError):
    """The machine lacks what was asked for; `left` says what is on the disk now."""

    def __init__(self, message: str, left: str = "nothing was written") -> None:
        super().__init__(message)
        self.left = left
