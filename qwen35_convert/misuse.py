"""A command line that is wrong, as typer finds it: its message, with one guess at most."""

from __future__ import annotations

import re
from typing import Any

import typer

COMMANDS = re.compile(r"Did you mean ('[^']*')[^?]*\?")


def show_misuse(error: typer.TyperException) -> str:
    """Print usage and message on stderr; return the message."""
    shown: Any = error
    guesses = getattr(error, "possibilities", None)
    if guesses:  # of an option, the nearest first
        shown.message = f"{error.message}. Did you mean '{guesses[0]}'?"
        shown.possibilities = None
    shown.message = COMMANDS.sub(r"Did you mean \1?", shown.message)
    shown.show()
    return error.format_message()
