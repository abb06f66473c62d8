"""The chat templates of a checkpoint, as transformers chooses them from the files that hold some.

    1  chat_template.jinja, and additional_chat_templates/NAME.jinja
    2  tokenizer_config.json: chat_template, a text or a list of {name, template}
    3  chat_template.json: chat_template

The first that has any is the whole answer. The default template is named `default`.

Source: transformers 5.24, `PreTrainedTokenizerBase._from_pretrained`. Traps: a null hides nothing;
llama.cpp's converter lets the second win over the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from formats.errors import FormatError
from formats.safetensors.nested import TEMPLATES
from formats.side_names import LEGACY_TEMPLATE, TEMPLATE, TOKENIZER_CONFIG

DEFAULT, FIELD = "default", "chat_template"
Sides = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Templates by name, and where each is written."""

    texts: Mapping[str, str]
    where: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def default(self) -> str | None:
        """The template that is used where none is named."""
        return self.texts.get(DEFAULT)


def read_templates(sides: Sides) -> ChatTemplates:
    """Return the templates that count. FormatError for what is no text, or is listed wrongly."""
    places = [(name, dict(read(sides))) for name, read in PLACES]
    stated = [(name, texts) for name, texts in places if texts]
    if not stated:
        return ChatTemplates({}, {})
    (place, texts), *others = stated
    notes = (
        f"{name} has another chat template than {place}, which is used, as transformers does"
        for name, other in others
        if other != texts
    )
    where = {name: _file(place, name) for name in texts}
    return ChatTemplates(texts, where, tuple(notes))


def has_places(text: str) -> bool:
    """Whether a template may say something of a prompt; an empty one says nothing at all."""
    return not text.strip() or "{{" in text or "{%" in text


def template_file(name: str) -> str:
    """Return the file of a template by its name."""
    return TEMPLATE if name == DEFAULT else f"{TEMPLATES}/{name}.jinja"


def _file(place: str, name: str) -> str:
    return template_file(name) if place == TEMPLATE else place


def _in_files(sides: Sides) -> Iterator[tuple[str, str]]:
    for file in sides:
        path = PurePosixPath(file)
        if file == TEMPLATE:
            yield DEFAULT, _text(sides, file)
        elif path.parent.name == TEMPLATES:
            yield path.stem, _text(sides, file)


def _text(sides: Sides, file: str) -> str:
    try:
        return sides[file].decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{file} is not UTF-8: {error.reason}") from None


def _in_field(file: str) -> Callable[[Sides], Iterator[tuple[str, str]]]:
    def read(sides: Sides) -> Iterator[tuple[str, str]]:
        content = sides.get(file)
        try:
            stated = {} if content is None else json.loads(content)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{file} is not JSON: {error}") from None
        value = stated.get(FIELD) if isinstance(stated, dict) else None
        yield from _of_value(value, f"{file}: {FIELD}")

    return read


def _of_value(value: object, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield DEFAULT, value
    elif isinstance(value, list):
        yield from _listed(value, where)
    elif isinstance(value, dict):
        yield from _listed([{"name": n, "template": text} for n, text in value.items()], where)
    elif value is not None:
        raise FormatError(f"{where} is {type(value).__name__}, expected text or a list")


def _listed(entries: Sequence[object], where: str) -> Iterator[tuple[str, str]]:
    seen = set()
    for entry in entries:
        given = entry if isinstance(entry, dict) else {}
        name, text = given.get("name"), given.get("template")
        if not (isinstance(name, str) and name and isinstance(text, str)):
            raise FormatError(f"{where} holds {entry!r:.120}, expected a name and a template")
        if name in seen:
            raise FormatError(f"{where} has two templates named {name!r:.120}")
        seen.add(name)
        yield name, text


PLACES: tuple[tuple[str, Callable[[Sides], Iterator[tuple[str, str]]]], ...] = (
    (TEMPLATE, _in_files),
    (TOKENIZER_CONFIG, _in_field(TOKENIZER_CONFIG)),
    (LEGACY_TEMPLATE, _in_field(LEGACY_TEMPLATE)),
)
