"""Ids of special tokens that the embedding has no row for: engines fail on one, or never stop.

An end of text beyond the vocabulary is never generated; a pad token there is refused by torch, and
an image's placeholder is looked up out of bounds. A source that is a GGUF file is not judged by it.

Source: transformers' `Qwen3_5TextModel` (`nn.Embedding` of vocab_size rows and pad_token_id).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config_fields import ORIGIN
from formats.side_names import CONFIG, GENERATION
from qwen35_convert.planning.side_kinds import MEND, OF_WHOLE, TOKENS


def check_ids(source: Checkpoint) -> None:
    """Raise FormatError for the id of a special token from the number of rows on."""
    config, rows = source.config, source.config.sizes["V"]
    if config.origin != ORIGIN:
        return
    for name, field, value in stated_ids(source):
        ids = value if isinstance(value, list) else [value]
        beyond = [one for one in ids if type(one) is int and one >= rows]
        if beyond:
            expected = f"an id below {rows} ({config.fields['V']})"
            raise FormatError(name, f"{field} is {value!r:.120}", expected, MEND)


def stated_ids(source: Checkpoint) -> Iterator[tuple[str, str, Any]]:
    """Yield (file, field, value) of each; tokens of images only where there is a vision tower."""
    from pydantic_core import from_json

    config, content = source.config, source.side(GENERATION)
    prefix = "text_config." if config.nested else ""
    generation = {} if content is None else from_json(content, cache_strings="none")
    whole = TOKENS | (OF_WHOLE if config.vision is not None else {})
    parts: tuple[tuple[str, str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        (CONFIG, prefix, config.text, TOKENS),
        (CONFIG, "", config.raw, whole),
        (GENERATION, "", generation, TOKENS),
    )
    for name, where, part, fields in parts:
        for field in fields:
            yield name, where + field, part.get(field)
