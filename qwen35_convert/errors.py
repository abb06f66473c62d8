"""The errors of commands; those of files, numbers and requests are in the packages below."""

from __future__ import annotations

from formats.errors import LACKING, MISUSED, OUTPUT, FormatError, Qwen35Error

__all__ = ["FetchError", "FormatError", "MissingError", "OutputError", "Qwen35Error", "RecipeError"]


class RecipeError(Qwen35Error):
    """The recipe or an option is invalid, or asks for something impossible."""

    exit_code = MISUSED


class FetchError(Qwen35Error):
    """The checkpoint cannot be fetched, or what came differs from what the hub lists."""

    def __str__(self) -> str:
        lines = (self.subject, f"got       {self.got}", f"expected  {self.expected}")
        return "\n  ".join((*lines, f"fix       {self.fix}"))


class OutputError(Qwen35Error):
    """OUT cannot be written, or must not be replaced."""

    exit_code = OUTPUT


class MissingError(Qwen35Error):
    """The machine lacks something: a GPU, an optional extra, a cluster."""

    exit_code = LACKING
