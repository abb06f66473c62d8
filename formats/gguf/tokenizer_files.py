"""The tokenizer's side files, made again from what a GGUF file says.

They give the same ids as the files that the GGUF was made from, and are laid out as the hub's.
What no GGUF file holds is Qwen3.5's: NFC, byte-level decoding, no spaces cleaned up.

Source: the published side files. Traps: a float is stored in 32 bits; llama.cpp calls every token
that looks like `<|this|>` a control token, also the six that the hub does not call special.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from formats.chat_template import DEFAULT, template_file
from formats.errors import FormatError
from formats.gguf.bpe_tokenizer import library_ids
from formats.gguf.header import Kv
from formats.gguf.metadata import SAMPLING
from formats.gguf.pre_tokenizer import REGEXES

T = TypeVar("T")

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NAMED = f"{TEMPLATE}."
NO_MODELS = (None, "none", "no_vocab")
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
# Tokens that end a text for every Qwen, whichever of them is the eos token.
ENDS = ("<|im_end|>", "<|endoftext|>")
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
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def tokenizer_files(kv: Mapping[str, Kv]) -> dict[str, bytes]:
    """Return the content of each side file by its name; none for a file without a tokenizer.

    tokenizer.json, tokenizer_config.json, chat_template.jinja, additional_chat_templates/*.jinja,
    generation_config.json, as far as the pairs say anything of them. FormatError for a tokenizer
    that is not Qwen's, and for pairs that contradict each other.
    """
    if _get(kv, f"{PREFIX}model", str) in NO_MODELS:
        tokens: list[str] = []
        files = {}
    else:
        tokens, types = _vocabulary(kv)
        special = {
            kind: number
            for kind in SPECIAL_KEYS
            if (number := _special_id(kv, kind, len(tokens))) is not None
        }
        added = _added(tokens, types, {number: tokens[number] for number in special.values()})
        config = _config(kv, added, {kind: tokens[number] for kind, number in special.items()})
        files = {
            "tokenizer.json": _json(_tokenizer(kv, tokens, types, added), None),
            "tokenizer_config.json": _json(config, 4),
        }
    files |= {template_file(name): text.encode() for name, text in _templates(kv).items()}
    generation = _generation(kv, tokens)
    return files | ({"generation_config.json": _json(generation, 4)} if generation else {})


def _json(value: object, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    return f"{text}\n".encode()


def _get(kv: Mapping[str, Kv], key: str, kind: type[T]) -> T | None:
    """Return a value of a kind, None if the key is not there."""
    pair = kv.get(key)
    if pair is not None and type(pair.value) is not kind:
        raise FormatError(
            f"{key} is {str(pair.value)[:80]} ({pair.kind}), expected {kind.__name__}"
        )
    return None if pair is None else pair.value


def _need(kv: Mapping[str, Kv], key: str, kind: type[T]) -> T:
    value = _get(kv, key, kind)
    if value is None:
        raise FormatError(f"{key} is missing")
    return value


def _vocabulary(kv: Mapping[str, Kv]) -> tuple[list[str], list[int]]:
    model, pre = _need(kv, f"{PREFIX}model", str), _get(kv, f"{PREFIX}pre", str)
    if model != "gpt2":
        raise FormatError(f"{PREFIX}model is {model!r}, expected 'gpt2' (byte-level BPE)")
    if pre not in REGEXES:
        raise FormatError(f"{PREFIX}pre is {pre!r}, expected {' or '.join(map(repr, REGEXES))}")
    tokens = _need(kv, f"{PREFIX}tokens", list)
    types = _need(kv, f"{PREFIX}token_type", list)
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


def _special_id(kv: Mapping[str, Kv], kind: str, count: int) -> int | None:
    key = PREFIX + SPECIAL_KEYS[kind]
    number: int | None = _get(kv, key, int)
    if number is not None and not 0 <= number < count:
        raise FormatError(f"{key} is {number}, expected an id below {count}")
    return number


def _added(tokens: list[str], types: list[int], special: Mapping[int, str]) -> list[dict[str, Any]]:
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


def _tokenizer(
    kv: Mapping[str, Kv], tokens: list[str], types: list[int], added: list[dict[str, Any]]
) -> dict[str, Any]:
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
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **_model(kv, tokens, types, added),
        },
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
    merges = [_pair(merge) for merge in _need(kv, f"{PREFIX}merges", list)]
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
        if _get(kv, f"{PREFIX}add_{kind}_token", bool):
            number = _special_id(kv, kind, len(tokens))
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


def _config(
    kv: Mapping[str, Kv], added: list[dict[str, Any]], special: Mapping[str, str]
) -> dict[str, Any]:
    """Return tokenizer_config.json; chat templates are files of their own."""
    arch = _get(kv, "general.architecture", str)
    length = _get(kv, f"{arch}.context_length", int)
    config: dict[str, Any] = {
        "add_bos_token": bool(_get(kv, f"{PREFIX}add_bos_token", bool)),
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added
        },
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    config |= {f"{kind}_token": special.get(kind) for kind in ("bos", "eos", "pad", "unk")}
    config |= {f"{kind}_token": special[kind] for kind in ("sep", "mask") if kind in special}
    config |= {} if length is None else {"model_max_length": length}
    return dict(sorted(config.items()))


def _templates(kv: Mapping[str, Kv]) -> dict[str, str]:
    """Return the chat templates by their names, which become names of files."""
    keys = {DEFAULT: TEMPLATE}
    keys |= {plain_name(key[len(TEMPLATE) + 1 :]): key for key in kv if key.startswith(NAMED)}
    texts = {name: _get(kv, key, str) for name, key in keys.items()}
    return {name: text for name, text in texts.items() if text is not None}


def plain_name(name: str) -> str:
    """Return a template's name as keys of a GGUF file have it: letters, digits, underscores."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def _generation(kv: Mapping[str, Kv], tokens: list[str]) -> dict[str, Any]:
    """Return generation_config.json: how to sample, and every token that ends a text."""
    generation: dict[str, Any] = {}
    for kind in ("bos", "pad"):
        number = _special_id(kv, kind, len(tokens)) if tokens else None
        if number is not None:
            generation[f"{kind}_token_id"] = number
    eos = _special_id(kv, "eos", len(tokens)) if tokens else None
    if eos is not None:
        ends = [eos, *(tokens.index(end) for end in ENDS if end in tokens)]
        generation["eos_token_id"] = list(dict.fromkeys(ends))
    sampling = {
        fields[-1]: _sampled(kv, f"general.sampling.{key}", kind)
        for key, kind, fields in SAMPLING
        if f"general.sampling.{key}" in kv
    }
    return generation | ({"do_sample": True, **sampling} if sampling else {})


def _sampled(kv: Mapping[str, Kv], key: str, kind: str) -> str | int | float:
    """Return a sampling parameter; of 32 bits, as the shortest decimal that is stored so."""
    import numpy as np

    if kind == "float32":
        return float(str(np.float32(_need(kv, key, float))))
    return _need(kv, key, str) if kind == "string" else _need(kv, key, int)
