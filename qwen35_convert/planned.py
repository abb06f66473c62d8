"""What a conversion makes: every refusal of a source by a recipe, before there is an artifact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.calibration.memory import memory_note
from qwen35_convert.calibration.texts import Texts, check_text
from qwen35_convert.containers.registry import expect
from qwen35_convert.planning.lost_scales import check_scales
from qwen35_convert.planning.plan import Plan
from qwen35_convert.planning.shifted_norms import check_norms
from qwen35_convert.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the text that it reads."""

    plan: Plan
    texts: Texts | None


def plan_conversion(source: Checkpoint, recipe: Recipe, out: Path) -> Planned:
    """Return what a recipe makes of a source at OUT; of the weights norms and a few rows are read.

    FormatError for a source that cannot be converted, RecipeError for what the recipe may not ask.
    """
    plan = expect(source, recipe, out)
    check_norms(source)
    check_scales(source)
    texts = check_text(source, recipe)
    if texts is None:
        return Planned(plan, None)
    note = memory_note(plan, source, texts.tokens)
    return Planned(replace(plan, notes=(*plan.notes, note)), texts)
