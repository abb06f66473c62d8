"""How chat templates differ, in whichever of four files they stand.

The file chat_template.jinja has precedence for tokenizers, chat_template.json for processors,
fields of the configs for older engines: all of them must be the source's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from qwen35_convert.containers.safetensors.sides.reader import (
    LEGACY_TEMPLATE,
    PROCESSOR,
    TEMPLATE,
    TOKENIZER_CONFIG,
    Sides,
)
from qwen35_convert.difference import of_file

FIELD, DEFAULT = "chat_template", "default"
# Where tokenizers look, and then processors.
TOKENIZERS = (TEMPLATE, TOKENIZER_CONFIG)
EVERYWHERE = (*TOKENIZERS, LEGACY_TEMPLATE, PROCESSOR)
Templates = Mapping[str, bytes]


def template_of(name: str) -> Callable[[Sides, Sides], Iterator[str]]:
    """Return what compares the templates in a file with all that the source has."""
    return partial(_compare, name)


def has_template(sides: Sides, files: tuple[str, ...]) -> str | None:
    """Return which of the files has a template for a chat."""
    return next((name for name in files if DEFAULT in _templates(sides, name)), None)


def _compare(name: str, ours: Sides, theirs: Sides) -> Iterator[str]:
    known = [(file, _templates(theirs, file)) for file in EVERYWHERE]
    if not any(theirs.has(file) for file in EVERYWHERE):
        return
    for which, text in _templates(ours, name).items():
        expected = [templates[which] for _, templates in known if which in templates]
        if not expected:
            yield f"has a chat template ({which}), the source has none"
        elif _rendered(text) not in map(_rendered, expected):
            yield f"{FIELD}: {next(of_file(TEMPLATE, text, expected[0]))}"


def _templates(sides: Sides, name: str) -> Templates:
    """Return the templates in a file by name; most files have one."""
    if name == TEMPLATE:
        content = sides.content(name)
        return {} if content is None else {DEFAULT: content}
    return dict(_named(sides.object(name).get(FIELD)))


def _named(stated: Any) -> Iterator[tuple[str, bytes]]:
    if isinstance(stated, str):
        yield DEFAULT, stated.encode()
    elif isinstance(stated, dict):
        yield from ((k, text.encode()) for k, text in stated.items() if isinstance(text, str))
    elif isinstance(stated, list):
        for one in stated:
            if isinstance(one, dict) and isinstance(one.get("template"), str):
                yield str(one.get("name")), one["template"].encode()


def _rendered(template: bytes) -> bytes:
    """Return what Jinja sees: not the newline at the end of a file."""
    return template.removesuffix(b"\n")
