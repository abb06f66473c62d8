"""A source with the chat template of its recipe, in place of every template that it has.

Readers look in different places, so the recipe's is written where all look first, and taken away
from where some look besides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from formats.chat_template import FIELD
from formats.checkpoint import Checkpoint
from formats.json_file import parse_object
from formats.safetensors.nested import TEMPLATES
from formats.side_names import LEGACY_TEMPLATE, PROCESSOR, TEMPLATE, TOKENIZER_CONFIG
from qwen35_convert.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class _Dressed(Mapping[str, bytes]):
    """Side files with some replaced; None: taken away."""

    sides: Mapping[str, bytes]
    instead: Mapping[str, bytes | None]

    def __getitem__(self, name: str) -> bytes:
        content = self.instead[name] if name in self.instead else self.sides[name]
        if content is None:
            raise KeyError(name)
        return content

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys((*self.sides, *self.instead))
        return (name for name in names if self.instead.get(name, b"") is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def dressed(source: Checkpoint, recipe: Recipe) -> Checkpoint:
    """Return the source as its recipe wants it to look."""
    template = recipe.export.chat_template
    if template is None:
        return source
    instead: dict[str, bytes | None] = {TEMPLATE: template.encode(), LEGACY_TEMPLATE: None}
    for name in source.sides:
        if PurePosixPath(name).parent.name == TEMPLATES:
            instead[name] = None
    for name in (TOKENIZER_CONFIG, PROCESSOR):
        content = source.side(name)
        fields = {} if content is None else parse_object(content, name)
        if FIELD in fields:
            kept = {key: value for key, value in fields.items() if key != FIELD}
            instead[name] = json.dumps(kept, indent=2, ensure_ascii=False).encode()
    return replace(source, sides=_Dressed(source.sides, instead))
