"""How tokenizers differ in the ids that they give, and in the text they make of ids.

tokenizer.json is compared part by part. What others write beside it (vocab.json, merges.txt,
added_tokens.json) must say what the source's tokenizer.json says, or the source's file of that
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.side_names import ADDED_TOKENS, MERGES, TOKENIZER, VOCAB
from qwen35_convert.containers.safetensors.sides.fields import as_object, as_objects, meant
from qwen35_convert.containers.safetensors.sides.reader import Sides
from qwen35_convert.difference import differences
from qwen35_convert.planning.token_names import merge_lines, merge_pairs

# tokenizers refuses a file with another version, or with a part that it does not know.
VERSION = "1.0"
KNOWN = {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer"} | {
    "post_processor", "decoder", "model",
}  # fmt: skip
PARTS = ("normalizer", "pre_tokenizer", "truncation", "padding")
NO_DROPOUT = ("dropout", 0.0)
# What a template makes of one text, and of two, if it adds nothing.
PLAIN = ([["A"], ["A", "B"]], [["A"], []])
Added = Mapping[str, Mapping[str, Any]]
"""Tokens that are cut out of the text, by id: their text and flags."""


def tokenizer(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare tokenizer.json."""
    if theirs.has(TOKENIZER):
        got, expected = (_canonical(side.object(TOKENIZER)) for side in (ours, theirs))
        yield from differences(got, expected)


def vocabulary(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare vocab.json, which may hold the added tokens, too."""
    got, stated = ours.object(VOCAB), theirs.object(VOCAB)
    vocab = as_object(as_object(theirs.object(TOKENIZER).get("model")).get("vocab")) or stated
    if vocab and got not in (vocab, vocab | _ids(theirs), stated or vocab):
        yield from differences(got, vocab)


def merges(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare merges.txt."""
    model = as_object(theirs.object(TOKENIZER).get("model"))
    expected = merge_pairs(model.get("merges")) or merge_lines(theirs.content(MERGES))
    if expected:
        yield from differences(merge_lines(ours.content(MERGES)), expected, "merges")


def added_ids(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Hold added_tokens.json against the added tokens; it need not have them all."""
    expected = _ids(theirs) | theirs.object(ADDED_TOKENS)
    if theirs.has(TOKENIZER):
        got = ours.object(ADDED_TOKENS)
        yield from differences(got, {text: expected.get(text) for text in got})


def added_tokens(sides: Sides) -> Added:
    """Return the added tokens of tokenizer.json."""
    return _added(sides.object(TOKENIZER))


def said(token: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token's text and the flags that are set."""
    flags = {key: value for key, value in token.items() if key not in ("id", "content")}
    return {"content": token.get("content"), **meant(flags)}


def _ids(sides: Sides) -> dict[str, int]:
    return {token["content"]: int(i) for i, token in added_tokens(sides).items()}


def _added(raw: Mapping[str, Any]) -> Added:
    tokens = as_objects(raw.get("added_tokens"))
    return {
        str(token["id"]): said(token)
        for token in tokens
        if isinstance(token.get("content"), str) and isinstance(token.get("id"), int)
    }


def _canonical(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ids and text depend on, in one spelling."""
    model = as_object(raw.get("model"))
    numbers = {"vocab": model.get("vocab"), "merges": merge_pairs(model.get("merges"))}
    settings = {k: v for k, v in model.items() if k not in numbers and (k, v) != NO_DROPOUT}
    return {
        "model": meant(settings) | numbers,
        "version": raw.get("version", VERSION),
        **{part: raw[part] for part in raw.keys() - KNOWN},
        "added_tokens": _added(raw),
        "post_processor": _around(raw.get("post_processor")),
        "decoder": _decoded(raw.get("decoder")),
        **{part: meant(raw.get(part)) for part in PARTS},
    }


def _around(processor: Any) -> Any:
    """Return what a post-processor puts around a text; None if it only says where tokens are."""
    put = meant(processor)
    kind = as_object(put).get("type")
    if kind == "Sequence":
        parts = [part for part in map(_around, as_objects(put.get("processors"))) if part]
        return {"type": kind, "processors": parts} if len(parts) > 1 else [*parts, None][0]
    return None if kind == "ByteLevel" or _is_plain(as_object(put)) else put


def _is_plain(processor: Mapping[str, Any]) -> bool:
    """Whether a template is the text alone."""
    pieces = [as_objects(processor.get(side)) for side in ("single", "pair")]
    texts = [[as_object(piece.get("Sequence")).get("id") for piece in side] for side in pieces]
    return processor.get("type") == "TemplateProcessing" and texts in PLAIN


def _decoded(decoder: Any) -> Any:
    """Return a decoder; one of bytes has no settings that it obeys."""
    form = meant(decoder)
    bytewise = as_object(form).get("type") == "ByteLevel"
    return {"type": "ByteLevel"} if bytewise else form
