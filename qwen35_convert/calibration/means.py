"""With what a calibration may be run."""

from __future__ import annotations

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import RunOptions
from qwen35_convert.recipe import Recipe


def check_means(source: Checkpoint, recipe: Recipe, options: RunOptions) -> None:
    """Refuse to calibrate on many machines, or a stream. RecipeError."""
    method = recipe.quantize.method
    if recipe.quantize.chosen_by is None:
        return
    if options.executor != "threads":
        raise RecipeError(
            f"quantize.method is {method}, which goes layer by layer, and executor is "
            f"{options.executor}",
            expected="threads",
        )
    if source.remote is not None:
        raise RecipeError(
            f"quantize.method is {method}, which reads each layer twice, and the source is a "
            "stream",
            fix="leave out --stream",
        )
