"""Plain YAML: values, and where each of them stands.

    values, places = load_yaml(text, "mine.yaml")
    places["quantize", "scale"].value          mine.yaml:3:10

Plain means without tags, anchors and aliases, no key twice, and not nested deeply: no short file
can grow without bound, and none runs code. What is not plain is a RecipeError with its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from qwen35_convert.errors import Mistake, Place, RecipeError

MAX_DEPTH = 16
# Without aliases no short file can grow without bound.
NOT_PLAIN = {
    yaml.TagToken: "a tag: write the plain value",
    yaml.AnchorToken: "an anchor: write the value out",
    yaml.AliasToken: "an alias: write the value out, or quote it if it is a glob",
}
ENDS = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
STARTS = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a key and its value stand; an entry of a list is its own key."""

    key: Place
    value: Place


Path = tuple[str, ...]
Places = dict[Path, Spot]


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader whose every error has a place."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            at = node.start_mark
            raise yaml.constructor.ConstructorError(None, None, str(error), at) from None


def load_yaml(text: str, name: str) -> tuple[Any, Places]:
    """Return the value of a document, and the place of every key and value in it.

    name  what places call the file, or the flag that the text comes from

    Raises RecipeError for what is not plain YAML.
    """
    value, places = _loaded(text, name)
    return deepcopy(value), dict(places)


@lru_cache(maxsize=64)  # a recipe of a few lines takes PyYAML three milliseconds
def _loaded(text: str, name: str) -> tuple[Any, Places]:
    loader = _PlainLoader("")
    try:
        _check_plain(text, name)
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        places = dict(_spots(node, name, ())) if node else {}
        return (loader.construct_document(node) if node else None), places
    except yaml.YAMLError as error:
        raise RecipeError.of([_mistake(error, text, name)]) from None
    finally:
        loader.dispose()


def _check_plain(text: str, name: str) -> None:
    """Refuse what is not plain before it is built; PyYAML's time grows with depth squared."""
    depth = 0
    for token in yaml.scan(text, Loader=_PlainLoader):
        depth += isinstance(token, STARTS)
        depth -= isinstance(token, ENDS)
        why = NOT_PLAIN.get(type(token))
        if depth > MAX_DEPTH:
            why = f"nested over {MAX_DEPTH} deep"
        if why:
            raise RecipeError.of([Mistake(f"not plain YAML: {why}", _place(token, name))])


def _spots(node: yaml.Node, name: str, path: Path) -> Iterator[tuple[Path, Spot]]:
    """Yield the path of every key and entry below a node, with its spot."""
    place = _place(node, name)
    if not path:
        yield path, Spot(place, place)
    if isinstance(node, yaml.SequenceNode):
        for i, entry in enumerate(node.value):
            inner = (*path, str(i))
            yield inner, Spot(_place(entry, name), _place(entry, name))
            yield from _spots(entry, name, inner)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise RecipeError.of([Mistake(f"duplicate key {key.value!r}", _place(key, name))])
            seen.add(key.value)
            inner = (*path, key.value)
            yield inner, Spot(_place(key, name), _place(value, name))
            yield from _spots(value, name, inner)


def _place(piece: yaml.Node | yaml.Token, name: str) -> Place:
    mark = piece.start_mark
    return Place(name, mark.line + 1, mark.column + 1)


def _mistake(error: yaml.YAMLError, text: str, name: str) -> Mistake:
    """Return what PyYAML says, with the place as every message has it."""
    if isinstance(error, yaml.reader.ReaderError):
        index = int(error.position)
        message = f"not YAML: the character {text[index]!r} is not allowed"
        return Mistake(message, place_of(text, index, name))
    assert isinstance(error, yaml.MarkedYAMLError), "PyYAML has no other errors"
    mark = error.problem_mark or error.context_mark
    parts = [part for part in (error.context, error.problem) if part]
    place = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name)
    return Mistake(f"not YAML: {', '.join(parts)}", place)


def place_of(text: str, index: int, name: str) -> Place:
    """Return the place of a character."""
    before = text[:index]
    return Place(name, before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)
