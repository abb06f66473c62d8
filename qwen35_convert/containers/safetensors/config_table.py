"""What engines read of config.json: what an absent field means, and which fields nobody obeys.

A field that no table names may be obeyed by some engine, so an artifact may neither add it, lose it
nor change it; it may say what means nothing (`NEUTRAL`).

Sources: transformers' `Qwen3_5TextConfig`, `Qwen3_5VisionConfig`, `Qwen3_5Config` at 5.24 and its
`PretrainedConfig` at 4.57 and 5.24; vLLM at 0.33, SGLang at 0.5.23, mlx-lm, llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.family.config_fields import (
    DENSE_FIELDS,
    HARD_WIRED,
    MOE_FIELDS,
    TEXT_FIELDS,
    VISION_FIELDS,
)

Values = tuple[Any, ...]

# Where a file came from, how it was trained, how an engine computes the same numbers.
RECORDS = frozenset(
    {"transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "model_name"}
    | {"unsloth_version", "unsloth_fixed", "license", "license_name", "license_link"}
    | {"initializer_range", "router_aux_loss_coef", "finetuning_task", "id2label", "label2id"}
    | {"use_cache", "return_dict", "output_attentions", "output_hidden_states"}
    | {"attn_implementation", "_attn_implementation", "_attn_implementation_autoset"}
    | {"max_window_layers"}  # says something only beside use_sliding_window
)
# Of these, what transformers 5 takes, which refuses the config for any other.
RECORD_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "initializer_range": ((float,), "a number with a point"),
    "router_aux_loss_coef": ((float,), "a number with a point"),
    "use_cache": ((bool,), "true or false"),
    "id2label": ((dict, type(None)), "an object"),
}
# What a mixture of experts in every layer has no use for.
MOE_RECORDS = frozenset({"intermediate_size"})
# What other checks judge by the tensors, or `config_rules` by more than one field.
JUDGED_ELSEWHERE = frozenset(
    {"architectures", "model_type", "quantization_config", "tie_word_embeddings"}
    | {"text_config", "vision_config", "layer_types", "full_attention_interval"}
    | {"mtp_num_hidden_layers", "dtype", "torch_dtype", "rope_parameters", "rope_scaling"}
    | {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "rope_type"}
)
# What a conversion may leave out, whatever it says: code to run, how the source was quantised.
MAY_GO = frozenset({"auto_map", "custom_pipelines", "quantization", "compression_config"})
# What an artifact may say where its source says nothing: vLLM would keep the state in BF16.
MAY_COME: Mapping[str, Values] = {"mamba_ssm_dtype": ("float32",)}

# Values that mean the same as an absent field, of a field that is not below.
NEUTRAL: Values = (None, False, 0, 0.0, [], {}, "")
# Every number is a token.
TOKENS = (
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
# What transformers 4 wrote into every part of a config, and took for how to generate.
GENERATION: dict[str, Values] = {
    "max_length": (None, 20),
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "temperature": (None, 1.0),
    "top_k": (None, 50),
    "top_p": (None, 1.0),
    "typical_p": (None, 1.0),
    "repetition_penalty": (None, 1.0),
    "length_penalty": (None, 1.0),
}


def _sizes(*tables: Mapping[str, tuple[str, int | None]]) -> dict[str, Values]:
    rows = (row for table in tables for row in table.values())
    return {field: () if default is None else (default,) for field, default in rows}


# field: the values that mean the same as its absence; transformers 5 refuses a null where its
# class has a number
MODEL: dict[str, Values] = (
    dict.fromkeys(TOKENS, (None,))
    | GENERATION
    | _sizes(DENSE_FIELDS, MOE_FIELDS, TEXT_FIELDS)
    | {field: accepted for field, accepted, _ in HARD_WIRED}  # vLLM takes a null for false
    | {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "num_hidden_layers": (),
        "rms_norm_eps": (1e-6,),
        "max_position_embeddings": (32768,),
        "mamba_ssm_dtype": (),
        "is_causal": (None, True),
        "pretraining_tp": (None, 1),
        "image_token_id": (248056,),
        "video_token_id": (248057,),
        "vision_start_token_id": (248053,),
        "vision_end_token_id": (248054,),
    }
)
VISION: dict[str, Values] = (
    GENERATION
    | _sizes(VISION_FIELDS)
    | {
        # transformers 5 renames it when it saves
        "model_type": (None, "qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"),
        "hidden_act": ("gelu_pytorch_tanh",),
        "rope_parameters": (
            None,
            {"rope_type": "axial", "rope_theta": 10000.0},
        ),
    }
)
