"""What other files say of tokens, held against tokenizer.json, by which engines make ids of a text.

    vocab.json, merges.txt                          its vocabulary and merges; slow tokenizers and
                                                    converters read these instead
    added_tokens.json, added_tokens_decoder         ids of added tokens
    tokenizer_config.json, special_tokens_map.json  special tokens, by their text: transformers adds
                                                    one that is not there behind the others
    config.json, generation_config.json             special tokens, by their ids: a text never ends
                                                    with one that no token has

A source that is a GGUF file has none of these files: they are made of one vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint
from formats.family.config_fields import ORIGIN
from formats.side_names import (
    ADDED_TOKENS,
    MERGES,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCAB,
)
from qwen35_convert.planning.token_ids import stated_ids

DECODER = "added_tokens_decoder"
LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
# What processors put where an image or a video is, or is said to be by a tokenizer's field.
OF_IMAGES = {
    "image_token_id": ("image_token", "<|image_pad|>"),
    "video_token_id": ("video_token", "<|video_pad|>"),
    "vision_start_token_id": ("vision_bos_token", "<|vision_start|>"),
    "vision_end_token_id": ("vision_eos_token", "<|vision_end|>"),
}


class Disagreement(NamedTuple):
    """A file, and what it says that tokenizer.json does not."""

    name: str
    problem: str


class Tokens:
    """tokenizer.json and the files beside it; objects by name, without fields where there is none.

    added  the added tokens by their text
    ids    all tokens by their text
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        raw = self.object(TOKENIZER)
        model, entries = _object(raw.get("model")), raw.get("added_tokens")
        self.vocab = _object(model.get("vocab"))
        self.merges = merge_pairs(model.get("merges"))
        objects = [_object(one) for one in entries] if isinstance(entries, list) else []
        self.added = {str(one.get("content")): one.get("id") for one in objects}
        self.ids: dict[str, Any] = {**self.vocab, **self.added}

    def object(self, name: str) -> dict[str, Any]:
        """Return the object in a file; one that holds none is named by others."""
        from pydantic_core import from_json

        content = self.checkpoint.side(name)
        try:
            return _object(from_json(content or b"{}", cache_strings="none"))
        except ValueError:
            return {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return tokenizer_config.json."""
        return self.object(TOKENIZER_CONFIG)


def disagreements(checkpoint: Checkpoint) -> Iterator[Disagreement]:
    """Yield what files beside tokenizer.json say of tokens otherwise, one sentence for a field."""
    if checkpoint.side(TOKENIZER) is None or checkpoint.config.origin != ORIGIN:
        return
    tokens = Tokens(checkpoint)
    if tokens.vocab:
        for rule in RULES:
            yield from rule(tokens)


def merge_pairs(merges: Any) -> Any:
    """Return merges as pairs; older files have them as "left right"."""
    if not isinstance(merges, list):
        return merges
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def merge_lines(content: bytes | None) -> list[list[str]]:
    """Return the pairs of merges.txt, whose first line may be a version."""
    lines = (content or b"").decode(errors="replace").replace("\r\n", "\n").split("\n")
    return [line.split(" ") for line in lines if line and not line.startswith("#version")]


def _vocabulary(tokens: Tokens) -> Iterator[Disagreement]:
    """Compare vocab.json, which may hold the added tokens, too."""
    if tokens.checkpoint.side(VOCAB) is None:
        return
    stated = tokens.object(VOCAB)
    for text in tokens.vocab.keys() - stated.keys():
        yield Disagreement(VOCAB, f"lacks {text!r:.80}, which {TOKENIZER} has")
        break
    yield from _of_ids(VOCAB, "", stated, tokens)


def _merges(tokens: Tokens) -> Iterator[Disagreement]:
    content = tokens.checkpoint.side(MERGES)
    if content is None or not isinstance(tokens.merges, list):
        return
    stated = merge_lines(content)
    pairs = enumerate(zip(stated, tokens.merges, strict=False), 1)
    other = next(((i, *pair) for i, pair in pairs if pair[0] != pair[1]), None)
    if other is not None:
        number, got, expected = other
        problem = f"merge {number} is {got!r:.80}, expected {expected!r:.80}"
        yield Disagreement(MERGES, f"{problem}, as in {TOKENIZER}")
    elif len(stated) != len(tokens.merges):
        problem = f"has {len(stated)} merges, but {TOKENIZER} has {len(tokens.merges)}"
        yield Disagreement(MERGES, problem)


def _added(tokens: Tokens) -> Iterator[Disagreement]:
    yield from _of_ids(ADDED_TOKENS, "", tokens.object(ADDED_TOKENS), tokens)
    listed = _object(tokens.settings.get(DECODER)).items()
    stated = {str(text_of(one)): int(i) for i, one in listed if str(i).isdecimal()}
    yield from _of_ids(TOKENIZER_CONFIG, f"{DECODER}: ", stated, tokens)


def _of_ids(
    name: str, where: str, stated: Mapping[str, Any], tokens: Tokens
) -> Iterator[Disagreement]:
    """Yield the first token that is not there, or has another id."""
    for text, number in stated.items():
        if text not in tokens.ids:
            yield Disagreement(name, f"{where}has {text!r:.80}, which {TOKENIZER} does not have")
            return
        if number != tokens.ids[text]:
            problem = f"{where}the id of {text!r:.80} is {number!r:.40}"
            yield Disagreement(name, f"{problem}, expected {tokens.ids[text]}, as in {TOKENIZER}")
            return


def _texts(tokens: Tokens) -> Iterator[Disagreement]:
    special = tokens.object(SPECIAL_TOKENS)
    for name, fields in ((TOKENIZER_CONFIG, tokens.settings), (SPECIAL_TOKENS, special)):
        for field, text in _named(fields):
            if text not in tokens.ids:
                problem = f"{field} is {text!r:.80}, which {TOKENIZER} does not have"
                yield Disagreement(name, problem)
    for field, text in _named(special):
        other = text_of(tokens.settings.get(field))
        if field not in LISTS and isinstance(other, str) and other != text:
            problem = f"{field} is {text!r:.80}, but {TOKENIZER_CONFIG} says {other!r:.80}"
            yield Disagreement(SPECIAL_TOKENS, problem)


def _named(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of each special token that an object names."""
    for field, value in fields.items():
        listed = [*value.values()] if isinstance(value, dict) else value
        values = listed if field in LISTS else [value] if field.endswith("_token") else ()
        texts = map(text_of, values if isinstance(values, list) else ())
        yield from ((field, text) for text in texts if isinstance(text, str))


def _ids(tokens: Tokens) -> Iterator[Disagreement]:
    known = set(filter(lambda number: type(number) is int, tokens.ids.values()))
    for name, field, value in stated_ids(tokens.checkpoint):
        ids = value if isinstance(value, list) else [value]
        for one in ids:
            if type(one) is int and one >= 0 and one not in known:
                problem = f"{field} is {value!r:.80}, but no token of {TOKENIZER} has the id {one}"
                yield Disagreement(name, problem)
                break
        else:
            yield from _of_place(name, field, value, tokens)


def _of_place(name: str, field: str, value: Any, tokens: Tokens) -> Iterator[Disagreement]:
    """Yield the id of another token than processors put in an image's place."""
    stated, usual = OF_IMAGES.get(field, ("", ""))
    lists = [_object(tokens.settings.get(name)) for name in LISTS]
    named = next((part[stated] for part in (tokens.settings, *lists) if stated in part), usual)
    text = text_of(named)
    expected = tokens.ids.get(text) if isinstance(text, str) else None
    if None not in (value, expected) and value != expected:
        yield Disagreement(name, f"{field} is {value!r:.80}, but {text!r:.80} has {expected}")


def text_of(token: Any) -> Any:
    """Return the text of a token, which may be written with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


RULES = (_vocabulary, _merges, _added, _texts, _ids)
