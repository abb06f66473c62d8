"""GitHub's workflow commands: errors and notes as annotations of a run, in their files and lines.

Source: docs.github.com, "Workflow commands for GitHub Actions". A step shows ten annotations of a
kind. Trap: any line of output that begins with `::` is a command, and names in a checkpoint are not
ours; text goes between `stop-commands` and a word that nobody else knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwen35_convert.errors import Mistake, Place

MOST = 10
NOWHERE = Place()


def annotation(level: str, title: str, message: str, place: Place = NOWHERE) -> str:
    """Return the command for one annotation; `level` is error, warning or notice."""
    properties = {"file": place.name, "line": place.line, "col": place.column} if place.line else {}
    properties["title"] = title
    listed = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items())
    return f"::{level} {listed}::{_data(message)}"


def of_mistakes(mistakes: Sequence[Mistake]) -> list[str]:
    """Return annotations for mistakes of a recipe, in its lines."""
    return several("error", [("recipe", one.message, one.place) for one in mistakes])


def several(level: str, entries: Sequence[tuple[str, str, Place]]) -> list[str]:
    """Return annotations of (title, message, place); the last says how many a step cannot show."""
    shown = [annotation(level, *entry) for entry in entries[:MOST]]
    if len(entries) > MOST:
        more = len(entries) - MOST + 1
        shown[-1] = annotation(level, "qwen35", f"and {more} more, which the log and --junit list")
    return shown


def fence() -> tuple[str, str]:
    """Return the lines before and after text in which nothing is a command."""
    import secrets

    word = secrets.token_hex(16)
    return f"::stop-commands::{word}", f"::{word}::"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
