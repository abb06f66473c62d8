"""What the parts of a model weigh in each form that they may have, from headers alone.

    source, recipe -> plan -> units, which have one form each -> bytes of a unit in each form

A unit is a tensor of a GGUF file (the experts of a projection are one), or the weights of a folder
that engines load with one scheme. Sizes are those of the tensors: of a GGUF file with the zeros
that align them, so that they sum up to the file's. What a rule of the recipe decides stays so, what
a mix keeps in F32, and the MTP head is as the recipe has it: no KL of the model's says what these
may lose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

from formats.checkpoint import Checkpoint
from formats.family.roles import ROLES, VISION
from formats.gguf.file import ALIGNMENT
from formats.stored import KEEP
from formats.tensor import DTYPE_BYTES
from quant.fourbit import ggml_nvfp4 as nvfp4
from quant.ggml import kinds
from quant.ggml_types import ggml_type
from quant.registry import get_scheme, unknown
from quant.scheme import Scheme
from qwen35_convert.containers.registry import expect
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.recipe.parts import FORMATS
from qwen35_convert.recipe.recipe import Recipe, build_recipe

EXPERT = re.compile(r"\.experts\.\d+\.")
RULED = "rule "
MTP = "mtp."
F32 = "f32"
FITTED = "fit"


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that get one form.

    name      of the tensor, or of the fused group
    matches   globs over our names that match these weights and no others: those of a recipe's rules
    elements  of all of them
    sizes     bytes by form, of the forms that they may have: ggml types, or schemes and `keep`
    items     of the plan, one for each weight
    planned   the form that the recipe gives it
    """

    name: str
    role: str
    matches: tuple[str, ...]
    elements: int
    sizes: Mapping[str, int]
    items: tuple[Item, ...] = ()
    planned: str = ""


class Costs(Protocol):
    """What a form costs, as a measurement predicts it."""

    def cost(self, unit: Unit, form: str) -> float | None:
        """Return the mean KL in nats that storing a unit so adds; None: that is not known."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """The units that have a choice, and the bytes of all else.

    held  what a mix gives the MTP head beside them, as rules: it would give it other types where
          rules decide all else
    """

    recipe: Recipe
    units: tuple[Unit, ...]
    rest: int
    held: tuple[tuple[str, str], ...] = ()

    @property
    def smallest(self) -> int:
        """Return the bytes with the smallest form of each unit."""
        return self.rest + sum(min(unit.sizes.values()) for unit in self.units)

    def total(self, chosen: Mapping[str, str]) -> int:
        """Return the bytes of an artifact in which each unit, by name, has this form."""
        return self.rest + sum(unit.sizes[chosen[unit.name]] for unit in self.units)

    def recipe_of(self, chosen: Mapping[str, str]) -> Recipe:
        """Return the recipe that gives each unit this form; the rules that it has come first."""
        values = self.recipe.model_dump(mode="json")
        rules = [
            {"match": match, "scheme": chosen[unit.name]}
            for unit in self.units
            for match in unit.matches
        ]
        rules += [{"match": match, "scheme": form} for match, form in self.held]
        values["name"] = FITTED
        values["quantize"]["rules"] = [*values["quantize"]["rules"], *rules]
        return build_recipe(values)


def sizes_of(source: Checkpoint, recipe: Recipe, out: Path, forms: Sequence[str]) -> Sizes:
    """Return what each unit of a source weighs in each of these forms that it may have.

    out    OUT of the conversion, which decides what kind of artifact it is
    forms  ggml types as recipes name them, or schemes and `keep`

    Raises what planning raises, and QuantError for a form that is not known.
    """
    plan = expect(source, recipe, out)
    is_file = FORMATS[plan.container].mixes
    _check_known(forms, is_file=is_file)
    groups = _groups(plan, _tensor_of if is_file else _group_of, recipe)
    sizer = _file_sizes if is_file else _folder_sizes
    stored = {name: info.nbytes for name, info in plan.tensors.items()}
    units, held = [], 0
    for name, items in groups.items():
        sizes = dict(sizer(items, forms, recipe))
        if sizes:
            matches = dict.fromkeys(EXPERT.sub(".experts.*.", item.atom.name) for item in items)
            elements = sum(_elements(item) for item in items)
            role, planned = items[0].atom.role, items[0].scheme.name
            every = tuple(items)
            units.append(Unit(name, role, tuple(matches), elements, sizes, every, planned))
            held += _held(stored, items, padded=is_file)
    rest = (plan.nbytes if is_file else sum(stored.values())) - held
    return Sizes(recipe, tuple(units), rest, _held_by_mix(plan) if is_file else ())


def _held_by_mix(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return the types of the MTP head's matrices, by globs, as far as no rule names them."""
    return tuple({
        EXPERT.sub(".experts.*.", item.atom.name): item.scheme.name
        for item in plan.items
        if item.atom.name.startswith(MTP)
        and not item.reason.startswith(RULED)
        and not ROLES[item.atom.role].gguf_f32
    }.items())  # fmt: skip


def _check_known(forms: Iterable[str], *, is_file: bool) -> None:
    for form in forms:
        if is_file and form.upper() not in kinds.WRITABLE:
            raise unknown("type", form, [name.lower() for name in kinds.WRITABLE])
        if not is_file and form != KEEP:
            get_scheme(form)


def _groups(plan: Plan, key: Callable[[Item], str], recipe: Recipe) -> dict[str, list[Item]]:
    """Gather the items that must have one form; see the module's head for those left out."""
    groups: dict[str, list[Item]] = {}
    for item in plan.items:
        exact = item.scheme.name == F32 != recipe.quantize.scheme
        beside = exact or item.atom.role == VISION or item.atom.name.startswith(MTP)
        if not beside and not item.reason.startswith(RULED):
            groups.setdefault(key(item), []).append(item)
    return groups


def _tensor_of(item: Item) -> str:
    return item.outputs[0].name


def _group_of(item: Item) -> str:
    return item.atom.group or item.atom.name


def _elements(item: Item) -> int:
    return prod(item.atom.shape)


def _file_sizes(
    items: Sequence[Item], forms: Sequence[str], recipe: Recipe
) -> Iterator[tuple[str, int]]:
    """Yield the bytes of a tensor in each type that it may have."""
    role, (rows, *rest) = ROLES[items[0].atom.role], items[0].atom.shape
    if role.gguf_f32 or len(items[0].atom.shape) != 2:
        return
    shape = (rows, *rest) if len(items) == 1 else (len(items), rows, *rest)
    for form in forms:
        name = form.upper()
        fits = kinds.fallback(name, shape[-1]) == name
        if fits and role.gguf_takes(name) and name != nvfp4.TYPE:  # not every tensor may have that
            parts = scheme_of_form(form, recipe).parts(items[0].outputs[0].name, shape)
            yield form, sum(_padded(part.info.nbytes) for part in parts)


def _folder_sizes(
    items: Sequence[Item], forms: Sequence[str], recipe: Recipe
) -> Iterator[tuple[str, int]]:
    """Yield the bytes of a fused group in each scheme that all of its weights take."""
    if not all(ROLES[item.atom.role].linear for item in items):
        return
    for form in forms:
        if form == KEEP:
            yield form, sum(_elements(i) * DTYPE_BYTES[i.atom.dtype] for i in items)
            continue
        scheme = scheme_of_form(form, recipe)
        if not any(scheme.refuses(item.atom.shape) for item in items):
            parts = (p for item in items for p in scheme.parts(item.atom.name, item.atom.shape))
            yield form, sum(part.info.nbytes for part in parts)


def scheme_of_form(form: str, recipe: Recipe) -> Scheme:
    """Return how a form stores a weight: a ggml type, or a scheme other than `keep`."""
    if FORMATS[recipe.export.format].mixes:
        return ggml_type(form.upper())
    return get_scheme(form, recipe.quantize.choices).beside_others()


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _held(stored: Mapping[str, int], items: Sequence[Item], *, padded: bool) -> int:
    """Return the bytes that a unit has in the plan."""
    sizes = [stored[name] for name in {out.name for item in items for out in item.outputs}]
    return sum(map(_padded, sizes) if padded else sizes)
