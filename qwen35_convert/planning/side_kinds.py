"""What engines need the fields of config.json and of side files to be: a table, and its walk.

An artifact carries these fields along. One that is of another kind, such as a token id that is
text, converts and then fails in every engine, or is ignored by some. A field that is absent or null
is nobody's mistake here, but for a null where transformers' class has a value (`NOT_NULL`); what
contradicts the weights is found elsewhere. processor_config.json nests the fields of preprocessors.

Sources: transformers' `Qwen3_5TextConfig` and its kin (strict dataclasses, tried at 5.24 with a
null in each field; its rope looks up a type that is null) and `Qwen2VLImageProcessor` (divides by
image_std; `size` has edges, which older files call pixels); tokenizers' `AddedToken` (flags are no
null); vLLM's `SamplingParams`, whose ranges each request of a model must keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config
from formats.side_names import (
    CONFIG,
    GENERATION,
    IMAGES,
    PROCESSOR,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    VIDEOS,
)

MEND = "correct it in the source, or take the file from the original repository"
TYPES = frozenset(
    {"auto", "bfloat16", "float", "float16", "float32", "float64", "half", "float8_e4m3fn"}
)


class Kind(NamedTuple):
    """What a value may be, and how a message says that."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any, least: int | None = None) -> bool:
    return type(value) is int and (least is None or value >= least)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _above_0(value: Any) -> bool:
    return _number(value) and value > 0


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _token(value: Any) -> bool:
    """Whether it is what `AddedToken` takes: text, and flags."""
    flags = (value[flag] for flag in FLAGS if flag in value) if isinstance(value, dict) else (None,)
    return all(type(one) is bool for one in flags) and isinstance(value.get("content"), str)


def _all(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


def _dtype(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_dtype, value.values()))
    return isinstance(value, str) and value.removeprefix("torch.") in TYPES


FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
IDS = Kind("the id of a token, or a list of them", lambda v: _whole(v) or _all(v, _whole))
PLACE = Kind("the id of a token", lambda v: _whole(v, 0))
SIZE = Kind("a whole number from 1", lambda v: _whole(v, 1))
MOST = Kind("a whole number from -1", lambda v: _whole(v, -1))
NUMBER = Kind("a number", _number)
FROM_0 = Kind("a number from 0", lambda v: _number(v) and v >= 0)
ABOVE_0 = Kind("a number above 0", _above_0)
SHARE = Kind("a number from 0 to 1", _share)
NUMBERS = Kind("three numbers", lambda v: _all(v, _number) and len(v) == 3)
DIVISORS = Kind("three numbers above 0", lambda v: NUMBERS.holds(v) and min(v) > 0)
EDGES = Kind(
    "an object of numbers above 0",
    lambda v: isinstance(v, dict) and all(one is None or _above_0(one) for one in v.values()),
)
FLAG = Kind("true or false", lambda v: v in (True, False))
BOOL = Kind("true or false", lambda v: type(v) is bool)
NAMED = Kind("text, or an object with its content", lambda v: isinstance(v, str) or _token(v))
ONE = Kind("the id of a token", _whole)
DTYPE = Kind("a type of torch, such as bfloat16", _dtype)
TEXT = Kind("text", lambda v: isinstance(v, str) and bool(v))
WHOLES = Kind("a list of whole numbers", lambda v: _all(v, lambda one: _whole(one, 0)))
TEXTS = Kind(
    "text, or a list of texts",
    lambda v: isinstance(v, str) or _all(v, lambda one: isinstance(one, str)),
)
ADDED = Kind(
    "an object of tokens, each with its content and with flags that are true or false",
    lambda v: isinstance(v, dict) and all(map(_token, v.values())),
)
OBJECT = Kind("an object", lambda v: isinstance(v, dict))

Fields = dict[str, Kind]
TOKENS: Fields = {"eos_token_id": IDS, "bos_token_id": IDS, "pad_token_id": IDS}
OF_ANY_PART: Fields = TOKENS | {"dtype": DTYPE, "torch_dtype": DTYPE}
OF_TEXT: Fields = {
    "max_position_embeddings": SIZE,
    "attention_dropout": NUMBER,
    "initializer_range": NUMBER,
    "use_cache": FLAG,
    "mamba_ssm_dtype": DTYPE,
    "full_attention_interval": SIZE,
}
OF_ROPE: Fields = {"mrope_interleaved": FLAG}
OF_VISION: Fields = {
    "hidden_act": TEXT,
    "deepstack_visual_indexes": WHOLES,
    "initializer_range": NUMBER,
}
OF_WHOLE: Fields = dict.fromkeys(
    ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), PLACE
)
OF_IMAGES: Fields = {
    "image_processor_type": TEXT,
    "video_processor_type": TEXT,
    "patch_size": SIZE,
    "temporal_patch_size": SIZE,
    "merge_size": SIZE,
    "image_mean": NUMBERS,
    "image_std": DIVISORS,
    "rescale_factor": NUMBER,
    "size": EDGES,
    "min_pixels": SIZE,
    "max_pixels": SIZE,
}
# What is no null, by the part of a config.
ROPE = "rope_parameters"
NOT_NULL: Mapping[str, tuple[str, ...]] = {
    "text": (
        *("hidden_act", "attn_output_gate", "norm_topk_prob", "attention_bias", "head_dim"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "rms_norm_eps", "use_cache"),
        *("max_position_embeddings", "initializer_range", "attention_dropout"),
        *("output_router_logits", "router_aux_loss_coef"),
    ),
    "rope": ("rope_type",),
    "vision": (
        *("hidden_act", "in_channels", "patch_size", "spatial_merge_size", "temporal_patch_size"),
        "initializer_range",
    ),
    "whole": tuple(OF_WHOLE),
}
SPECIAL: Fields = {
    f"{kind}_token": NAMED for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}
OF_FILES: Mapping[str, Fields] = {
    GENERATION: TOKENS
    | {
        "pad_token_id": ONE,
        "do_sample": FLAG,
        "temperature": FROM_0,
        "top_k": MOST,
        "top_p": SHARE,
        "min_p": SHARE,
        "repetition_penalty": ABOVE_0,
        "max_length": SIZE,
        "max_new_tokens": SIZE,
        "stop_strings": TEXTS,
    },
    IMAGES: OF_IMAGES,
    VIDEOS: OF_IMAGES,
    PROCESSOR: {"image_processor": OBJECT, "video_processor": OBJECT},
    TOKENIZER_CONFIG: SPECIAL
    | {
        "added_tokens_decoder": ADDED,
        "add_bos_token": BOOL,
        "add_eos_token": BOOL,
        "add_prefix_space": BOOL,
        "clean_up_tokenization_spaces": BOOL,
        "errors": TEXT,
        "model_max_length": ABOVE_0,
        "split_special_tokens": BOOL,
        "tokenizer_class": TEXT,
    },
    SPECIAL_TOKENS: SPECIAL,
}
# What of a side file is no null: transformers looks into it.
FILLED: Mapping[str, tuple[str, ...]] = {
    TOKENIZER_CONFIG: ("added_tokens_decoder", "split_special_tokens")
}
# What is nested in a file: the fields of each part.
NESTED: Mapping[str, Fields] = {"image_processor": OF_IMAGES, "video_processor": OF_IMAGES}


def check_kinds(name: str, value: Any) -> None:
    """Raise FormatError for a field of a side file that is of another kind; value: its object."""
    fields = OF_FILES.get(name, {})
    _check_filled(name, value, "", FILLED.get(name, ()))
    _check(name, value, "", fields)
    for part in fields.keys() & NESTED.keys():
        _check(name, value.get(part) or {}, f"{part}.", NESTED[part])


def check_config(source: Checkpoint) -> None:
    """Raise FormatError for a field of config.json that is of another kind."""
    for part, where, fields, filled in _parts(source.config):
        _check_filled(CONFIG, part, where, filled)
        _check(CONFIG, part, where, fields)


Part = tuple[Mapping[str, Any], str, Fields, tuple[str, ...]]
"""An object, what precedes its fields, their kinds, those that are no null."""


def _parts(config: Config) -> Iterator[Part]:
    prefix = "text_config." if config.nested else ""
    yield config.text, prefix, OF_ANY_PART | OF_TEXT, NOT_NULL["text"]
    rope = config.text.get(ROPE)
    if isinstance(rope, dict):
        yield rope, f"{prefix}{ROPE}.", OF_ROPE, NOT_NULL["rope"]
    if config.vision is not None:
        yield config.vision, "vision_config.", OF_VISION, NOT_NULL["vision"]
    yield config.raw, "", OF_ANY_PART | OF_WHOLE, NOT_NULL["whole"] if config.nested else ()


def _check_filled(
    name: str, value: Mapping[str, Any], prefix: str, filled: tuple[str, ...]
) -> None:
    for field in filled:
        if value.get(field, "absent") is None:
            got = f"{prefix}{field} is null"
            raise FormatError(name, got, "its value, or no such field", MEND)


def _check(name: str, value: Mapping[str, Any], prefix: str, fields: Fields) -> None:
    for field, kind in fields.items():
        got = value.get(field)
        if got is not None and not kind.holds(got):
            raise FormatError(name, f"{prefix}{field} is {got!r:.120}", kind.words, MEND)
