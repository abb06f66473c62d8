"""The errors of commands; those of files, numbers and requests are in the packages below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from formats.errors import INTERRUPTED, LACKING, MISUSED, OUTPUT, Qwen35Error


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file, line and column from 1; of a flag or of plain values only the name."""

    name: str = "recipe"
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.name, self.line, self.column) if part)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong with a recipe, and where it stands."""

    message: str
    place: Place = Place()

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON prints it; line and column are null where there are none."""
        place = self.place
        return {
            "file": place.name if place.line else None,
            "line": place.line,
            "column": place.column,
            "message": self.message,
        }


def in_order(mistakes: Iterable[Mistake]) -> list[Mistake]:
    """Return mistakes in the order in which they are written."""
    return sorted(mistakes, key=lambda one: (one.place.line or 0, one.place.column or 0))


class RecipeError(Qwen35Error):
    """The recipe or an option is invalid, or asks for something impossible.

    mistakes  each by itself, where they are known by their places
    """

    exit_code = MISUSED
    mistakes: Sequence[Mistake] = ()

    @classmethod
    def of(cls, mistakes: Sequence[Mistake]) -> RecipeError:
        """Return the error for these mistakes."""
        ordered = in_order(mistakes)
        error = cls("\n".join(map(str, ordered)))
        error.mistakes = ordered
        return error


class FetchError(Qwen35Error):
    """The checkpoint cannot be fetched, or what came differs from what the hub lists."""

    def __str__(self) -> str:
        lines = (self.subject, f"got       {self.got}", f"expected  {self.expected}")
        return "\n  ".join((*lines, f"fix       {self.fix}"))


class SaveError(FetchError):
    """What was requested cannot be saved: its folder is not writable, or its disk too small."""

    exit_code = OUTPUT


class OutputError(Qwen35Error):
    """OUT cannot be written, or must not be replaced."""

    exit_code = OUTPUT


class MissingError(Qwen35Error):
    """The machine lacks something: a GPU, an optional extra, a cluster."""

    exit_code = LACKING


class Interrupted(Qwen35Error):
    """Ctrl-C: what was finished is kept."""

    exit_code = INTERRUPTED

    def __init__(self) -> None:
        super().__init__("interrupted", left="run the same command again to resume")
