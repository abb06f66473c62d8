"""The front matter of a README.md: YAML between two lines of three dashes at its top.

Nothing is computed from it, so one that cannot be read is no error: it says nothing. Licences are
never guessed.

Source: the hub's model card specification; gguf-py's `Metadata.load_model_card` reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qwen35_convert.errors import RecipeError
from qwen35_convert.plain_yaml import load_yaml

README = "README.md"
BLOCK = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
NORWEGIAN = re.compile(r"(?m)^(- |language: )no\b(?=[ \t\r]*$)")  # which YAML 1.1 takes for false
MAX_BYTES, MAX_WORD, MAX_WORDS = 64 << 10, 300, 100


def read_front_matter(sides: Mapping[str, bytes]) -> dict[str, Any]:
    """Return what the README.md among side files says at its top, nothing if there is none."""
    text = sides[README].decode(errors="replace") if README in sides else ""
    block = BLOCK.match(text)
    if block is None or len(block[1]) > MAX_BYTES:
        return {}
    try:
        values, _ = load_yaml(NORWEGIAN.sub(r'\1"no"', block[1]), README)
    except RecipeError:
        return {}
    return values if isinstance(values, dict) else {}


def read_body(sides: Mapping[str, bytes]) -> str:
    """Return the README.md among side files without its front matter."""
    text = sides[README].decode(errors="replace") if README in sides else ""
    return BLOCK.sub("", text).strip("\r\n")


def word(values: Mapping[str, Any], key: str) -> str | None:
    """Return a field that is one line of text."""
    value = values.get(key)
    plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_WORD
    return value if plain else None


def words(values: Mapping[str, Any], *keys: str) -> list[str]:
    """Return the texts of fields, each of which is one or a list, each once."""
    texts: dict[str, None] = {}
    for key in keys:
        value = values.get(key)
        listed = value if isinstance(value, list) else [value]
        shown = (word({key: one}, key) for one in listed)
        texts |= {text: None for text in shown if text}
    return list(texts)[:MAX_WORDS]
