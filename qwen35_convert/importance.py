"""The importance of every column, read from llama.cpp's imatrix file for the encoders that search.

A file has one vector for a tensor, or one for each expert of a stack, under GGUF names. What it
lacks is encoded without, and said: llama-quantize says nothing, and MTP blocks are often lacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_convert.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35_convert.gguf_plan import Part


def read_importance(
    recipe: Recipe, parts: Sequence[Part]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the weights of columns by atom, and notes on what the file lacks; nothing without one.

    RecipeError if the file cannot be read or does not fit the model.
    """
    if recipe.quantize.imatrix is None:
        return {}, ()
    raise NotImplementedError(Path(recipe.quantize.imatrix), parts, RecipeError)
