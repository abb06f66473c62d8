"""Every mistake of a recipe that can be told without a checkpoint, each with its place.

Wrong keys and values are found together; what they hide (a key that contradicts another, a scheme
that is not known, a rule that no model of the family has a weight for) once they are set aside.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from formats.family.roles import ROLES
from formats.family.rules import RULES
from formats.stored import KEEP
from quant.errors import QuantError
from quant.ggml import kinds
from quant.mix.choose import FILE_TYPES
from quant.registry import get_scheme, unknown
from qwen35_convert.errors import Mistake, Place, RecipeError, in_order
from qwen35_convert.plain_yaml import Path, Places
from qwen35_convert.recipe.files import find_recipe, read_written
from qwen35_convert.recipe.mistakes import about, is_conflict, mistake_of, spot_of
from qwen35_convert.recipe.parts import FORMATS
from qwen35_convert.recipe.recipe import Recipe

NUMBER, WORD = re.compile(r"\d+"), re.compile(r"\w+")
FORMAT = ("export", "format")
# Only some models have them, so a rule that also hits one is no mistake by itself.
SOMETIMES = ("mtp.", "visual.")
ONLY_MOE = ("router", "shared_expert_gate")


def check_recipe(name: str) -> list[Mistake]:
    """Return what is wrong with a recipe, in the order in which it is written."""
    try:
        path = find_recipe(name)
        written = read_written(path)
    except RecipeError as error:
        return list(error.mistakes) or [Mistake(error.without_fix(), Place("--check"))]
    values, places = copy.deepcopy(dict(written.values)), written.places
    recipe, mistakes = _valid_part(values, places)
    if recipe is not None:
        mistakes += _unusable(recipe, places)
    return in_order(mistakes)


def _valid_part(values: dict[str, Any], places: Places) -> tuple[Recipe | None, list[Mistake]]:
    """Return the recipe without what is wrong with it, and what that is.

    What contradicts a value that was taken away is not counted: it may fit what was meant. None if
    that is the format, by which schemes are judged.
    """
    mistakes: list[Mistake] = []
    gone: set[Path] = set()
    while True:
        try:
            recipe = Recipe.model_validate(values)
        except ValidationError as error:
            for one in error.errors():
                where = about(one)
                if not (is_conflict(one) and _mentions(one["msg"], gone)):
                    mistakes.append(mistake_of(one, places, Recipe))
                taken = _remove(values, where)
                gone |= {taken} if taken else set()
                if not any(where[: len(path)] == path for path in gone):
                    return None, mistakes
        else:
            return (None if FORMAT in gone else recipe), mistakes


def _mentions(message: str, gone: Collection[Path]) -> bool:
    return bool(set(WORD.findall(message)) & {where[-1] for where in gone})


def _remove(values: dict[str, Any], where: Path) -> Path | None:
    """Take a value away, of a list the whole; return what was taken, None if it is not there."""
    part: Any = values
    for end, segment in enumerate(where, 1):
        if not isinstance(part, dict) or segment not in part:
            return None
        if end == len(where) or not isinstance(part[segment], dict):
            del part[segment]
            return where[:end]
        part = part[segment]
    return None


def _unusable(recipe: Recipe, places: Places) -> Iterator[Mistake]:
    yield from _schemes(recipe, places)
    yield from _rules(recipe, places)
    yield from _files(recipe, places)


def _schemes(recipe: Recipe, places: Places) -> Iterator[Mistake]:
    """Yield schemes and types that are not known, or cannot be what the recipe makes of them."""
    where: tuple[str, ...] = ("quantize", "scheme")
    yield from _told(_scheme_error(recipe, recipe.quantize.scheme, whole=True), where, places)
    for i, rule in enumerate(recipe.quantize.rules):
        where = ("quantize", "rules", str(i), "scheme")
        yield from _told(_scheme_error(recipe, rule.scheme, whole=False), where, places)


def _scheme_error(recipe: Recipe, name: str, *, whole: bool) -> QuantError | None:
    """Return why a scheme cannot be; `whole`: that of the artifact, which a GGUF calls a mix."""
    if not FORMATS[recipe.export.format].mixes:
        try:
            if name != KEEP:
                get_scheme(name, recipe.quantize.choices)
        except QuantError as error:
            return error
        return None
    if whole:
        return None if name in FILE_TYPES else unknown("mix", name, FILE_TYPES)
    types = [dtype.lower() for dtype in kinds.WRITABLE]
    return None if name.lower() in types else unknown("type", name, types)


def _told(error: QuantError | None, where: tuple[str, ...], places: Places) -> Iterator[Mistake]:
    if error is not None:
        message = re.sub(r"\s+", " ", str(error))
        yield Mistake(f"{'.'.join(where)}: {message}", spot_of(where, places).value)


def _rules(recipe: Recipe, places: Places) -> Iterator[Mistake]:
    """Yield rules for no weight of the family, for protected ones, and those that come too late."""
    rules = recipe.quantize.rules
    names = {_plain(key.removesuffix(".weight")): rule.role for key, rule in RULES.items()}
    globs = [_plain(rule.match) for rule in rules]
    for i, rule in enumerate(rules):
        hits = {name: role for name, role in names.items() if fnmatchcase(name, globs[i])}
        why = ""
        if not hits:
            why = f"{rule.match!r} matches no weight of the family"
        elif rule.match in [earlier.match for earlier in rules[:i]]:
            why = f"{rule.match!r} decides nothing: an earlier rule has the same glob"
        else:
            earlier = globs[:i]
            taken = {n: r for n, r in hits.items() if not any(fnmatchcase(n, g) for g in earlier)}
            protected = _protected(taken, rule.scheme, recipe)
            why = f"{rule.match!r} gives {rule.scheme} to {protected}" if protected else ""
        if why:
            where = ("quantize", "rules", str(i), "match")
            yield Mistake(f"{'.'.join(where)}: {why}", spot_of(where, places).value)


def _plain(name: str) -> str:
    """Return a name or a glob with 0 for every number: layers differ by them."""
    return NUMBER.sub("0", name.replace("#", "0"))


def _protected(taken: Mapping[str, str], scheme: str, recipe: Recipe) -> str:
    """Return the protected weight that a rule must not quantise, if it hits one in every model."""
    if scheme == KEEP:
        return ""
    gguf = FORMATS[recipe.export.format].mixes
    refused = [
        name
        for name, role in taken.items()
        if (not ROLES[role].gguf_takes(scheme.upper()) if gguf else ROLES[role].protected)
    ]
    always = [name for name in refused if _always_there(name, taken[name])]
    if always or len(refused) == len(taken):
        first = next(iter(always or refused), "")
        return first and f"{first}, whose role {taken[first]} is protected"
    return ""


def _always_there(name: str, role: str) -> bool:
    return not name.startswith(SOMETIMES) and role not in ONLY_MOE


def _files(recipe: Recipe, places: Places) -> Iterator[Mistake]:
    """Yield files that the recipe names and that are not there."""
    named: dict[Path, str | None] = {("quantize", "imatrix"): recipe.quantize.imatrix}
    if recipe.quantize.calibrate is not None:
        named["quantize", "calibrate", "text"] = recipe.quantize.calibrate.file
    if recipe.verify.text != "default":
        named["verify", "text"] = recipe.verify.text
    for where, name in named.items():
        if name and not FilePath(name).is_file():
            message = f"{'.'.join(where)}: there is no file {name!r}"
            yield Mistake(message, spot_of(where, places).value)
