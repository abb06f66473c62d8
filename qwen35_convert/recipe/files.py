"""Recipes as files: the bundled ones, and what a file with `extends: NAME` adds to another.

    extends: fp8-block        # a bundled recipe, or a file in the same folder
    quantize: {scale: float32}

Sections are merged key by key; any other value, a list too, replaces the one below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.missing import near
from formats.nearest import guess
from qwen35_convert.errors import Mistake, Place, RecipeError

if TYPE_CHECKING:
    from qwen35_convert.plain_yaml import Places

MAX_RECIPE_BYTES = 64 << 10
EXTENDS = "extends"
FILES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Written:
    """What a recipe says in plain values, and where each of them stands."""

    values: Mapping[str, Any]
    places: Places = field(default_factory=dict)


def recipe_folder() -> Path:
    """Return where the bundled recipes are: inside the wheel, or at the checkout's root."""
    package = Path(__file__).parent.parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def bundled_recipes() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def bundled_path(name: str) -> Path:
    """Return the file of a bundled recipe."""
    return recipe_folder() / f"{name}.yaml"


def header(name: str) -> str:
    """Return the comment at the head of a bundled recipe: its use, its size, its error."""
    lines = bundled_path(name).read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def headline(name: str) -> str:
    """Return the first comment line of a bundled recipe: what it is for."""
    return header(name).split("\n", 1)[0]


def find_recipe(name: str) -> Path:
    """Return the path of a bundled recipe or of a file. RecipeError names the nearest."""
    bundled = bundled_recipes()
    if name in bundled:
        return bundled_path(name)
    path = Path(name)
    if _is_file(path):
        return path
    if path.suffix in FILES:
        beside = near(path)
        meant = f", did you mean {str(beside)!r}?" if beside else ""
        raise RecipeError(f"recipe {name!r} is neither bundled nor a file{meant}")
    raise RecipeError(
        f"recipe {name!r} is neither bundled nor a file"
        + guess(name, bundled)
        + f"\n  known {', '.join(bundled)}"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for any file
        return False


def read_written(path: Path) -> Written:
    """Return what a file says, over what the recipe says that it extends, and so on.

    RecipeError for a file that cannot be read, is not plain YAML, extends what is not there, or
    itself.
    """
    layers = [_read_file(path)]
    chain = [path]
    while EXTENDS in layers[-1].values:
        base = _base_of(layers[-1], chain[-1])
        if base.resolve() in [one.resolve() for one in chain]:
            names = " -> ".join(one.name for one in (*chain, base))
            raise RecipeError.of(
                [Mistake(f"extends goes round in a circle: {names}", _at(layers[-1]))]
            )
        chain.append(base)
        layers.append(_read_file(base))
    return _stacked(layers)


def _stacked(layers: list[Written]) -> Written:
    """Return the first layer over the second, and so on; only the first one's name counts."""
    *upper, last = layers
    values, places = dict(last.values), dict(last.places)
    if upper:
        values.pop("name", None)
    for layer in reversed(upper):
        over = {key: value for key, value in layer.values.items() if key != EXTENDS}
        if layer is not layers[0]:
            over.pop("name", None)
        values = _merged(values, over, places, ())
        places |= layer.places
    return Written(values, places)


def _merged(
    below: Mapping[str, Any], above: Mapping[str, Any], places: Places, path: tuple[str, ...]
) -> dict[str, Any]:
    """Return one mapping over another; the places of what is replaced are removed."""
    merged = dict(below)
    for key, value in above.items():
        inner = (*path, str(key))
        under = merged.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            merged[key] = _merged(under, value, places, inner)
            continue
        merged[key] = value
        for old in [place for place in places if place[: len(inner)] == inner]:
            del places[old]
    return merged


def _at(written: Written) -> Place:
    return written.places[(EXTENDS,)].value


def _base_of(written: Written, path: Path) -> Path:
    """Return the file that a recipe extends."""
    name = written.values[EXTENDS]
    bundled = bundled_recipes()
    if not isinstance(name, str):
        message = f"extends: expected a name, got {type(name).__name__}"
        raise RecipeError.of([Mistake(message, _at(written))])
    if name in bundled:
        return bundled_path(name)
    beside = path.parent / name
    if Path(name).name == name and _is_file(beside):
        return beside
    files = sorted(one.name for one in path.parent.glob("*.yaml") if one.name != path.name)
    message = f"extends: {name!r:.200} is neither a bundled recipe nor a file beside {path.name}"
    raise RecipeError.of([Mistake(message + guess(name, bundled + files), _at(written))])


def _read_file(path: Path) -> Written:
    from qwen35_convert.plain_yaml import load_yaml

    values, places = load_yaml(_text_of(path), str(path))
    if not isinstance(values, dict):
        message = f"expected keys and values, got {type(values).__name__}"
        raise RecipeError.of([Mistake(message, Place(str(path), 1, 1))])
    return Written(values, places)


def _text_of(path: Path) -> str:
    """Return the text of a file. RecipeError if it is too large, or not UTF-8."""
    from qwen35_convert.plain_yaml import place_of

    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= MAX_RECIPE_BYTES else b""
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise RecipeError.of([Mistake(message, Place(str(path)))]) from None
    if size > MAX_RECIPE_BYTES:
        message = f"has {size} bytes, over {MAX_RECIPE_BYTES}"
        raise RecipeError.of([Mistake(message, Place(str(path)))])
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        text = content[: error.start].decode("utf-8")
        place = place_of(text, len(text), str(path))
        raise RecipeError.of([Mistake(f"not UTF-8: {error.reason}", place)]) from None
