"""How tokenizer_config.json and special_tokens_map.json differ: special tokens, their use, length.

Traps: transformers moves fields between the two and to tokenizer.json, and renames
additional_special_tokens; a list of them that names another token makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.side_names import SPECIAL_TOKENS, TOKENIZER_CONFIG
from qwen35_convert.containers.safetensors.sides.fields import Fields, token
from qwen35_convert.containers.safetensors.sides.processors import PROCESSOR_CLASS
from qwen35_convert.containers.safetensors.sides.reader import Sides
from qwen35_convert.containers.safetensors.sides.tokenizer import added_tokens, said
from qwen35_convert.difference import differences
from qwen35_convert.planning.token_names import OF_IMAGES

# They all obey tokenizer.json of a Qwen3.5.
CLASSES = frozenset(
    {"Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer"}
    | {"PreTrainedTokenizerFast", "TokenizersBackend", None}
)
LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
DECODER, LENGTH, CLASS = "added_tokens_decoder", "model_max_length", "tokenizer_class"
ENDLESS = 10**30
# What processors put in the place of an image or a video where no field names it.
USUAL = dict(OF_IMAGES.values())
SETTINGS = Fields(
    absent={
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "auto_map": None,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": None,
        "errors": "replace",
        "fast_tokenizer_files": None,
        "fix_mistral_regex": False,
        "pad_token": None,
        "processor_class": PROCESSOR_CLASS,
        "split_special_tokens": False,
        "unk_token": None,
        LENGTH: ENDLESS,
        CLASS: None,
    },
    records=frozenset(
        {*LISTS, DECODER, "chat_template", "backend", "is_local", "local_files_only", "use_fast"}
        | {"name_or_path", "tokenizer_file", "vocab_file", "merges_file", "transformers_version"}
        # which end of a batch is filled: no engine's answer depends on it
        | {"padding_side", "special_tokens_map_file", "from_slow", "legacy"}
    ),
)


def tokenizer_config(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare tokenizer_config.json, but for its template."""
    if not theirs.has(TOKENIZER_CONFIG):
        return
    yield from SETTINGS.differences(_settings(ours, theirs), _settings(theirs, theirs))
    yield from _lists(ours.object(TOKENIZER_CONFIG), theirs)
    yield from _of_model(ours, theirs)
    yield from _decoder(ours.object(TOKENIZER_CONFIG).get(DECODER), theirs)


def special_tokens(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Hold special_tokens_map.json against the special tokens of the source."""
    if not theirs.has(TOKENIZER_CONFIG):
        return
    stated, expected = ours.object(SPECIAL_TOKENS), _settings(theirs, theirs)
    for key, value in stated.items():
        if key not in LISTS:
            yield from differences(token(value), token(expected.get(key)), key)
    yield from _lists(stated, theirs)


def _settings(sides: Sides, source: Sides) -> dict[str, Any]:
    """Return the fields in one spelling; special tokens may stand in a file of their own."""
    config = {k: v for k, v in sides.object(TOKENIZER_CONFIG).items() if v is not None}
    special = {k: v for k, v in sides.object(SPECIAL_TOKENS).items() if k not in LISTS}
    fields = special | config
    spelled = {k: token(v) if k.endswith("_token") else v for k, v in fields.items()}
    return spelled | {LENGTH: _length(spelled, source), CLASS: _class(spelled.get(CLASS))}


def _length(config: Mapping[str, Any], source: Sides) -> Any:
    """Return how much text is taken: engines take no more than config.json says."""
    most = source.checkpoint.config.text.get("max_position_embeddings", ENDLESS)
    length = config.get(LENGTH, ENDLESS)
    plain = all(isinstance(value, int | float) for value in (most, length))
    return min(most, length) if plain else length


def _class(name: Any) -> Any:
    return "Qwen2Tokenizer" if isinstance(name, str | None) and name in CLASSES else name


def _lists(config: Mapping[str, Any], theirs: Sides) -> Iterator[str]:
    """Yield the special tokens that the source has not, or does not call special."""
    known = [token["content"] for token in added_tokens(theirs).values() if token.get("special")]
    known += _listed(theirs.object(TOKENIZER_CONFIG)) + _listed(theirs.object(SPECIAL_TOKENS))
    for text in _listed(config):
        if text not in known:
            yield f"lists {text!r:.80} as a special token, which the source does not"


def _listed(config: Mapping[str, Any]) -> list[Any]:
    lists = [config.get(name) for name in LISTS]
    values = [text for side in lists if isinstance(side, list) for text in side]
    return [*map(token, values), *_named(config).values()]


def _of_model(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare the tokens that fields name: processors put them in the place of an image."""
    expected = USUAL | _named(theirs.object(TOKENIZER_CONFIG))
    for name, text in _named(ours.object(TOKENIZER_CONFIG)).items():
        if name in expected:
            yield from differences(text, expected[name], name)


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens of a model by the fields that name them, in a list or beside it."""
    lists = [one for one in map(config.get, LISTS) if isinstance(one, dict)]
    beside = {name: text for name, text in config.items() if _is_of_model(name, text)}
    return {name: token(text) for part in (*lists, beside) for name, text in part.items()}


def _is_of_model(name: str, text: Any) -> bool:
    """Whether a field names a special token of a model: image_token, and any other of that form."""
    return name.endswith("_token") and name not in SETTINGS.absent and text is not None


def _decoder(stated: Any, theirs: Sides) -> Iterator[str]:
    """Compare the added tokens; files without them leave them to tokenizer.json."""
    if isinstance(stated, dict):
        listed = theirs.object(TOKENIZER_CONFIG).get(DECODER)
        tokens = added_tokens(theirs)
        expected = _flags(listed) if isinstance(listed, dict) else tokens
        yield from differences(_flags(stated), dict(expected), DECODER)


def _flags(tokens: Mapping[str, Any]) -> dict[str, Any]:
    return {i: said(one) if isinstance(one, dict) else one for i, one in tokens.items()}
