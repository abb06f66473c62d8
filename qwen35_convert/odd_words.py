"""Words of a command line that would be taken for something else.

--against "$SOURCE"   an unset variable of a shell leaves an empty word, which as a path is the
                      current folder, and as `--against` compares with nothing
-o model.gguf/        a folder by its slash, which a path does not keep: a file would be written
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from qwen35_convert.errors import RecipeError
from qwen35_convert.home import PROMPT

ASSIGNED = re.compile(r"(--[a-z0-9-]+)=$")
OUT = ("-o", "--out")
OUT_ASSIGNED = re.compile(r"(?:--out=|-o).*[^/]\.gguf/+", re.DOTALL)


def check_words(words: Sequence[str]) -> None:
    """Raise RecipeError for an empty word, `--option=`, and OUT.gguf/; a prompt is text."""
    for before, word in pairwise(["", *words]):
        assigned = ASSIGNED.match(word)
        option = assigned[1] if assigned else before if before.startswith("-") else "an argument"
        if (assigned or not word) and PROMPT not in (option, before):
            raise RecipeError(option, "is empty", "a value: is a variable of the shell unset?")
        out = f"--out={word}" if before in OUT else word
        if OUT_ASSIGNED.fullmatch(out) and before != PROMPT:
            raise RecipeError(OUT[0], f"is a folder, {word}", "a file .gguf, without the slash")
