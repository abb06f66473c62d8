"""`~` in a command line, where shells leave it: in quotes, after `=` and after `-o`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

PROMPT = "--prompt"  # the only words that are text
HOME = re.compile(r"(--[a-z0-9-]+=|[a-z_.]+=|-o)?~(?=/|$)")


def at_home(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the home folder for `~`.

    Without this, `--out=~/model` would write into a folder that is called `~`.
    """
    return [
        word if PROMPT in (before, word.partition("=")[0]) else _at_home(word)
        for before, word in pairwise(["", *words])
    ]


def _at_home(word: str) -> str:
    found = HOME.match(word)
    return word if found is None else f"{found[1] or ''}{Path.home()}{word[found.end() :]}"
