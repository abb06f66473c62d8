"""Hostile config.json: wrong types, numbers nobody can mean, words that are no JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.hostile.case import Case, harm_config, harm_file, small_config

NO_SIZES: dict[str, Any] = {
    "negative": -1,
    "zero": 0,
    "over-31-bits": 1 << 31,
    "over-64-bits": 1 << 64,
    "half": 1.5,
    "text": "96",
    "boolean": True,
    "list": [96],
    "object": {"a": 1},
    "other": 7919,
    "long": 10**4000,
}
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "intermediate_size",
    "linear_num_value_heads",
    "linear_conv_kernel_dim",
    "num_hidden_layers",
)
NO_NUMBERS: dict[str, Any] = {
    "negative": -1.0,
    "zero": 0.0,
    "huge": 1e300,
    "text": "1e-6",
    "boolean": True,
    "list": [],
    "object": {},
}
NUMBERS = ("rms_norm_eps", "rope_parameters.rope_theta", "rope_parameters.partial_rotary_factor")
FIELDS: dict[str, dict[str, Any]] = {
    "layers-of-another-kind": {"layer_types": ["linear_attention", "sliding_attention"]},
    "layers-of-numbers": {"layer_types": [0, 1]},
    "layers-of-lists": {"layer_types": [[], []]},
    "layers-are-an-object": {"layer_types": {"0": "linear_attention"}},
    "layers-are-a-text": {"layer_types": "linear_attention"},
    "layers-too-many": {"layer_types": ["linear_attention"] * 100_000},
    "layers-a-million": {"num_hidden_layers": 1_000_000, "layer_types": None},
    "layers-1024": {"num_hidden_layers": 1024, "layer_types": None},
    "layers-2-31": {"num_hidden_layers": (1 << 31) - 1, "layer_types": None},
    "interval-zero": {"layer_types": None, "full_attention_interval": 0},
    "interval-text": {"layer_types": None, "full_attention_interval": "4"},
    "mtp-two-billion": {"mtp_num_hidden_layers": (1 << 31) - 1},
    "mtp-negative": {"mtp_num_hidden_layers": -1},
    "mtp-text": {"mtp_num_hidden_layers": "1"},
    "type-list": {"model_type": ["qwen3_5_text"]},
    "type-object": {"model_type": {}},
    "type-number": {"model_type": 35},
    "type-absent": {"model_type": None},
    "type-other": {"model_type": "llama"},
    "type-escape": {"model_type": "\x1b[2Jqwen"},
    "type-megabyte": {"model_type": "x" * 1_000_000},
    "text-part-list": {"text_config": []},
    "text-part-text": {"text_config": "x"},
    "text-part-empty": {"text_config": {}},
    "text-part-itself-again": {"text_config": {"text_config": {"model_type": "qwen3_5_text"}}},
    "vision-list": {"vision_config": []},
    "vision-empty": {"vision_config": {}},
    "vision-giant": {
        "vision_config": {
            "depth": 1_000_000,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 96,
        }
    },
    "rope-list": {"rope_parameters": []},
    "rope-text": {"rope_parameters": "default"},
    "rope-kind": {"rope_parameters.rope_type": "yarn"},
    "rope-kind-list": {"rope_parameters.rope_type": ["default"]},
    "rope-sections-negative": {"rope_parameters.mrope_section": [-2, 1, 1]},
    "rope-sections-text": {"rope_parameters.mrope_section": "2,1,1"},
    "rope-sections-nested": {"rope_parameters.mrope_section": [[2], 1, 1]},
    "rope-partial-over-one": {"rope_parameters.partial_rotary_factor": 1.5},
    "rope-absent": {"rope_parameters": None},
    "tie-text": {"tie_word_embeddings": "false"},
    "tie-number": {"tie_word_embeddings": 0},
    "tie-true-with-a-head-missing-nothing": {"tie_word_embeddings": []},
    "gate-off": {"attn_output_gate": False},
    "gate-number": {"attn_output_gate": 1},
    "gate-other": {"output_gate_type": "sigmoid"},
    "act-list": {"hidden_act": ["silu"]},
    "bias": {"attention_bias": True},
    "quantised-list": {"quantization_config": [1]},
    "quantised-text": {"quantization_config": "fp8"},
    "quantised-method-list": {"quantization_config": {"quant_method": ["fp8"]}},
    "quantised-method-object": {"quantization_config": {"quant_method": {}}},
    "quantised-method-other": {"quantization_config": {"quant_method": "exl3"}},
    "quantised-block": {"quantization_config": {"quant_method": "fp8", "weight_block_size": "x"}},
    "quantised-block-one": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 1]}
    },
    "quantised-mlx": {"quantization": {"group_size": 64, "bits": 4}},
    "experts-many": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 1 << 30,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    "experts-as-many-as-allowed": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 1 << 14,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    "experts-fewer-than-used": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    "heads-do-not-divide": {"num_attention_heads": 4, "num_key_value_heads": 3},
}
TEXTS = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "number": b"35",
    "text": b'"qwen3_5"',
    "cut": b'{"model_type":',
    "trailing": b"{} x",
    "comment": b"{} // x",
    "nul": b"{}\0",
    "single-quotes": b"{'model_type':'qwen3_5'}",
    "utf-16": '{"a":1}'.encode("utf-16"),
    "utf-16-le": '{"a":1}'.encode("utf-16-le"),
    "bom": b"\xef\xbb\xbf{}",
    "bad-utf-8": b'{"\xe9":1}',
    "deep-lists": b'{"a":' + b"[" * 300_000,
    "deep-objects": b'{"a":' * 300_000,
    "deep-and-closed": b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "twice": b'{"a":1,"a":1}',
    "python": b"__import__('os').system('touch hacked')",
    "pickle": b"\x80\x04cos\nsystem\n.",
    "yaml": b"model_type: qwen3_5\n",
    "binary": bytes(range(256)) * 4,
    "many-objects": b'{"a":[' + b"{}," * 1_000_000 + b"{}]}",
}
# A right config with one word of the text replaced: (what, by what)
WORDS = {
    "nan": b"NaN",
    "infinity": b"Infinity",
    "minus-infinity": b"-Infinity",
    "1e400": b"1e400",
    "minus-1e400": b"-1e400",
    "5000-digits": b"1" * 5000,
    "underscore": b"1_000",
    "hex": b"0x60",
    "plus": b"+1",
    "leading-zero": b"010",
    "dot": b".5",
    "true": b"True",
    "none": b"None",
}


def cases() -> Iterator[Case]:
    """Yield every case of this kind."""
    for field in SIZES:
        for name, value in NO_SIZES.items():
            yield Case("config", f"{field}-{name}", harm_config({field: value}))
    for field in NUMBERS:
        for name, value in NO_NUMBERS.items():
            yield Case("config", f"{field.split('.')[-1]}-{name}", harm_config({field: value}))
    for name, changes in FIELDS.items():
        memory = (192 if name == "experts-as-many-as-allowed" else 64) << 20
        yield Case("config", name, harm_config(changes), memory=memory)
    for name, text in TEXTS.items():
        memory = 32 * len(text) + (64 << 20)
        yield Case("config", f"text-{name}", harm_file("config.json", text), memory=memory)
    for name, word in WORDS.items():
        yield Case("config", f"word-{name}", harm_file("config.json", _with_word(word)))
    surrogate = _with_word(b'"\\ud800"')
    yield Case("config", "word-lone-surrogate", harm_file("config.json", surrogate))


def _with_word(word: bytes) -> bytes:
    """Return the good config with one more field, which nobody reads, of this value."""
    return b'{"extra": ' + word + b", " + json.dumps(small_config()).encode()[1:]
