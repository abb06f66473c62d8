"""With what a text may be run through a source, layer by layer: on one machine, over files."""

from __future__ import annotations

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import THREADS, RunOptions
from qwen35_convert.planning.plan import Plan
from qwen35_convert.recipe.recipe import Recipe


def check_means(source: Checkpoint, recipe: Recipe, options: RunOptions) -> None:
    """Refuse a method that chooses codes on many machines, or from a stream. RecipeError."""
    method = recipe.quantize.method
    if recipe.quantize.chosen_by is None:
        return
    _check_executor(f"quantize.method is {method}", options)
    if source.remote is not None:
        raise RecipeError(
            f"quantize.method is {method}, which reads each layer twice, and the source is a "
            "stream",
            fix="leave out --stream",
        )


def check_inputs(plan: Plan, options: RunOptions) -> None:
    """Refuse scales of inputs, which a text gives, on many machines. RecipeError."""
    names = sorted({item.scheme.name for item in plan.items if item.scheme.static_inputs})
    if names:
        _check_executor(f"the scheme is {' and '.join(names)}", options)


def _check_executor(why: str, options: RunOptions) -> None:
    if options.executor != THREADS:
        got = f"{why}, which goes layer by layer, and executor is {options.executor}"
        raise RecipeError(got, expected=THREADS)
