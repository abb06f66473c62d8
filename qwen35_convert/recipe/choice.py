"""Which recipe a caller means: a name, a file, a `Recipe`, or a scheme.

Recipes are loaded when one is read: a command that is refused before needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_convert.errors import RecipeError

if TYPE_CHECKING:
    from qwen35_convert.recipe.recipe import Recipe


def named_recipe(recipe: str | Path | Recipe | None, overrides: Sequence[str]) -> Recipe | None:
    """Return the recipe with overrides (KEY=VALUE) applied; None if none is named."""
    if recipe is None:
        return None
    from qwen35_convert.recipe.recipe import Recipe, build_recipe, read_recipe

    if isinstance(recipe, Recipe):
        return build_recipe(recipe.model_dump(mode="json"), overrides) if overrides else recipe
    return read_recipe(recipe, overrides)


def quantize_recipe(scheme: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of `quantize`: names and layout stay as they are.

    RecipeError for a scheme that is not known, or that only files of `convert` have.
    """
    from qwen35_convert.recipe.recipe import build_recipe

    _refuse_types(scheme)
    return build_recipe(
        {
            "name": "quantize",
            "layout": "same",
            "experts": "same",
            "mtp": "keep",
            "vision": "keep",
            "quantize": {"scheme": scheme},
        },
        overrides,
    )


def _refuse_types(scheme: str) -> None:
    """Refuse GGUF's types, which llama-quantize takes by these names. RecipeError."""
    from quant.registry import SCHEMES
    from qwen35_convert.recipe.files import bundled_recipes

    recipe = f"gguf-{scheme.lower().replace('-', '_')}"
    if scheme not in SCHEMES and recipe in bundled_recipes():
        fix = f"qwen35 convert SOURCE -o NAME.gguf --recipe {recipe}"
        raise RecipeError(
            f"scheme {scheme!r}", "is a type of GGUF files", "a scheme of folders", fix
        )
