"""How chat templates differ, in whichever of four files they stand, or in a folder of named ones.

The file chat_template.jinja has precedence for tokenizers, chat_template.json for processors,
fields of the configs for older engines: all of them must be the source's. Named ones may move
between the folder and the list of tokenizer_config.json, as transformers moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from formats.chat_template import read_templates
from formats.safetensors.nested import TEMPLATES
from formats.side_names import LEGACY_TEMPLATE, PROCESSOR, TEMPLATE, TOKENIZER_CONFIG
from qwen35_convert.containers.safetensors.sides.engine_files import OTHERS
from qwen35_convert.containers.safetensors.sides.reader import Sides
from qwen35_convert.difference import of_file

FIELD, DEFAULT = "chat_template", "default"
NAMED = f"{TEMPLATES}/*.jinja"
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


def named_differences(ours: Sides, theirs: Sides) -> Iterator[tuple[str, str]]:
    """Yield (file, problem) of named templates that tokenizers find, or no longer find."""
    got, expected = (read_templates(side.checkpoint.sides) for side in (ours, theirs))
    for name in expected.texts:
        if got.texts and name != DEFAULT and name not in got.texts:
            yield expected.where[name], f"the template {name!r} is missing: the source has it"
    for name, text in got.texts.items():
        where = got.where[name]
        if name == DEFAULT or where == TOKENIZER_CONFIG:
            continue  # judged where it stands
        other = expected.texts.get(name)
        if other is None or _rendered(text.encode()) != _rendered(other.encode()):
            odd = "is not in the source" if other is None else "is not the source's"
            yield where, f"{odd}, and {OTHERS[NAMED]}"


def _compare(name: str, ours: Sides, theirs: Sides) -> Iterator[str]:
    counted = read_templates(theirs.checkpoint.sides).texts
    known = [(file, _templates(theirs, file)) for file in EVERYWHERE]
    known.append((TEMPLATE, {which: text.encode() for which, text in counted.items()}))
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
