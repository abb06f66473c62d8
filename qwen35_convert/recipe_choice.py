"""Which recipe a caller means: a name, a file, a `Recipe`, a scheme, or none.

Recipes are loaded when one is read: a command that is refused before needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_convert.containers.registry import container_for
from qwen35_convert.errors import RecipeError

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint
    from qwen35_convert.recipe import Recipe


def named_recipe(recipe: str | Path | Recipe | None, overrides: Sequence[str]) -> Recipe | None:
    """Return the recipe with overrides (KEY=VALUE) applied; None if none is named."""
    if recipe is None:
        return None
    from qwen35_convert.recipe import Recipe, build_recipe, read_recipe

    if isinstance(recipe, Recipe):
        return build_recipe(recipe.model_dump(mode="json"), overrides) if overrides else recipe
    return read_recipe(recipe, overrides)


def default_recipe(
    source: Checkpoint, overrides: Sequence[str] = (), *, out: str | Path = ""
) -> Recipe:
    """Return the recipe that is used when none is named.

    A GGUF file gets gguf-q8_0, a folder fp8-block; a folder made from quantised weights gets
    bf16-split, because they are quantised a second time only on request.
    """
    from qwen35_convert.recipe import read_recipe

    again = bool(source.layout.quantized)
    return read_recipe(container_for(Path(out)).default_recipe(again=again), overrides)


def quantize_recipe(scheme: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of `quantize`: names and layout stay as they are.

    RecipeError for a scheme that is not known, or that only files of `convert` have.
    """
    from qwen35_convert.recipe import build_recipe

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
    from qwen35_convert.recipe_files import bundled_recipes

    recipe = f"gguf-{scheme.lower().replace('-', '_')}"
    if scheme not in SCHEMES and recipe in bundled_recipes():
        fix = f"qwen35 convert SOURCE -o NAME.gguf --recipe {recipe}"
        raise RecipeError(
            f"scheme {scheme!r}", "is a type of GGUF files", "a scheme of folders", fix
        )
