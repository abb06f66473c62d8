"""A command line that is wrong, as typer finds it: its message, with one guess or an example."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer

COMMANDS = re.compile(r"Did you mean ('[^']*')[^?]*\?")
EXAMPLE = re.compile(r"Example: .*", re.DOTALL)


def show_misuse(error: typer.TyperException) -> str:
    """Print usage and message on stderr; return the message."""
    shown: Any = error
    guesses = getattr(error, "possibilities", None)
    if guesses:  # of an option, the nearest first
        shown.message = f"{error.message}. Did you mean '{guesses[0]}'?"
        shown.possibilities = None
    shown.message = COMMANDS.sub(r"Did you mean \1?", shown.message)
    shown.show()
    if "Did you mean" not in shown.message:
        sys.stderr.write(_example(error))
    return error.format_message()


def _example(error: typer.TyperException) -> str:
    """Return the example of the command, where its words are too few, too many or not its own."""
    if isinstance(error, typer.BadParameter) and error.message:  # a value is wrong
        return ""
    context = getattr(error, "ctx", None)
    found = EXAMPLE.search((context and context.command.help) or "")
    return " ".join(found[0].split()) + "\n" if found else ""
