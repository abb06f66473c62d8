"""What makes an embedding model of a text model: sentence-transformers' files beside the weights.

    modules.json                        the modules in their order, each with its class and folder
    1_Pooling/config.json               which hidden states become the embedding
    config_sentence_transformers.json   what is put before a query or a document

Source: sentence-transformers 2 to 5; llama.cpp's `_try_set_pooling_type`. Trap: the mode is either
the one flag that is true or, in newer files, a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import FormatError
from formats.json_file import parse_list, parse_object
from formats.nearest import one_of

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"
# Modules that are whole without weights of their own.
KNOWN = (TRANSFORMER, POOLING, NORMALIZE)
POOLING_FILE = f"1_{POOLING}/config.json"
# A flag of a pooling config, and the word for it.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
Sides = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Module:
    """One entry of modules.json: the last word of its class, and its folder."""

    kind: str
    path: str


def modules(sides: Sides) -> list[Module]:
    """Return what modules.json lists, nothing if there is none. FormatError names a bad entry."""
    content = sides.get(MODULES)
    entries = [] if content is None else parse_list(content, MODULES)
    return [_module(entry) for entry in entries]


def _module(entry: object) -> Module:
    given = entry if isinstance(entry, dict) else {}
    kind, path = given.get("type"), given.get("path", "")
    if not isinstance(kind, str) or not isinstance(path, str):
        raise FormatError(f"{MODULES} holds {entry!r:.120}, expected a module's type and path")
    return Module(kind.rsplit(".", 1)[-1], path)


def check_modules(sides: Sides) -> None:
    """Raise FormatError for a module that cannot be carried along."""
    for module in modules(sides):
        if module.kind not in KNOWN:
            raise FormatError(
                f"{MODULES}: {module.path or module.kind}",
                f"is a {module.kind}, which has weights of its own",
                one_of(KNOWN),
                f"convert with transformers, or take it out of {MODULES} if it is not needed",
            )
        if module.kind == POOLING and _config_of(module) not in sides:
            raise FormatError(
                MODULES,
                f"names {module.path!r:.120}, which has no config.json here",
                "it in a folder such as 1_Pooling",
                "fetch the folder again, from the original repository",
            )


def pooling(sides: Sides) -> dict[str, Any] | None:
    """Return the config of the pooling module, None if there is none."""
    names = [_config_of(module) for module in modules(sides) if module.kind == POOLING]
    content = sides.get(names[0]) if names else None
    return None if content is None else parse_object(content, names[0])


def pooling_modes(config: Mapping[str, Any]) -> list[str]:
    """Return every mode of a pooling config; several are concatenated."""
    word = config.get("pooling_mode")
    words = [word] if isinstance(word, str) else word if isinstance(word, list) else []
    return [*words, *(mode for flag, mode in FLAGS.items() if config.get(flag) is True)]


def prompts(sides: Sides) -> dict[str, str]:
    """Return what is put before a text, by the name of its kind; empty ones are left out."""
    content = sides.get(PROMPTS)
    stated = {} if content is None else parse_object(content, PROMPTS).get("prompts")
    prompts = stated.items() if isinstance(stated, dict) else ()
    return {name: text for name, text in prompts if isinstance(text, str) and text}


def embedder_files(mode: str, width: int) -> dict[str, bytes]:
    """Return modules.json and the pooling config of a model with one mode."""
    kinds = ((TRANSFORMER, ""), (POOLING, POOLING_FILE.split("/", 1)[0]))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    flags = {flag: word == mode for flag, word in FLAGS.items()}
    config = {"word_embedding_dimension": width, **flags, "include_prompt": True}
    contents = ((MODULES, listed), (POOLING_FILE, config))
    return {name: f"{json.dumps(value, indent=2)}\n".encode() for name, value in contents}


def _config_of(module: Module) -> str:
    return f"{module.path}/config.json"
