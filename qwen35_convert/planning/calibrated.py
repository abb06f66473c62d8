"""Which weights of a plan a text calibrates: linears, embedding and head, by their schemes.

GPTQ begins with the embedding, since all layers run on it: by what reads its rows, and where it is
the head, too, by the inputs that the source's has. The input of another head is collected when all
layers have been run. Those of several tokens' heads beyond the first layer are not: these get the
nearest codes, and a note says so.
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
from qwen35_convert.recipe.parts import GPTQ, NEAREST
from qwen35_convert.recipe.recipe import Recipe

# What a walk through the layers runs: the text model's, and the first of the MTP head.
STAGE = re.compile(r"(layers\.\d+|mtp\.layers\.0)\.")
# Stages of their own, before the layers and after them.
EMBEDDING, HEAD = ENDS = ("embed_tokens", "lm_head")
# Linears of a layer whose outputs are added to the residual stream: those of its mixer, and all.
MIXED = frozenset({"o_proj", "out_proj"})
STREAM = MIXED | {"down_proj"}
Written = tuple[Atom, Scheme]


def stage_of(name: str) -> str | None:
    """Return what a weight is run with: `layers.3`, `mtp.layers.0`, an end; None: nothing."""
    match = STAGE.match(name)
    return match[1] if match else name if name in ENDS else None


def layer_of(stage: str) -> int | None:
    """Return the number of a stage that is a layer of the model; None: it is none."""
    head, _, number = stage.rpartition(".")
    return int(number) if head == "layers" else None


def adds_to_stream(name: str) -> bool:
    """Return whether the outputs of a linear of a layer are added to the residual stream."""
    return name.rpartition(".")[2] in STREAM


def method_of(recipe: Recipe, atom: Atom, scheme: Scheme) -> str:
    """Return how the codes of a weight are found."""
    method = recipe.quantize.method
    able = scheme.calibrated and _is_walked(atom)
    return method if able and (method == GPTQ or atom.name != EMBEDDING) else NEAREST


def _is_walked(atom: Atom) -> bool:
    """Whether it is known what errors of a weight come to."""
    role = ROLES[atom.role]
    return (role.linear or role.vocabulary) and stage_of(atom.name) is not None


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


def check_calibrated(
    recipe: Recipe, written: Sequence[Written], able: Sequence[str] | None = None
) -> None:
    """Refuse a method that no weight of the plan takes, or for a part of a model. RecipeError.

    able  schemes that take it; None: those of folders
    """
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
        raise RecipeError(
            "quantize.method",
            f"is {method}, but linears of layers have {', '.join(used) or 'no scheme'}",
            f"nearest, or a scheme that is calibrated: {', '.join(able or _able())}",
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
        yield f"{left[0]}{more} the nearest codes: no inputs of theirs are collected"


def _able() -> list[str]:
    return [name for name, scheme in SCHEMES.items() if scheme.calibrated]


def alone_notes(recipe: Recipe, written: Sequence[Written]) -> Iterator[str]:
    """Name the types of a GGUF file whose blocks are encoded alone, whatever the method."""
    if recipe.quantize.chosen_by is None:
        return
    alone = {
        scheme.name: atom.name
        for atom, scheme in reversed(written)
        if scheme.label is not None and not scheme.calibrated and _is_walked(atom)
    }
    for name, first in sorted(alone.items()):
        yield f"{name} ({first} ...) has no codes column by column: each block is encoded alone"


def stage_order(stage: str) -> tuple[int, int]:
    """Return what sorts stages as they are run."""
    layer = layer_of(stage)
    if layer is not None:
        return 1, layer
    return {EMBEDDING: 0, HEAD: 2}.get(stage, 3), 0
