"""What a GGUF file says of the tokenizer, from the side files of a checkpoint.

Every id below the rows of the embedding has a token: ids that the tokenizer leaves out are
`[PAD{i}]`, unused. Keys, kinds and their order are those of llama.cpp's converter.

Source: llama.cpp's `conversion/base.py` and `gguf-py/gguf/vocab.py` at b11434. Traps: the first
that names a special token decides (tokenizer_config.json, config.json, its text_config); where two
files hold chat templates, transformers' choice is written, not that of llama.cpp's converter;
llama.cpp has no NFC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from formats.chat_template import DEFAULT, ChatTemplates, Sides, read_templates
from formats.errors import FormatError
from formats.gguf.bpe_tokenizer import AddedToken, BpeTokenizer, Ends, read_tokenizer
from formats.gguf.header import Kv
from formats.gguf.pre_tokenizer import FROM_ORIGINAL
from formats.gguf.tokenizer_files import TEMPLATE, plain_name
from formats.gguf.tokenizer_json import (
    CONTROL,
    NORMAL,
    PREFIX,
    SPECIAL_KEYS,
    UNUSED,
    USER_DEFINED,
)
from formats.json_file import parse_object
from formats.side_names import MERGES, TOKENIZER, TOKENIZER_CONFIG, VOCAB

# The eot token is the one that the post-processor's last token has displaced as eos.
WRITTEN_KEYS = SPECIAL_KEYS | {"eot": "eot_token_id"}
ADD_TYPES = ("bos", "eos", "sep")


class TokenizerMetadata(NamedTuple):
    """The pairs of a tokenizer, and what llama.cpp does otherwise."""

    pairs: list[Kv]
    notes: tuple[str, ...]


def tokenizer_metadata(
    sides: Sides, vocab_rows: int, raw_config: Mapping[str, Any]
) -> TokenizerMetadata:
    """Return every pair of a text model's tokenizer, in llama.cpp's order.

    sides       content of side files by their names
    vocab_rows  rows of the embedding
    raw_config  config.json

    FormatError if there is no byte-level BPE, if it contradicts itself or the embedding, or if
    llama.cpp would give other ids.
    """
    config = _read(sides, TOKENIZER_CONFIG)
    content = sides.get(TOKENIZER)
    if content is None:
        raise FormatError(_missing(sides))
    tokenizer = read_tokenizer(content, _in_config(config))
    tokens, types = _tokens(tokenizer, vocab_rows)
    pairs = [
        Kv(f"{PREFIX}model", "string", "gpt2"),
        Kv(f"{PREFIX}pre", "string", tokenizer.pre),
        Kv(f"{PREFIX}tokens", "array[string]", tokens),
        Kv(f"{PREFIX}token_type", "array[int32]", types),
        Kv(f"{PREFIX}merges", "array[string]", tokenizer.merges),
        *_special(tokenizer, config, raw_config, vocab_rows),
        *_chat_templates(read_templates(sides)),
    ]
    return TokenizerMetadata(pairs, tuple(tokenizer.notes))


def _read(sides: Sides, name: str) -> dict[str, Any]:
    content = sides.get(name)
    return {} if content is None else parse_object(content, name)


def _missing(sides: Sides) -> str:
    """Say what a checkpoint without tokenizer.json has instead, and what to do."""
    fix, why = FROM_ORIGINAL, "a GGUF file holds the tokenizer"
    if "tokenizer.model" in sides:
        why = "tokenizer.model is SentencePiece, which Qwen3.5 does not use"
    if VOCAB in sides and MERGES in sides:
        fix = f"load and save the tokenizer with transformers: {VOCAB} and {MERGES} are here"
    return f"{TOKENIZER} is missing\n  why   {why}\n  fix   {fix}"


def _in_config(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the added tokens that tokenizer_config.json lists, by id."""
    given = config.get("added_tokens_decoder") or {}
    if not isinstance(given, dict):
        raise FormatError(f"{TOKENIZER_CONFIG}: added_tokens_decoder is not an object")
    entries = []
    for number, entry in given.items():
        if not isinstance(entry, dict) or not (number.isascii() and number.isdigit()):
            raise FormatError(f"{TOKENIZER_CONFIG}: added_tokens_decoder[{number!r}] is {entry!r}")
        entries.append(entry | {"id": int(number)})
    return sorted(entries, key=lambda entry: int(entry["id"]))


def _tokens(tokenizer: BpeTokenizer, rows: int) -> tuple[list[str], list[int]]:
    """Return text and type of every id below `rows`."""
    texts = {number: token for token, number in tokenizer.vocab.items()}
    added = {token.id: token for token in tokenizer.added}
    texts |= {number: token.content for number, token in added.items()}
    highest = max(texts)
    if highest >= rows:
        raise FormatError(
            f"{TOKENIZER}: {texts[highest]!r} has the id {highest}, expected at most {rows - 1}: "
            f"the embedding has {rows} rows\n"
            "  fix   resize the embedding to the tokenizer, or take the tokenizer it was made with"
        )
    named = set(texts.values())
    tokens = [texts[i] if i in texts else _hole(i, named) for i in range(rows)]
    types = [NORMAL if i in texts else UNUSED for i in range(rows)]
    for number, token in added.items():
        types[number] = CONTROL if is_control(token) else USER_DEFINED
    return tokens, types


def is_control(token: AddedToken) -> bool:
    """Whether llama.cpp shows a token to nobody: a special one, or one that looks like it."""
    return token.special or (token.content.startswith("<|") and token.content.endswith("|>"))


def _hole(number: int, named: set[str]) -> str:
    token = f"[PAD{number}]"
    if token in named:
        raise FormatError(f"{TOKENIZER}: {token!r} is a token, and the name of the unused id")
    return token


def _special(
    tokenizer: BpeTokenizer, config: Mapping[str, Any], raw: Mapping[str, Any], rows: int
) -> Iterator[Kv]:
    """Yield the ids of special tokens, then whether one is put before or after a text."""
    ids = {token.content: token.id for token in tokenizer.added}
    named = {kind: _name(config, kind) for kind in (*WRITTEN_KEYS, "cls")}
    named["bos"] = named["bos"] or named["cls"]
    named["eos"] = named["eos"] or named["sep"]
    ends = tokenizer.ends
    if ends.first is not None:
        named["bos"] = named["bos"] or ends.first
    if ends.last is not None and ends.last != named["eos"]:
        named["eot"], named["eos"] = named["eos"], ends.last
    ids_by_kind = {kind: _id(kind, name, ids) for kind, name in named.items() if name}
    for kind in WRITTEN_KEYS:
        number = _configured(raw, kind, rows)
        if number is not None:
            ids_by_kind.setdefault(kind, number)
    for kind, number in ids_by_kind.items():
        if kind in WRITTEN_KEYS:
            yield Kv(f"{PREFIX}{WRITTEN_KEYS[kind]}", "uint32", number)
    for kind, value in _flags(ends, named["bos"], config).items():
        yield Kv(f"{PREFIX}add_{kind}_token", "bool", value)


def _name(config: Mapping[str, Any], kind: str) -> str | None:
    """Return the text of a special token that tokenizer_config.json names."""
    value = config.get(f"{kind}_token") if kind != "eot" else None
    value = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{TOKENIZER_CONFIG}: {kind}_token is {value!r}, expected a token")
    return value or None


def _id(kind: str, name: str, ids: Mapping[str, int]) -> int:
    if name not in ids:
        raise FormatError(
            f"{TOKENIZER_CONFIG}: {kind}_token is {name!r}, which is not an added token of "
            f"{TOKENIZER}\n"
            "  fix   correct it, or load and save the tokenizer with transformers"
        )
    return ids[name]


def _configured(raw: Mapping[str, Any], kind: str, rows: int) -> int | None:
    """Return the id that config.json gives a special token; a list of ids decides nothing."""
    value = raw.get(f"{kind}_token_id")
    text = raw.get("text_config")
    if value is None and isinstance(text, dict):
        value = text.get(f"{kind}_token_id")
    if type(value) is not int:
        return None
    if not 0 <= value < rows:
        raise FormatError(
            f"config.json: {kind}_token_id is {value}, expected an id below {rows}, or null"
        )
    return value


def _flags(ends: Ends, bos: str | None, config: Mapping[str, Any]) -> dict[str, bool]:
    """Return what is put around a text; the post-processor overrides tokenizer_config.json."""
    if ends.first is not None and ends.first != bos:
        raise FormatError(
            f"{TOKENIZER}: the post-processor puts {ends.first!r} before a text, and the bos "
            f"token is {bos!r}; llama.cpp can put no other there"
        )
    flags = dict.fromkeys(("bos", "eos"), False) if ends.stated else {}
    flags |= {"bos": True} if ends.first is not None else {}
    flags |= {"eos": True} if ends.last is not None else {}
    for kind in ADD_TYPES:
        value = config.get(f"add_{kind}_token")
        if isinstance(value, bool):
            flags.setdefault(kind, value)
    return flags


def _chat_templates(templates: ChatTemplates) -> Iterator[Kv]:
    """Yield each named template, their names, and the default one last."""
    named: dict[str, str] = {}
    for name, text in templates.texts.items():
        key = plain_name(name)
        if key in named:
            where = templates.where[name]
            raise FormatError(f"{where}: two templates are named {key!r} in a GGUF file")
        named[key] = text
    default = named.pop(DEFAULT, None)
    for name, text in named.items():
        yield Kv(f"{TEMPLATE}.{name}", "string", text)
    if named:
        yield Kv(f"{TEMPLATE}s", "array[string]", list(named))
    if default is not None:
        yield Kv(TEMPLATE, "string", default)
