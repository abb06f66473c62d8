"""How generation_config.json differs: where a text ends, how tokens are drawn.

transformers leaves out what is its default; vLLM and SGLang obey what is stated, and have the same
defaults but for top_k (50, none).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.side_names import GENERATION, TOKENIZER_CONFIG
from qwen35_convert.containers.safetensors.sides.fields import Fields, token
from qwen35_convert.containers.safetensors.sides.reader import Sides
from qwen35_convert.containers.safetensors.sides.tokenizer import added_tokens
from qwen35_convert.difference import differences, same

ENDS = "eos_token_id"
# Ids that a text neither ends nor begins with; compared where both sides state them.
OTHER_IDS = ("pad_token_id", "bos_token_id")
DRAWING = Fields(
    absent={
        "do_sample": False,
        "early_stopping": False,
        "encoder_no_repeat_ngram_size": 0,
        "length_penalty": 1.0,
        "max_length": 20,
        "min_length": 0,
        "min_p": 0.0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "renormalize_logits": False,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "typical_p": 1.0,
    },
    records=frozenset(
        {ENDS, "transformers_version", "_from_model_config", "use_cache", "_commit_hash"}
        | {"output_attentions", "output_hidden_states", "output_logits", "output_scores"}
        | {"return_dict_in_generate", "trust_remote_code"}
    ),
    every=True,
)


def generation(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare generation_config.json; a source without one says in config.json where texts end."""
    got, expected = ours.object(GENERATION), theirs.object(GENERATION)
    if not theirs.has(GENERATION):
        yield from _ends_of_config(got, theirs)
    else:
        yield from differences(_ids(got), _ids(expected), ENDS, _whole)
    shared = {k for k in OTHER_IDS if got.get(k) is not None and expected.get(k) is not None}
    left = {*OTHER_IDS} - shared
    yield from DRAWING.differences(_without(got, left), _without(expected, left))


def _whole(got: Any, expected: Any) -> bool:
    """Whether two ids are the same whole number."""
    return type(got) is type(expected) and same(got, expected)


def _ids(config: Mapping[str, Any]) -> list[Any]:
    """Return the ends in order, each once: one may stand without brackets."""
    stated = config.get(ENDS)
    listed = stated if isinstance(stated, list) else [stated]
    once = {str(one): one for one in listed if one is not None}
    return [once[key] for key in sorted(once)]


def _ends_of_config(got: Mapping[str, Any], theirs: Sides) -> Iterator[str]:
    """Hold the ends against config.json's; the end of a turn, which tokenizers name, may join."""
    expected = _ids(theirs.checkpoint.config.text) or _ids(theirs.checkpoint.config.raw)
    turn = token(theirs.object(TOKENIZER_CONFIG).get("eos_token"))
    tokens = added_tokens(theirs).items()
    allowed = [int(i) for i, entry in tokens if entry["content"] == turn] + expected
    ends = _ids(got)
    lost = [one for one in expected if one not in ends]
    if ends and (lost or any(one not in allowed for one in ends)):
        yield from differences(ends, expected, ENDS)


def _without(config: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}
