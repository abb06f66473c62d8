"""The rope block, read as transformers reads it: every form, where it stands, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from formats.errors import FormatError
from formats.family.config import read_config
from formats.family.rope import KINDS
from tests.checkpoints import text_config

Raw = dict[str, Any]
PLAIN: Raw = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
YARN: Raw = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PAIRS = 4
FORMS: dict[str, Raw] = {
    "default": PLAIN,
    "linear": PLAIN | {"rope_type": "linear", "factor": 2.5},
    "dynamic": PLAIN | {"rope_type": "dynamic", "factor": 2},
    "yarn": YARN,
    "longrope": PLAIN
    | {
        "rope_type": "longrope",
        "short_factor": [1.0] * PAIRS,
        "long_factor": [2.0] * PAIRS,
        "original_max_position_embeddings": 1024,
        "factor": 4.0,
    },
    "llama3": PLAIN
    | {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "proportional": PLAIN | {"rope_type": "proportional"},
}


def rope(block: Raw | None, **beside: Any):
    return read_config(text_config(rope_parameters=block, **beside)).rope


def without(block: Raw, *names: str) -> Raw:
    return {key: value for key, value in block.items() if key not in names}


def test_every_kind_of_transformers_is_known():
    assert set(KINDS) == {"default", *ROPE_INIT_FUNCTIONS} == set(FORMS)


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_is_read_with_its_fields(kind):
    read = rope(FORMS[kind])
    assert read.kind == kind
    assert (read.theta, read.partial) == (1e7, 0.25)
    stated = without(FORMS[kind], *PLAIN)
    fields = read.scaling.as_dict() if read.scaling else {}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
    assert plain | stated == plain


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "default"])
def test_a_field_that_a_kind_needs_is_asked_for(kind):
    for name, needed in KINDS[kind].items():
        if needed and name != "original_max_position_embeddings":
            with pytest.raises(FormatError, match=f"{name} is missing.*{kind}"):
                rope(without(FORMS[kind], name, "original_max_position_embeddings"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 1.0},
        {"attention_factor": 1.7},
        {"mscale": 0.8, "mscale_all_dim": 0.5},
        {"mscale": 0.8},
    ],
)
def test_the_attention_factor_of_yarn_is_that_of_transformers(changes):
    config = Qwen3_5TextConfig(rope_parameters=YARN | changes)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert rope(YARN | changes).scaling["attention_factor"] == expected


def test_a_null_factor_of_yarn_is_the_ratio_of_the_contexts():
    """The config of tests says 4096 positions."""
    assert rope(YARN | {"factor": None}).scaling["factor"] == 4.0


@pytest.mark.parametrize(
    ("block", "beside", "length"),
    [
        (YARN, {}, 1024),
        (without(YARN, "original_max_position_embeddings"), {}, 4096),
        (YARN, {"original_max_position_embeddings": 2048}, 2048),
    ],
)
def test_the_original_context_is_found_where_transformers_looks(block, beside, length):
    read = rope(block, **beside).scaling
    assert read["original_max_position_embeddings"] == length
    config = Qwen3_5TextConfig(rope_parameters=dict(block), max_position_embeddings=4096, **beside)
    ROPE_INIT_FUNCTIONS["yarn"](config)
    assert config.rope_parameters["original_max_position_embeddings"] == length


def test_the_older_block_is_read_with_the_theta_beside_it():
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    read = rope(None, rope_scaling=old, rope_theta=10000000, partial_rotary_factor=0.25)
    assert read.as_dict() == rope(YARN).as_dict()


def test_mrope_is_the_default_with_sections():
    read = rope(PLAIN | {"rope_type": "mrope", "mrope_section": [11, 11, 10]})
    assert (read.kind, read.scaling, read.sections) == ("default", None, (11, 11, 10))


def problems(**changes: Any) -> list[str]:
    return [str(p) for p in read_config(text_config(**changes)).problems]


def test_two_blocks_that_differ_are_a_problem():
    """transformers takes rope_scaling alone, and a theta of 10000."""
    scaled = without(YARN, "rope_theta", "partial_rotary_factor")
    assert (
        Qwen3_5TextConfig(rope_parameters=PLAIN, rope_scaling=scaled).rope_parameters["rope_theta"]
        == 10000
    )
    (said,) = problems(rope_parameters=PLAIN, rope_scaling=scaled)
    assert "rope_scaling beside rope_parameters, and they differ" in said
    assert "remove rope_scaling" in said
    for other in (YARN, "yarn", [1]):
        (said,) = problems(rope_parameters=PLAIN, rope_scaling=other)
        assert "they differ" in said


@pytest.mark.parametrize("other", [None, {}, YARN])
def test_two_blocks_that_say_the_same_are_none(other):
    assert problems(rope_parameters=YARN, rope_scaling=other) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "su"}, "rope_type is 'su', expected one of default, linear"),
        ({"rope_type": ["yarn"]}, r"rope_type is \['yarn'\]"),
        ({"rope_type": None, "type": 4}, "rope_type is 4"),
        ({"factor": 0}, "factor is 0, expected a positive number"),
        ({"factor": "4"}, "factor is '4'"),
        ({"factor": True}, "factor is True"),
        ({"factor": [4.0]}, r"factor is \[4.0\]"),
        ({"attention_factor": -1.0}, "attention_factor is -1.0"),
        ({"beta_fast": "32"}, "beta_fast is '32'"),
        ({"truncate": 1}, "truncate is 1, expected true or false"),
        ({"original_max_position_embeddings": 1024.5}, "is 1024.5, expected a length"),
        ({"original_max_position_embeddings": 0}, "is 0, expected a length"),
        ({"original_max_position_embeddings": 1 << 40}, "expected a length"),
        ({"rope_theta": 1}, "rope_theta is 1.0, expected more than 1"),
    ],
)
def test_a_wrong_field_is_refused(changes, message):
    with pytest.raises(FormatError, match=f"config.json: rope_parameters.*{message}"):
        rope(YARN | changes)


@pytest.mark.parametrize("factors", ["1.0", [1.0, "2"], [0.0], 4])
def test_factors_that_are_no_numbers_are_refused(factors):
    with pytest.raises(FormatError, match="short_factor is "):
        rope(FORMS["longrope"] | {"short_factor": factors})
