"""What a machine lacks: a GPU, an optional extra."""

from __future__ import annotations


class MissingError(ValueError):
    """The machine lacks what was asked for: a GPU, an optional extra."""
