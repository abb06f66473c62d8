"""How the config.json of another tool differs from its source's in what engines obey.

A flat config and a nested one say the same in other places: what the text part of the one says is
looked for in the text part of the other, and then beside it. Fields at the root of a nested config
that speak of the text must say what its text part says, because engines differ in which they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config
from formats.json_file import parse_object
from formats.side_names import GENERATION, TOKENIZER_CONFIG
from qwen35_convert.containers.safetensors.config_rules import RULES
from qwen35_convert.containers.safetensors.config_table import (
    JUDGED_ELSEWHERE,
    MAY_COME,
    MAY_GO,
    MODEL,
    MOE_RECORDS,
    NEUTRAL,
    RECORDS,
    TOKENS,
    VISION,
    Values,
)
from qwen35_convert.difference import ABSENT, differences, first, rounded, same


@dataclass(frozen=True, slots=True)
class Pair:
    """One part of an artifact's config beside what the source says of it.

    prefix   of its fields: "text_config."
    ours     its fields
    theirs   those of the source, of whatever part
    needed   those fields of the source that this part must have
    table    what an absent field means
    skipped  fields that are not compared
    """

    prefix: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    needed: Mapping[str, Any]
    table: Mapping[str, Values]
    skipped: frozenset[str]


def config_sentences(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Yield every field that engines obey and that is not the source's, with got and expected."""
    for rule in RULES:
        yield from dict.fromkeys(rule(artifact, source))
    # a GGUF file holds one end of a text, which its converter chose among those of the side files
    chosen = frozenset(TOKENS) if source.container != artifact.container else frozenset()
    for pair in _pairs(artifact.config, source.config):
        needed = (key for key in pair.needed if key not in chosen)
        for key in dict.fromkeys((*needed, *pair.ours)):
            if key not in pair.skipped:
                yield from _field(pair, key, source)


def _pairs(ours: Config, theirs: Config) -> Iterator[Pair]:
    skipped = JUDGED_ELSEWHERE | RECORDS | (MOE_RECORDS if theirs.moe else frozenset())
    prefix = "text_config." if ours.nested else ""
    # where both speak of generation, transformers hears what stands beside the text part
    flat = {} if ours.nested else theirs.generation
    both = theirs.raw | theirs.text | flat
    yield Pair(prefix, ours.text, both, theirs.text | flat, MODEL, skipped)
    if ours.nested:
        needed = theirs.raw if theirs.nested else {}
        yield Pair("", ours.raw, theirs.text | theirs.raw, needed, MODEL, skipped)
    if ours.vision is not None:
        vision = theirs.vision or {}
        kept = RECORDS | {"dtype", "torch_dtype"}
        yield Pair("vision_config.", ours.vision, vision, vision, VISION, kept)


def _field(pair: Pair, key: str, source: Checkpoint) -> Iterator[str]:
    got, expected = pair.ours.get(key, ABSENT), pair.theirs.get(key, ABSENT)
    neutral = partial(_neutral, pair.table.get(key, NEUTRAL))
    if neutral(got) and (neutral(expected) or key in MAY_GO):
        return
    if neutral(expected) and any(same(got, value) for value in _may_come(key, source)):
        return
    yield from first(differences(got, expected, pair.prefix + key, _equal))


def _equal(got: Any, expected: Any) -> bool:
    """Whether two values are equal; transformers refuses a float where it expects an integer."""
    return rounded(got, expected) and not (type(got) is float and type(expected) is int)


def _neutral(values: Values, value: Any) -> bool:
    return value is ABSENT or any(same(value, v) for v in values)


def _may_come(key: str, source: Checkpoint) -> Values:
    """Return what a field may say that the source's config leaves open."""
    if key not in TOKENS:
        return MAY_COME.get(key, ())
    generation = _beside(source, GENERATION)
    tokenizer = _beside(source, TOKENIZER_CONFIG)
    token = tokenizer.get(key.removesuffix("_id"))
    added = tokenizer.get("added_tokens_decoder") or {}
    numbers = [int(i) for i, entry in added.items() if token and entry["content"] == token]
    return (generation.get(key), *numbers)


def _beside(source: Checkpoint, name: str) -> dict[str, Any]:
    """Return a side file; an empty object if it is not there, or is none."""
    content = source.side(name)
    try:
        return {} if content is None else parse_object(content, name)
    except FormatError:
        return {}
