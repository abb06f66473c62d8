"""The text that calibrates: the first tokens of a file, in texts of 512, each run on its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.side_names import TOKENIZER
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.parts import Calibrate
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.text.tokens import CHUNK, DEFAULT, chunked, text_ids, text_path

if TYPE_CHECKING:
    from torch import Tensor

KEY = "quantize.calibrate"


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that are run on their own.

    name    of the file; `default`: the bundled text
    sha256  of the whole file
    chunks  the tokens of each text
    """

    name: str
    sha256: str
    chunks: list[Sequence[int]]

    @property
    def ids(self) -> list[Tensor]:
        """Return the token ids [T] of each text; planning needs none, and loads no torch."""
        import torch

        return [torch.tensor(chunk) for chunk in self.chunks]

    @property
    def tokens(self) -> int:
        """Return how many tokens there are."""
        return sum(map(len, self.chunks))

    def as_dict(self) -> dict[str, Any]:
        """Return what a receipt says of the text."""
        return {"text": self.name, "text_sha256": self.sha256, "tokens": self.tokens}


def check_text(source: Checkpoint, recipe: Recipe) -> Texts | None:
    """Return the text of a recipe, None if it reads none; refuse what the source cannot be run on.

    RecipeError as for `read_texts`; FormatError, too, for tokens that the vocabulary has not, and
    for a rope that is not computed.
    """
    calibrate = recipe.quantize.calibrate
    if calibrate is None:
        return None
    from runtime.kernels.attention.frequencies import check_rope

    check_rope(source.config.rope)
    texts = read_texts(source, calibrate)
    largest, size = max(map(max, texts.chunks)), source.config.sizes["V"]
    if largest >= size:
        raise FormatError(f"{TOKENIZER} gives token {largest}, but the vocabulary has {size}")
    return texts


def text_at_hand(
    source: Checkpoint, asked: Calibrate, claimed: Mapping[str, Any] | None
) -> Texts | str:
    """Return the text that a receipt names, or why it cannot be used.

    claimed  what the receipt says of it; None: there is no receipt yet
    """
    try:
        texts = read_texts(source, asked)
    except (RecipeError, FormatError) as error:
        return f"the text is not available: {error}"
    if claimed is None or claimed.get("text_sha256") == texts.sha256:
        return texts
    return f"{asked.text} is not the text that calibrated (SHA-256 differs)"


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
