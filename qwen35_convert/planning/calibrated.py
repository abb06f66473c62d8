"""Which weights of a plan a text calibrates: linears of the layers whose scheme takes it.

The head, and heads for several tokens beyond the first layer of one, see no input that is collected
layer by layer: they get the nearest codes, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from formats.family.layout import Atom
from formats.family.roles import ROLES
from quant.registry import SCHEMES
from quant.scheme import Scheme
from qwen35_convert.errors import RecipeError
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.recipe import Recipe
from qwen35_convert.recipe_parts import NEAREST

# What a walk through the layers runs: the text model's, and the first of the MTP head.
STAGE = re.compile(r"(layers\.\d+|mtp\.layers\.0)\.")
# Linears of a layer whose outputs are added to the residual stream: those of its mixer, and all.
MIXED = frozenset({"o_proj", "out_proj"})
STREAM = MIXED | {"down_proj"}
Written = tuple[Atom, Scheme]


def stage_of(name: str) -> str | None:
    """Return the layer of a weight, `layers.3` or `mtp.layers.0`; None: it is in none."""
    match = STAGE.match(name)
    return match[1] if match else None


def adds_to_stream(name: str) -> bool:
    """Return whether the outputs of a linear of a layer are added to the residual stream."""
    return name.rpartition(".")[2] in STREAM


def method_of(recipe: Recipe, atom: Atom, scheme: Scheme) -> str:
    """Return how the codes of a weight are found."""
    walked = ROLES[atom.role].linear and stage_of(atom.name) is not None
    return recipe.quantize.method if scheme.calibrated and walked else NEAREST


def stages(plan: Plan) -> dict[str, list[int]]:
    """Return the numbers of the calibrated items by layer, in the order of the layers."""
    by_stage: dict[str, list[int]] = {}
    for index, item in enumerate(plan.items):
        if method_of(plan.recipe, item.atom, item.scheme) != NEAREST:
            by_stage.setdefault(stage_of(item.atom.name) or "", []).append(index)
    return dict(sorted(by_stage.items(), key=lambda pair: stage_order(pair[0])))


def calibrated_names(items: Iterable[Item], recipe: Recipe) -> set[str]:
    """Return the names of the weights that are calibrated."""
    return {i.atom.name for i in items if method_of(recipe, i.atom, i.scheme) != NEAREST}


def check_calibrated(recipe: Recipe, written: Sequence[Written]) -> None:
    """Refuse a method that no weight of the plan takes, or for a part of a model. RecipeError."""
    method = recipe.quantize.method
    if method == NEAREST:
        return
    if recipe.only is not None:
        raise RecipeError(
            f"quantize.method is {method}, and only is {recipe.only!r}: inputs come from all the "
            "layers before, quantised",
            fix="leave out --only, or use --set quantize.method=nearest",
        )
    if all(method_of(recipe, atom, scheme) == NEAREST for atom, scheme in written):
        used = sorted({scheme.name for _, scheme in written if scheme.label is not None})
        able = [name for name, scheme in SCHEMES.items() if scheme.calibrated]
        raise RecipeError(
            "quantize.method",
            f"is {method}, but linears of layers have {', '.join(used) or 'no scheme'}",
            f"nearest, or a scheme that is calibrated: {', '.join(able)}",
        )


def calibration_notes(recipe: Recipe, written: Sequence[Written]) -> Iterator[str]:
    """Say what calibrates, and what it leaves out."""
    calibrate = recipe.quantize.chosen_by
    if calibrate is None:
        return
    text = "the bundled text" if calibrate.text == "default" else calibrate.text
    yield f"{recipe.quantize.method}: calibrated on the first {calibrate.tokens} tokens of {text}"
    left = [
        atom.name
        for atom, scheme in written
        if scheme.calibrated and method_of(recipe, atom, scheme) == NEAREST
    ]
    if left:
        more = f" and {len(left) - 1} more get" if left[1:] else " gets"
        yield f"{left[0]}{more} the nearest codes: inputs are collected in layers"


def stage_order(stage: str) -> tuple[bool, int]:
    """Return what sorts layers as they are run."""
    head, _, number = stage.rpartition(".")
    return head != "layers", int(number)
