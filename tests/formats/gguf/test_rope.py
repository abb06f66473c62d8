"""Rope scaling in a GGUF file: llama.cpp's keys, what they cannot say, what is read of them."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

from formats.errors import FormatError
from formats.family.config import Config, read_config
from formats.gguf.config import config_from_metadata
from formats.gguf.header import Kv
from formats.gguf.metadata import text_metadata
from formats.gguf.rope import rope_notes
from formats.tensor import TensorInfo
from tests.checkpoints import text_config
from tests.formats.family.test_rope import FORMS, YARN

PREFIX = "qwen35.rope."


def config(block: dict[str, Any]) -> Config:
    return read_config(text_config(linear_value_head_dim=64, rope_parameters=block))


def written(block: dict[str, Any]) -> dict[str, Kv]:
    pairs = text_metadata(config(block), about={}, file_type=32, mtp_layers=0)
    return {kv.key: kv for kv in pairs}


def scaling(block: dict[str, Any]) -> list[tuple[str, str, Any]]:
    start = f"{PREFIX}scaling."
    return [(kv.key.removeprefix(start), kv.kind, kv.value) for kv in written(block).values()
            if kv.key.startswith(start)]  # fmt: skip


def read(block: dict[str, Any], **changes: Any) -> Config:
    """Return the config of the file of a block, with some keys under `rope.` changed."""
    pairs = written(block)
    for key, value in changes.items():
        kind = {str: "string", int: "uint32"}.get(type(value), "float32")
        name = PREFIX + key.replace("__", ".")
        pairs[name] = Kv(name, kind, value)
        if value is None:
            del pairs[name]
    infos = {"token_embd.weight": TensorInfo("token_embd.weight", "BF16", (256, 128))}
    return read_config(config_from_metadata(pairs, infos))


BASE = [("type", "string", "yarn"), ("factor", "float32", 4.0),
        ("original_context_length", "uint32", 1024)]  # fmt: skip
USUAL = 0.1 * log(4) + 1


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (FORMS["default"], []),
        (FORMS["linear"], [("type", "string", "linear"), ("factor", "float32", 2.5)]),
        (FORMS["dynamic"], []),
        (YARN, BASE),
        (YARN | {"attention_factor": USUAL}, [*BASE, ("yarn_attn_factor", "float32", USUAL)]),
        (
            YARN | {"attention_factor": 1.5},
            [*BASE, ("yarn_attn_factor", "float32", 1.5), ("attn_factor", "float32", 1.5 / USUAL)],
        ),
        (
            YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            [*BASE, ("yarn_attn_factor", "float32", 1.0), ("attn_factor", "float32", 1 / USUAL)],
        ),
        (
            YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
            [*BASE, ("yarn_beta_fast", "float32", 16.0), ("yarn_beta_slow", "float32", 2.0)],
        ),
    ],
)
def test_the_keys_are_those_of_llama_cpps_converter(block, expected):
    assert scaling(block) == expected


def test_they_stand_before_the_sections():
    keys = list(written(YARN | {"mrope_section": [2, 1, 1]}))
    assert keys.index(f"{PREFIX}scaling.original_context_length") + 1 == keys.index(
        f"{PREFIX}dimension_sections"
    )


@pytest.mark.parametrize("kind", ["longrope", "llama3", "proportional"])
def test_what_no_file_can_say_is_refused(kind):
    with pytest.raises(FormatError, match=f"rope_type '{kind}' has no place .*expected 'default'"):
        written(FORMS[kind])


def test_a_ramp_between_whole_dimensions_alone_is_said():
    with pytest.raises(FormatError, match="truncate false"):
        written(YARN | {"truncate": False})


def test_notes_say_what_llama_cpp_does_otherwise():
    assert list(rope_notes(config(YARN))) == []
    (said,) = rope_notes(config(YARN | {"beta_fast": 16.0}))
    assert "--yarn-beta-fast 16" in said
    (said,) = rope_notes(config(FORMS["dynamic"]))
    assert "beyond it llama.cpp does not scale" in said


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_factor": 1.5},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
    ],
)
def test_yarn_comes_back(changes):
    block = YARN | changes | {"mrope_section": [2, 1, 1]}
    got, expected = read(block).rope.as_dict(), config(block).rope.as_dict()
    assert got == pytest.approx(expected, rel=1e-6)


def test_linear_comes_back():
    assert read(FORMS["linear"]).rope.scaling == config(FORMS["linear"]).rope.scaling


@pytest.mark.parametrize(
    ("block", "changes", "expected"),
    [
        (FORMS["default"], {"scaling__factor": 4.0}, "linear"),
        (FORMS["default"], {"scale_linear": 4.0}, "linear"),
        (FORMS["default"], {"scaling__factor": 1.0}, "default"),
        (FORMS["default"], {"scaling__type": "none", "scaling__factor": 4.0}, "default"),
        (FORMS["default"], {"scaling__type": "linear"}, "default"),
        (YARN, {"scaling__original_context_length": None}, "yarn"),
    ],
)
def test_absent_keys_mean_what_llama_cpp_takes_them_for(block, changes, expected):
    rope = read(block, **changes).rope
    assert rope.kind == expected
    if expected == "yarn":
        assert rope.scaling["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scaling__type": "longrope"}, "scaling.type is 'longrope', expected 'none'"),
        ({"scaling__type": 3}, "scaling.type is 3"),
        ({"scaling__factor": 4}, "scaling.factor is 4 .uint32., expected a positive float"),
        ({"scaling__type": "none", "scaling__attn_factor": 1.5}, "attn_factor is 1.5, expected 1"),
        ({"scaling__original_context_length": 0}, "original_context_length is 0"),
    ],
)
def test_keys_that_config_json_cannot_say_are_refused(changes, reason):
    with pytest.raises(FormatError, match=reason):
        read(YARN, **changes)
