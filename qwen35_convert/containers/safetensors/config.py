"""The config.json of an artifact: the source's, made true to the tensors that are written.

Text layout: the flat text config with its own class and type. Hub layout: the nested one. The MTP
count, the tie flags (in both places) and `quantization_config` are what the tensors say; the rest
is the source's word for word.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from formats.family.config import Config
from formats.family.layout import Atom
from formats.family.names import HUB
from formats.family.rope import SCALING, Rope
from formats.quant_methods import COMPRESSED
from formats.stored import KEEP
from quant.scheme import Scheme
from qwen35_convert.containers.safetensors.quantization_config import quantization_config
from qwen35_convert.errors import RecipeError

CLASSES = {  # (mixture of experts, hub namespace, headless): (class, model_type)
    (False, False, False): ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    (True, False, False): ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    (False, True, False): ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    (True, True, False): ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    (False, False, True): ("Qwen3_5TextModel", "qwen3_5_text"),
    (True, False, True): ("Qwen3_5MoeTextModel", "qwen3_5_moe_text"),
    (False, True, True): ("Qwen3_5Model", "qwen3_5"),
    (True, True, True): ("Qwen3_5MoeModel", "qwen3_5_moe"),
}
# Fields of the Qwen3-Next dialect that mean nothing to a Qwen3.5 class (all are hard-wired there).
NEXT_ONLY = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
    "intermediate_size",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
)
# Fields that name code to run; the files with it are never carried along.
CODE = ("auto_map", "custom_pipelines")
CARRIED = ("transformers_version", "dtype", "torch_dtype")
# Of the rope block: an older name of rope_type, and what transformers works out if it is absent.
OLDER = ("type",)
WORKED_OUT = ("attention_factor", "beta_fast", "beta_slow", "truncate")


def artifact_config(
    config: Config,
    *,
    namespace: str,
    tied: bool | None,
    mtp_layers: int,
    rows: Sequence[tuple[Atom, Scheme, str]],
    fp8_cache: bool = False,
) -> dict[str, Any]:
    """Return the object to write as config.json.

    tied       whether the embedding is the head; None: the class has no head, the flags stay
    rows       (atom, scheme, stored name of its weight) of everything that is written
    fp8_cache  whether it asks engines for one

    RecipeError for an FP8 cache that the config cannot ask for.
    """
    text = _text_part(config, tied=tied, mtp_layers=mtp_layers)
    hub = namespace == HUB
    name, model_type = CLASSES[config.moe, hub, tied is None]
    if hub:
        body = copy.deepcopy(config.raw) | {"text_config": text}
    else:
        body = {key: config.raw[key] for key in CARRIED if key in config.raw} | text
        body |= config.generation
    class_fields = {"architectures": [name], "model_type": model_type}
    result: dict[str, Any] = class_fields | body | class_fields | _tie_flag(tied)
    for stale in ("quantization_config", "quantization", *CODE):
        result.pop(stale, None)
    if any(scheme.name != KEEP for _, scheme, _ in rows):
        block = quantization_config(rows, tied=tied is True, fp8_cache=fp8_cache)
        result["quantization_config"] = block
    if fp8_cache:
        _check_asked(result.get("quantization_config"))
    return result


def _check_asked(block: dict[str, Any] | None) -> None:
    """Refuse a config that does not ask for an FP8 cache in compressed-tensors' words."""
    key = "quantize.kv_cache"
    if block is None:
        got = "is fp8, but no weight is quantised, and config.json has no quantization_config"
        raise RecipeError(key, got, "none, or another quantize.scheme")
    if block["quant_method"] != COMPRESSED:
        got = f"is fp8, but config.json is that of {block['quant_method']}"
        expected = "none, or quantize.dialect compressed-tensors, which names the cache"
        raise RecipeError(key, got, expected)


def _tie_flag(tied: bool | None) -> dict[str, bool]:  # noqa: FBT001 - the flag itself
    return {} if tied is None else {"tie_word_embeddings": tied}


def _text_part(config: Config, *, tied: bool | None, mtp_layers: int) -> dict[str, Any]:
    text = copy.deepcopy(config.text)
    for stale in ("quantization_config", "quantization"):
        text.pop(stale, None)
    if text.get("model_type") == "qwen3_next":
        text = {key: value for key, value in text.items() if key not in NEXT_ONLY}
    text["model_type"] = CLASSES[config.moe, False, False][1]
    text["layer_types"] = list(config.layer_types)
    text |= _tie_flag(tied)
    if text.get(SCALING):
        del text[SCALING]  # where it is what counts, the block that is written says the same
    text["rope_parameters"] = _rope(config.rope)
    if mtp_layers or "mtp_num_hidden_layers" in text:
        text["mtp_num_hidden_layers"] = mtp_layers
    if text.get("mtp_use_dedicated_embeddings"):
        text["mtp_use_dedicated_embeddings"] = False  # one of its own is never written
    return text


def _rope(rope: Rope) -> dict[str, Any]:
    """Return the block as it was stated, and what its absent fields come to.

    What transformers works out from others is left to it.
    """
    stated = {key: value for key, value in rope.stated.items() if key not in OLDER}
    known = {key: value for key, value in rope.as_dict().items() if key not in WORKED_OUT}
    return known | stated | {"rope_type": rope.kind}
