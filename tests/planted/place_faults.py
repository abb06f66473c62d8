"""Faults in config.json that only some engines read: other places, other spellings, new fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.planted.artifact import Base
from tests.planted.config_faults import (
    HOMES,
    HUB,
    MOE,
    YARN,
    Change,
    config_fault,
    gone,
    put,
    root,
    vision,
)
from tests.planted.fault import REMOVED, UNOPENED, Fault, Where, in_bases

TIED = in_bases("nano-fp8-block", "nano-fp8-block-hub", "nano-bf16-split")
PLAIN = in_bases("nano-bf16-split", "wide-bf16-split", "moe-bf16-split")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    tables: tuple[tuple[dict[str, tuple[str, Change]], Where, dict[str, Any]], ...] = (
        (SPELLINGS, HOMES, {}),
        (LOST, HOMES, {}),
        (NEW, HOMES, {}),
        (NEW_OF_EXPERTS, MOE, {}),
        (AT_THE_ROOT, HUB, {}),
        (OF_VISION, HUB, {}),
        (UNREADABLE, HOMES, {"codes": UNOPENED}),
        (UNTIED, TIED, {}),
        (UNTIED_IN_PART, in_bases("nano-fp8-block-hub"), {}),
        (NOT_QUANTISED, PLAIN, {"codes": UNOPENED}),
        (QUANTISED_TWICE, _quantised, {}),
        (ALIKE, HOMES, {"receipts": (REMOVED,)}),
    )
    for table, where, more in tables:
        for name, (field, change) in table.items():
            yield config_fault(name, field, change, where, **more)


def _quantised(base: Base) -> bool:
    return HOMES(base) and not PLAIN(base)


def rope(field: str, value: Any) -> Change:
    """Return a change of one rotary field inside the block."""
    return put(f"rope_parameters.{field}", value)


def _scaling_without_theta(_: dict[str, Any], text: dict[str, Any]) -> None:
    """Write the old block beside the new one: transformers takes it, and theta is 10000."""
    block = text["rope_parameters"]
    kept = {key: block[key] for key in ("mrope_section", "mrope_interleaved")}
    text["rope_scaling"] = kept | {"type": "mrope"}


def _without_block(_: dict[str, Any], text: dict[str, Any]) -> None:
    """Write all fields beside the block: transformers looks for sections in the block alone."""
    text |= text.pop("rope_parameters")


def _sparser(_: dict[str, Any], text: dict[str, Any]) -> None:
    del text["layer_types"]
    text["full_attention_interval"] += 1


def _no_type(config: dict[str, Any], text: dict[str, Any]) -> None:
    for part in (config, text):
        part.pop("dtype", None)


def _no_flags(config: dict[str, Any], text: dict[str, Any]) -> None:
    for part in (config, text):
        part.pop("tie_word_embeddings", None)


# name: (field that must be named, change)
SPELLINGS: dict[str, tuple[str, Change]] = {
    "rope-scaling-without-theta": ("rope_scaling", _scaling_without_theta),
    "rope-without-a-block": ("mrope_section|rope_parameters", _without_block),
    "rope-base": ("rotary_emb_base", put("rotary_emb_base", 10000)),
    "rotary-factor-beside-the-block": (
        "partial_rotary_factor",
        put("partial_rotary_factor", 1.0),
    ),
    "rope-factor-of-no-type": ("rope_parameters.factor", rope("factor", 4.0)),
    "rope-type-beside-the-block": ("rope_scaling", put("rope_scaling", {"type": "ntk"})),
    "rope-scaling-as-text": ("rope_scaling", put("rope_scaling", "yarn")),
    "interval-0": ("full_attention_interval", put("full_attention_interval", 0)),
    "interval-as-text": ("full_attention_interval", put("full_attention_interval", "4")),
    "interval-without-layer-types": ("layer_types|layers.", _sparser),
    "type-of-codes": ("dtype", root("dtype", "float8_e4m3fn")),
    "context-as-a-float": ("max_position_embeddings", put("max_position_embeddings", 4096.5)),
    "mtp-layers-of-deepseek": ("num_nextn_predict_layers", put("num_nextn_predict_layers", 2)),
    "quantised-by-an-old-name": (
        "compression_config",
        root("compression_config", {"quant_method": "compressed-tensors"}),
    ),
}
LOST: dict[str, tuple[str, Change]] = {
    "state-type-missing": ("mamba_ssm_dtype", gone("mamba_ssm_dtype")),
    "context-missing": ("max_position_embeddings", gone("max_position_embeddings")),
    "mrope-interleaved-missing": (
        "mrope_interleaved",
        lambda _, text: text["rope_parameters"].pop("mrope_interleaved"),
    ),
    "end-of-text-null": ("eos_token_id", put("eos_token_id", None)),
    "type-missing": ("dtype", _no_type),
    "eps-null": ("rms_norm_eps", put("rms_norm_eps", None)),
    "activation-null": ("hidden_act", put("hidden_act", None)),
}
NEW: dict[str, tuple[str, Change]] = {
    "pad-token-0": ("pad_token_id", put("pad_token_id", 0)),
    "begin-of-text-0": ("bos_token_id", put("bos_token_id", 0)),
    "penalty-of-repetition": ("repetition_penalty", put("repetition_penalty", 1.3)),
    "beams": ("num_beams", put("num_beams", 4)),
    "end-forced": ("forced_eos_token_id", put("forced_eos_token_id", 0)),
    "logits-capped": ("final_logit_softcapping", put("final_logit_softcapping", 30.0)),
    "embedding-scaled": ("embedding_multiplier", put("embedding_multiplier", 12.0)),
    "attention-both-ways": (
        "use_bidirectional_attention",
        put("use_bidirectional_attention", True),
    ),
    "encoder-and-decoder": ("is_encoder_decoder", root("is_encoder_decoder", True)),
    "weights-of-another-file": (
        "transformers_weights",
        root("transformers_weights", "other.safetensors"),
    ),
}
NEW_OF_EXPERTS: dict[str, tuple[str, Change]] = {
    "sigmoid-router": ("scoring_func", put("scoring_func", "sigmoid")),
    "groups-of-experts": ("n_group", put("n_group", 2)),
    "losses-of-the-router": ("output_router_logits", put("output_router_logits", True)),
}
AT_THE_ROOT: dict[str, tuple[str, Change]] = {
    "rope-parameters-at-the-root": (
        "config.json rope_parameters",
        root("rope_parameters", {"rope_type": "default", "rope_theta": 10000}),
    ),
    "yarn-at-the-root": ("config.json rope_scaling", root("rope_scaling", YARN)),
    "layer-types-at-the-root": (
        "layer_types",
        lambda config, text: config.update(layer_types=text["layer_types"][::-1]),
    ),
    "interval-at-the-root": ("full_attention_interval", root("full_attention_interval", 7)),
    "end-of-text-at-the-root": ("eos_token_id", root("eos_token_id", 3)),
    "window-at-the-root": ("sliding_window", root("sliding_window", 512)),
    "mtp-at-the-root": ("mtp_num_hidden_layers", root("mtp_num_hidden_layers", 3)),
    "head-dim-at-the-root": ("head_dim", root("head_dim", 128)),
    "an-unknown-part": ("audio_config", root("audio_config", {"depth": 2})),
}
OF_VISION: dict[str, tuple[str, Change]] = {
    "vision-rope": (
        "vision_config.rope_parameters",
        vision("rope_parameters", {"rope_type": "axial", "rope_theta": 100.0}),
    ),
    "vision-type-float16": ("vision_config.dtype", vision("dtype", "float16")),
    "vision-window": ("vision_config.window_size", vision("window_size", 112)),
    "vision-eps": ("vision_config.layer_norm_eps", vision("layer_norm_eps", 1e-5)),
    "vision-of-another-family": (
        "vision_config.model_type",
        vision("model_type", "siglip_vision_model"),
    ),
    "vision-grid-missing": (
        "vision_config.num_position_embeddings|pos_embed",
        vision("num_position_embeddings", None),
    ),
}
UNREADABLE: dict[str, tuple[str, Change]] = {
    "sections-as-text": ("mrope_section", rope("mrope_section", "[11, 11, 10]")),
    "mtp-as-text": ("mtp_num_hidden_layers", put("mtp_num_hidden_layers", "1")),
    "a-part-as-text": ("vision_config", root("vision_config", "none")),
}
UNTIED: dict[str, tuple[str, Change]] = {
    "tie-flags-missing": ("tie_word_embeddings|no tie flag", _no_flags)
}
UNTIED_IN_PART: dict[str, tuple[str, Change]] = {
    "tie-flag-of-the-text-missing": (
        "text_config.tie_word_embeddings",
        gone("tie_word_embeddings"),
    ),
    "tie-flag-of-the-root-missing": (
        "tie_word_embeddings",
        lambda config, _: config.pop("tie_word_embeddings"),
    ),
}
NOT_QUANTISED: dict[str, tuple[str, Change]] = {
    "quantised-by-mlx-alone": (
        "quantization|mlx",
        root("quantization", {"group_size": 64, "bits": 4}),
    ),
    "quantised-by-bitsandbytes": (
        "bitsandbytes",
        root("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ),
}
QUANTISED_TWICE: dict[str, tuple[str, Change]] = {
    "quantised-by-mlx": ("quantization", root("quantization", {"group_size": 64, "bits": 4})),
}
# Of the same value, but of a type that transformers refuses.
ALIKE: dict[str, tuple[str, Change]] = {
    "end-of-text-as-a-float": (
        "eos_token_id",
        lambda _, text: text.update(eos_token_id=float(text["eos_token_id"])),
    ),
    "context-as-a-float-of-that-value": (
        "max_position_embeddings",
        lambda _, text: text.update(max_position_embeddings=float(text["max_position_embeddings"])),
    ),
}
