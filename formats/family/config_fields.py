"""What a config.json of the family may say: fields of sizes, what is hard-wired, bounds.

Source: transformers' configuration classes `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`,
`Qwen3NextConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# symbol: (field, default of transformers' class; None: there is no sensible one)
Fields = dict[str, tuple[str, int | None]]
# an object of config.json, what stands before the names of its fields, and these
Group = tuple[Mapping[str, Any], str, Fields]
TEXT_FIELDS: Fields = {
    "V": ("vocab_size", None),
    "H": ("hidden_size", None),
    "NH": ("num_attention_heads", None),
    "NKV": ("num_key_value_heads", None),
    "HD": ("head_dim", 256),
    "NK": ("linear_num_key_heads", 16),
    "NV": ("linear_num_value_heads", 32),
    "DK": ("linear_key_head_dim", 128),
    "DV": ("linear_value_head_dim", 128),
    "K": ("linear_conv_kernel_dim", 4),
}
DENSE_FIELDS: Fields = {"I": ("intermediate_size", None)}
MOE_FIELDS: Fields = {
    "E": ("num_experts", None),
    "TOPK": ("num_experts_per_tok", None),
    "F": ("moe_intermediate_size", None),
    "S": ("shared_expert_intermediate_size", None),
}
VISION_FIELDS: Fields = {
    "vD": ("depth", None),
    "vH": ("hidden_size", None),
    "vI": ("intermediate_size", None),
    "vNH": ("num_heads", None),
    "vC": ("in_channels", 3),
    "vP": ("patch_size", 16),
    "vT": ("temporal_patch_size", 2),
    "vM": ("spatial_merge_size", 2),
    "vO": ("out_hidden_size", None),
    "vN": ("num_position_embeddings", 2304),
}

# symbol: name of the field in config.json, `text_config.` left out
FIELD_NAMES = {s: field for s, (field, _) in (TEXT_FIELDS | DENSE_FIELDS | MOE_FIELDS).items()} | {
    symbol: f"vision_config.{field}" for symbol, (field, _) in VISION_FIELDS.items()
}
ORIGIN = "config.json"

# model_type of the text part: is it a mixture of experts?
TEXT_TYPES = {"qwen3_5_text": False, "qwen3_5_moe_text": True, "qwen3_next": True}
OUTER_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ABSENT = " (absent, default)"  # follows a field in `Config.fields`
# Classes without a head; what is made of their hidden states, files beside the tensors say.
BASE_CLASSES = (
    "Qwen3_5TextModel", "Qwen3_5MoeTextModel", "Qwen3_5Model", "Qwen3_5MoeModel", "Qwen3NextModel",
)  # fmt: skip
LAYER_TYPES = ("linear_attention", "full_attention")
DEFAULT_INTERVAL = 4
MAX_SIZE = (1 << 31) - 1
# Bounds on how many tensors a config can promise: the largest release has 92 layers x 512 experts.
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 18

# (whole, part): fields of which the one must be a multiple of the other
MULTIPLES = (("NH", "NKV"), ("NV", "NK"), ("vH", "vNH"))

# What the architecture has hard-wired: (field, accepted values, what it means otherwise)
HARD_WIRED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("attn_output_gate", (True,), "attention without an output gate"),
    ("output_gate_type", ("silu", "swish"), "another gate in the delta rule (qwen4_exp)"),
    ("hidden_act", ("silu",), "another activation"),
    ("attention_bias", (False,), "biased attention"),
    ("norm_topk_prob", (True,), "router weights that are not renormalised"),
    ("decoder_sparse_step", (1,), "dense layers between the sparse ones"),
    ("mlp_only_layers", ([],), "dense layers between the sparse ones"),
)

# What transformers takes out of a config for how to generate (`GenerationConfig`), where
# generation_config.json is absent.
GENERATION_FIELDS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "stop_strings", "max_length", "max_new_tokens", "min_length",
    "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size", "num_beams",
    "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping",
    "num_return_sequences", "guidance_scale",
)  # fmt: skip


def interval_types(interval: int, count: int) -> tuple[str, ...]:
    """Return the types of `count` layers of which every `interval`-th has full attention."""
    return tuple(LAYER_TYPES[(i + 1) % interval == 0] for i in range(count))
