"""The tokenizer's side files, made again from what a GGUF file says.

They give the same ids as the files that the GGUF was made from, and are laid out as the hub's.
What no GGUF file holds is Qwen3.5's: no spaces are cleaned up.

Source: the published side files. Trap: a float is stored in 32 bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from formats.chat_template import DEFAULT, template_file
from formats.gguf.header import Kv
from formats.gguf.metadata import SAMPLING
from formats.gguf.pairs import need, value_of
from formats.gguf.tokenizer_json import (
    PREFIX,
    SPECIAL_KEYS,
    added_tokens,
    special_id,
    tokenizer_json,
    vocabulary,
)
from formats.side_names import GENERATION, TOKENIZER, TOKENIZER_CONFIG

TEMPLATE = "tokenizer.chat_template"
NAMED = f"{TEMPLATE}."
NO_MODELS = (None, "none", "no_vocab")
# Tokens that end a text for every Qwen, whichever of them is the eos token.
ENDS = ("<|im_end|>", "<|endoftext|>")


def tokenizer_files(kv: Mapping[str, Kv]) -> dict[str, bytes]:
    """Return the content of each side file by its name; none for a file without a tokenizer.

    tokenizer.json, tokenizer_config.json, chat_template.jinja, additional_chat_templates/*.jinja,
    generation_config.json, as far as the pairs say anything of them. FormatError for a tokenizer
    that is not Qwen's, and for pairs that contradict each other.
    """
    if value_of(kv, f"{PREFIX}model", str) in NO_MODELS:
        tokens: list[str] = []
        files = {}
    else:
        tokens, types = vocabulary(kv)
        special = {
            kind: number
            for kind in SPECIAL_KEYS
            if (number := special_id(kv, kind, len(tokens))) is not None
        }
        added = added_tokens(tokens, types, {number: tokens[number] for number in special.values()})
        config = _config(kv, added, {kind: tokens[number] for kind, number in special.items()})
        files = {
            TOKENIZER: _json(tokenizer_json(kv, tokens, types, added), None),
            TOKENIZER_CONFIG: _json(config, 4),
        }
    files |= {template_file(name): text.encode() for name, text in _templates(kv).items()}
    generation = _generation(kv, tokens)
    return files | ({GENERATION: _json(generation, 4)} if generation else {})


def _json(value: object, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    return f"{text}\n".encode()


def _config(
    kv: Mapping[str, Kv], added: list[dict[str, Any]], special: Mapping[str, str]
) -> dict[str, Any]:
    """Return tokenizer_config.json; chat templates are files of their own."""
    arch = value_of(kv, "general.architecture", str)
    length = value_of(kv, f"{arch}.context_length", int)
    config: dict[str, Any] = {
        "add_bos_token": bool(value_of(kv, f"{PREFIX}add_bos_token", bool)),
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
    texts = {name: value_of(kv, key, str) for name, key in keys.items()}
    return {name: text for name, text in texts.items() if text is not None}


def plain_name(name: str) -> str:
    """Return a template's name as keys of a GGUF file have it: letters, digits, underscores."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def _generation(kv: Mapping[str, Kv], tokens: list[str]) -> dict[str, Any]:
    """Return generation_config.json: how to sample, and every token that ends a text."""
    generation: dict[str, Any] = {}
    for kind in ("bos", "pad"):
        number = special_id(kv, kind, len(tokens)) if tokens else None
        if number is not None:
            generation[f"{kind}_token_id"] = number
    eos = special_id(kv, "eos", len(tokens)) if tokens else None
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
        return float(str(np.float32(need(kv, key, float))))
    return need(kv, key, str) if kind == "string" else need(kv, key, int)
