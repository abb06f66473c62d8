"""What is to be compared: recipes to convert by, and artifacts that are there.

Everything that can be refused is refused before a byte of weights is read: a recipe that the source
does not allow, an artifact of another model, two of one name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.errors import FormatError, Qwen35Error
from qwen35_convert.containers.registry import CONTAINERS, container_of, open_checkpoint
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.levels import LOGITS
from qwen35_convert.planned import plan_conversion
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.verification.diagnose import wrong_source
from qwen35_convert.verification.levels import Level, check_measurable
from qwen35_convert.verification.logits import LogitsCheck


@dataclass(frozen=True, slots=True)
class Candidate:
    """One artifact to be: by a recipe, or at a path where it is already."""

    name: str
    path: Path
    recipe: Recipe | None = None


def named_candidates(
    recipes: Sequence[Recipe], artifacts: Sequence[Path], folder: Path
) -> list[Candidate]:
    """Return candidates under names of their own.

    folder  where the recipes' artifacts will be

    RecipeError if there is nothing to compare, or something is given twice.
    """
    made = [Candidate(one.name, _place(folder, one), one) for one in recipes]
    known = Counter([one.name for one in made] + [path.resolve().name for path in artifacts])
    there = [
        Candidate(name if known[name] == 1 else str(path), path)
        for path in artifacts
        for name in [path.resolve().name]
    ]
    every = [*made, *there]
    names = Counter(one.name for one in every)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise RecipeError(", ".join(twice), "is given twice", "each recipe and artifact once")
    if not every:
        raise RecipeError("compare", "has nothing to compare", "recipes or artifacts")
    return every


def _place(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{Path(recipe.name).name}{CONTAINERS[recipe.export.format].ending}"


def check_candidates(
    candidates: Sequence[Candidate], source: Checkpoint, check: LogitsCheck
) -> None:
    """Refuse what cannot be converted or measured. RecipeError, FormatError, OutputError."""
    check_measurable(Level(LOGITS), check, source)
    for one in candidates:
        if one.recipe is None:
            _check_model(one, source)
            continue
        if one.path.exists():
            raise OutputError(f"{one.path} exists", fix="compare it as an artifact, or remove it")
        check_measurable(Level(LOGITS), check, source, only=one.recipe.only)
        try:
            plan_conversion(source, one.recipe, one.path)
        except Qwen35Error as error:
            if "--set" in error.fix:
                error.fix += f" (compare takes no --set: write a recipe that extends {one.name})"
            raise


def _check_model(one: Candidate, source: Checkpoint) -> None:
    """Refuse an artifact of another model, one that does not run here, and the source itself.

    FormatError, RecipeError.
    """
    from runtime.kernels.attention.frequencies import check_rope

    artifact = open_checkpoint(one.path)
    whole, original = (container_of(side).whole(side).resolve() for side in (artifact, source))
    if whole == original:
        raise RecipeError(str(one.path), "is the source itself", "artifacts made from it")
    other = wrong_source(artifact, source)
    if other is not None:
        raise FormatError(str(one.path), f"belongs to another model: {other.problem}")
    try:
        check_rope(artifact.config.rope)
    except FormatError as error:
        error.subject = f"{one.path}: {error.subject}"
        raise
