"""tokenizer.json, made again from the vocabulary and the merges that a GGUF file holds.

What no GGUF file holds is Qwen3.5's: NFC, byte-level decoding. Traps: llama.cpp calls every token
that looks like `<|this|>` a control token, also the six that the hub does not call special.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import FormatError
from formats.gguf.bpe_tokenizer import library_ids
from formats.gguf.header import Kv
from formats.gguf.pairs import need, value_of
from formats.gguf.pre_tokenizer import REGEXES
from formats.nearest import one_of

PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
TYPES = (NORMAL, CONTROL, USER_DEFINED, UNUSED)
NOT_SPECIAL = frozenset(
    {
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    }
)
SPECIAL_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id",
    "sep": "seperator_token_id", "pad": "padding_token_id", "mask": "mask_token_id",
}  # fmt: skip
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
    "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def vocabulary(kv: Mapping[str, Kv]) -> tuple[list[str], list[int]]:
    """Return the tokens and their types. FormatError for a tokenizer that is not Qwen's."""
    model, pre = need(kv, f"{PREFIX}model", str), value_of(kv, f"{PREFIX}pre", str)
    if model != "gpt2":
        raise FormatError(f"{PREFIX}model is {model!r}, expected 'gpt2' (byte-level BPE)")
    if pre not in REGEXES:
        raise FormatError(f"{PREFIX}pre is {pre!r}, expected {one_of(map(repr, REGEXES))}")
    tokens = need(kv, f"{PREFIX}tokens", list)
    types = need(kv, f"{PREFIX}token_type", list)
    for key, values, kind in (("tokens", tokens, str), ("token_type", types, int)):
        if not all(type(value) is kind for value in values):
            raise FormatError(f"{PREFIX}{key} is {kv[PREFIX + key].kind}, expected {kind.__name__}")
    if len(types) != len(tokens):
        raise FormatError(f"{PREFIX}token_type has {len(types)} entries, expected {len(tokens)}")
    strange = set(types) - set(TYPES)
    if strange:
        raise FormatError(f"{PREFIX}token_type holds {min(strange)}, expected {TYPES}")
    if len(set(tokens)) != len(tokens):
        raise FormatError(f"{PREFIX}tokens holds a token twice")
    return tokens, types


def special_id(kv: Mapping[str, Kv], kind: str, count: int) -> int | None:
    """Return the id of a special token of this kind, of `count` tokens; None if there is none."""
    key = PREFIX + SPECIAL_KEYS[kind]
    number: int | None = value_of(kv, key, int)
    if number is not None and not 0 <= number < count:
        raise FormatError(f"{key} is {number}, expected an id below {count}")
    return number


def added_tokens(
    tokens: list[str], types: list[int], special: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the tokens that are cut out of the text: those that llama.cpp cuts out."""
    return [
        {
            "id": i,
            "content": token,
            **PLAIN,
            "special": types[i] == CONTROL and (i in special or token not in NOT_SPECIAL),
        }
        for i, token in enumerate(tokens)
        if types[i] in (CONTROL, USER_DEFINED)
    ]


def tokenizer_json(
    kv: Mapping[str, Kv], tokens: list[str], types: list[int], added: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    pre = kv[f"{PREFIX}pre"].value
    split = {
        "type": "Split",
        "pattern": {"Regex": REGEXES[pre]},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "post_processor": _post_processor(kv, tokens),
        "decoder": BYTE_LEVEL,
        "model": BPE | _model(kv, tokens, types, added),
    }


def _model(
    kv: Mapping[str, Kv], tokens: list[str], types: list[int], added: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return vocab and merges; added tokens are in the vocab if they would not keep their ids."""
    vocab = {
        token: i
        for i, token in enumerate(tokens)
        if types[i] == NORMAL or (types[i] == UNUSED and token != f"[PAD{i}]")
    }
    own = {token["content"]: token["id"] for token in added}
    merges = [_pair(merge) for merge in need(kv, f"{PREFIX}merges", list)]
    lost = _lost(merges, vocab)
    if lost or library_ids(vocab, list(own)) != list(own.values()):
        vocab |= own
    if lost and (lost := _lost(merges, vocab)):
        raise FormatError(f"{PREFIX}merges needs {lost!r}, which {PREFIX}tokens does not have")
    return {"vocab": vocab, "merges": merges}


def _lost(merges: list[list[str]], vocab: Mapping[str, int]) -> str | None:
    """Return what a merge takes or makes that the vocabulary does not have."""
    for left, right in merges:
        for part in (left, right, left + right):
            if part not in vocab:
                return part
    return None


def _pair(merge: object) -> list[str]:
    """Return the two parts of "left right"; the first character may be a space itself."""
    cut = merge.find(" ", 1) if isinstance(merge, str) else -1
    if not isinstance(merge, str) or not 0 < cut < len(merge) - 1:
        raise FormatError(f"{PREFIX}merges holds {merge!r}, expected two parts")
    return [merge[:cut], merge[cut + 1 :]]


def _post_processor(kv: Mapping[str, Kv], tokens: list[str]) -> dict[str, Any]:
    """Return what puts the bos and eos tokens around a text; nothing does in Qwen3.5."""
    ends: dict[str, Any] = {}
    for kind in ("bos", "eos"):
        if value_of(kv, f"{PREFIX}add_{kind}_token", bool):
            number = special_id(kv, kind, len(tokens))
            if number is None:
                raise FormatError(f"{PREFIX}add_{kind}_token is true, but there is no {kind} token")
            ends[kind] = tokens[number]
    if not ends:
        return BYTE_LEVEL
    around = {kind: [{"SpecialToken": {"id": text, "type_id": 0}}] for kind, text in ends.items()}
    first, last = around.get("bos", []), around.get("eos", [])
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    known = {
        text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]} for text in ends.values()
    }
    template = {
        "type": "TemplateProcessing",
        "single": [*first, one, *last],
        "pair": [*first, one, *last, *first, two, *last],
        "special_tokens": known,
    }
    return {"type": "Sequence", "processors": [BYTE_LEVEL, template]}
