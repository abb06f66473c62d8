"""The errors of commands; those of files, numbers and requests stand on the floors below."""

from __future__ import annotations

from formats.errors import LACKING, MISUSED, OUTPUT, FormatError, Qwen35Error

__all__ = ["FetchError", "FormatError", "MissingError", "OutputError", "Qwen35Error", "RecipeError"]


class RecipeError(Qwen35Error):
    """The recipe or a flag asks for something that does not exist or cannot be."""

    exit_code = MISUSED


class FetchError(Qwen35Error):
    """The checkpoint cannot be had from the hub, or what came is not what the hub lists."""

    def __str__(self) -> str:
        lines = (self.subject, f"got       {self.got}", f"expected  {self.expected}")
        return "\n  ".join((*lines, f"do        {self.fix}"))


class OutputError(Qwen35Error):
    """OUT cannot be written, or must not be."""

    exit_code = OUTPUT


class MissingError(Qwen35Error):
    """The machine lacks what was asked for: a GPU, an optional extra."""

    exit_code = LACKING
