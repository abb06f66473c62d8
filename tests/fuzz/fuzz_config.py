"""Fuzzing of config.json: `python -m tests.fuzz.fuzz_config --seconds 600`."""

from __future__ import annotations

import json

from formats.errors import FormatError
from formats.family.config import read_config
from formats.family.config_fields import MAX_EXPERTS, MAX_LAYERS
from formats.json_file import parse_object
from tests.fuzz.loop import main

MODULES = ("formats.json_file", "formats.family.config")
WORDS = (
    b'"model_type":',
    b'"qwen3_5_text"',
    b'"qwen3_5_moe_text"',
    b'"qwen3_next"',
    b'"text_config":',
    b'"vision_config":',
    b'"layer_types":',
    b'"linear_attention"',
    b'"full_attention"',
    b'"num_hidden_layers":',
    b'"num_experts":',
    b'"rope_parameters":',
    b'"rope_theta":',
    b'"mrope_section":',
    b'"tie_word_embeddings":',
    b'"mtp_num_hidden_layers":',
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"1e400",
    b"NaN",
    b"-1",
    b"0.5",
    b"\\ud800",
    b'"mlp_only_layers":',
)


def TestOneInput(data: bytes) -> None:
    """Read a config; what is accepted is bounded and can be written again."""
    try:
        raw = parse_object(data, "config.json")
        config = read_config(raw)
    except FormatError:
        return
    assert json.loads(json.dumps(raw, ensure_ascii=False).encode()) == raw
    layers = len(config.layer_types)
    assert 1 <= layers <= MAX_LAYERS >= config.mtp_layers
    assert config.sizes.get("E", 0) * layers <= MAX_EXPERTS
    assert config.quantization is None or isinstance(config.quantization, dict)


if __name__ == "__main__":
    main("config", MODULES, TestOneInput, WORDS)
