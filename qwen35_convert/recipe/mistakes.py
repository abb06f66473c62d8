"""What pydantic finds wrong with a recipe, in our words and with the place of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from formats.nearest import guess
from qwen35_convert.errors import Mistake, Place
from qwen35_convert.plain_yaml import Path, Places, Spot
from qwen35_convert.recipe.files import EXTENDS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def explain(error: ValidationError, places: Places, model: type[BaseModel]) -> list[Mistake]:
    """Return each error of a recipe, `model`, in our words, with the place of what it is about."""
    return [mistake_of(one, places, model) for one in error.errors()]


def mistake_of(error: ErrorDetails, places: Places, model: type[BaseModel]) -> Mistake:
    """Return one error of a recipe in our words, with its place."""
    where = tuple(map(str, error["loc"]))
    spot = spot_of(about(error), places)
    if error["type"] == "extra_forbidden":
        return Mistake(_unknown_key(where, model), spot.key)
    got = "" if isinstance(error["input"], dict) else f" (got {_shown(error['input'])})"
    message = ": ".join([*([".".join(where)] if where else []), _reason(error)]) + got
    return Mistake(message, spot.value)


def is_conflict(error: ErrorDetails) -> bool:
    """Whether keys of a section contradict each other; each may be right."""
    return error["type"] == "value_error" and isinstance(error["input"], dict)


def about(error: ErrorDetails) -> Path:
    """Return the key an error is about; of keys in conflict it is the first that is named."""
    where = tuple(map(str, error["loc"]))
    return (*where, *_reason(error).split(" ", 1)[0].split(".")) if is_conflict(error) else where


def _reason(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _unknown_key(where: Sequence[str], model: type[BaseModel]) -> str:
    known = [*_section(model, where[:-1]).model_fields, *([] if where[1:] else [EXTENDS])]
    near = guess(where[-1], _elsewhere(where[-1], model)) or guess(where[-1], known)
    hint = near or f", expected one of {', '.join(known)}"
    return f"there is no key {'.'.join(where)!r}{hint}"


def _elsewhere(key: str, model: type[BaseModel]) -> list[str]:
    """Return where in a section a key of this name is."""
    sections = [(n, one) for n, f in model.model_fields.items() for one in _models(f.annotation)]
    return [f"{name}.{key}" for name, section in sections if key in section.model_fields]


def _section(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """Return the model of the section at a path."""
    for segment in path:
        if not segment.isdigit():
            model = next(_models(model.model_fields[segment].annotation))
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def spot_of(where: Sequence[str], places: Places) -> Spot:
    """Return the spot of a key, or of the innermost section around it that is written."""
    for end in range(len(where), -1, -1):
        if tuple(where[:end]) in places:
            return places[tuple(where[:end])]
    return Spot(Place(), Place())


def _shown(value: object) -> str:
    """Return the start of a value; Python refuses to print integers of over 4300 digits."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return "a number of thousands of digits"
