"""The text that calibrates: the first tokens of a file, in texts of 512, each run on its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe import Calibrate
from qwen35_convert.text.tokens import CHUNK, DEFAULT, chunked, text_ids, text_path

if TYPE_CHECKING:
    from torch import Tensor

KEY = "quantize.calibrate"


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids [T] of texts that are run on their own.

    name    of the file; `default`: the bundled text
    sha256  of the whole file
    """

    name: str
    sha256: str
    ids: list[Tensor]

    @property
    def tokens(self) -> int:
        """Return how many tokens there are."""
        return sum(len(ids) for ids in self.ids)


def read_texts(source: Checkpoint, asked: Calibrate) -> Texts:
    """Return the texts a recipe asks for, as the source's tokenizer cuts them.

    A file of fewer tokens than asked for is taken whole.

    RecipeError if the file cannot be read, or has less than one text; FormatError for a source
    without a tokenizer.
    """
    try:
        ids = text_ids(source, asked.text)
        content = text_path(asked.text).read_bytes()
    except RecipeError as error:
        raise RecipeError(f"{KEY}.{error}") from None
    least = min(asked.tokens, CHUNK)
    if len(ids) < least:
        got, expected = f"has {len(ids)} tokens", f"at least {least}"
        raise RecipeError(f"{KEY}.text {asked.text}", got, expected)
    name = DEFAULT if asked.text == DEFAULT else Path(asked.text).name
    digest = hashlib.sha256(content).hexdigest()
    return Texts(name, digest, chunked(ids[: asked.tokens]))
