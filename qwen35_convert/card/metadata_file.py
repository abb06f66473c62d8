"""`--metadata FILE`: what is to be said of a model in place of what its README.md says.

A JSON object whose keys are llama.cpp's, such as `general.license` and `general.tags`, with or
without `general.`; a recipe holds the same under `export.metadata`, with `_` for dots.
"""

from __future__ import annotations

import json
from pathlib import Path

from formats.errors import FormatError
from formats.json_file import read_object
from qwen35_convert.errors import RecipeError

MAX_TEMPLATE = 64 << 10


def metadata_override(path: Path) -> str:
    """Return the override of a recipe that a file of metadata is."""
    try:
        raw = read_object(path)
    except FormatError as error:
        raise RecipeError(f"--metadata: {error}") from None
    except OSError as error:
        raise RecipeError(f"--metadata: {path}: {error.strerror}") from None
    fields = {key.removeprefix("general.").replace(".", "_"): raw[key] for key in raw}
    return f"export.metadata={json.dumps(fields)}"


def template_override(path: Path) -> str:
    """Return the override of a recipe that a file with a chat template is."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--chat-template: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"--chat-template: {path} is not UTF-8: {error.reason}") from None
    if not text.strip():
        raise RecipeError(f"--chat-template: {path}", "is empty", "a Jinja template")
    if len(text) > MAX_TEMPLATE:
        got = f"has {len(text)} characters"
        raise RecipeError(f"--chat-template: {path}", got, f"at most {MAX_TEMPLATE}")
    return f"export.chat_template={json.dumps(text)}"
