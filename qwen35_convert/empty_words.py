"""Empty words of a command line, as an unset variable of a shell leaves: `--against "$SOURCE"`.

Without this, an empty path is the current folder, and an empty `--against` compares with nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from qwen35_convert.errors import RecipeError
from qwen35_convert.home import PROMPT

ASSIGNED = re.compile(r"(--[a-z0-9-]+)=$")


def check_words(words: Sequence[str]) -> None:
    """Raise RecipeError for an empty word, and for `--option=`; a prompt is text."""
    for before, word in pairwise(["", *words]):
        assigned = ASSIGNED.match(word)
        option = assigned[1] if assigned else before if before.startswith("-") else "an argument"
        if (assigned or not word) and PROMPT not in (option, before):
            raise RecipeError(option, "is empty", "a value: is a variable of the shell unset?")
