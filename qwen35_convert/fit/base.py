"""The mix that a fit of a GGUF file starts from: our largest that is within the size.

A fit chooses the types of weights whose cost is known. All else, the MTP head above all, has the
types of a mix: the named one, or if none is named (`q8_0` is one type, no mix) the one that would
be taken at that size. So a fit spends on the model what the mix does, and never leaves it less.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.containers.registry import expect
from qwen35_convert.fit.goal import Goal
from qwen35_convert.recipe.parts import FORMATS
from qwen35_convert.recipe.recipe import Recipe, build_recipe

ONE_TYPE = "q8_0"
UNWEIGHTED = ("q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_s", "q2_k")
WEIGHTED = (*UNWEIGHTED[:-1], "iq3_xxs", "iq2_m", "iq2_xxs")


def base_of(source: Checkpoint, recipe: Recipe, goal: Goal, out: Path) -> Recipe:
    """Return the recipe with the mix to start from; the recipe itself if it names one.

    Raises what planning raises.
    """
    if not FORMATS[recipe.export.format].mixes or recipe.quantize.scheme != ONE_TYPE:
        return recipe
    based = recipe
    for based in _mixes(recipe):
        plan = expect(source, based, out)
        if plan.nbytes <= goal.budget(source, plan):
            break
    return based


def _mixes(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with each of our mixes, the largest first."""
    yield recipe
    for mix in WEIGHTED if recipe.quantize.imatrix else UNWEIGHTED:
        values = recipe.model_dump(mode="json")
        values["quantize"]["scheme"] = mix
        yield build_recipe(values)
