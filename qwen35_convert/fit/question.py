"""What a table of sensitivities is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen35_convert.text.tokens import DEFAULT

CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Question:
    """What to measure: the text, the number of chunks of 512 tokens, the forms.

    forms  ggml types or schemes as recipes name them; none: the usual ones of the recipe's format
    """

    text: str = DEFAULT
    chunks: int = CHUNKS
    forms: Sequence[str] = ()


USUAL = Question()
