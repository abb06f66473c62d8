"""config.json: every size is read and checked, and what is wrong is named by its field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.family.config import read_config
from formats.family.config_fields import DENSE_FIELDS, MOE_FIELDS, TEXT_FIELDS, VISION_FIELDS
from tests.checkpoints import hub_config, text_config

NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "layer_types": None, "rope_parameters": None,
    "rope_theta": 5000000, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 5120,
}  # fmt: skip
BAD_SIZES = [0, -1, True, 5120.0, "5120", [5120], {}, float("nan"), float("inf"), 2**31, 10**40]
TEXT = [field for field, _ in (TEXT_FIELDS | DENSE_FIELDS).values()]
DEFAULTED = [field for field, default in TEXT_FIELDS.values() if default is not None]
REQUIRED = [field for field, default in (TEXT_FIELDS | DENSE_FIELDS).values() if default is None]
EXPERTS = [field for field, _ in MOE_FIELDS.values()]
VISION = [field for field, _ in VISION_FIELDS.values()]


def without(config: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != field}


def refused(raw: dict[str, Any], match: str) -> str:
    with pytest.raises(FormatError, match=match) as caught:
        read_config(raw)
    assert str(caught.value).startswith("config.json: ")
    return str(caught.value)


@pytest.mark.parametrize("moe", [False, True])
def test_a_nested_and_a_flat_config_say_the_same(moe):
    nested = read_config(hub_config(moe=moe, sizes="ragged"))
    flat = read_config(text_config(moe=moe, sizes="ragged"))
    assert nested.nested
    assert not flat.nested
    assert nested.moe == flat.moe == moe
    assert flat.sizes.items() <= nested.sizes.items()
    assert (nested.layer_types, nested.rope, nested.eps) == (flat.layer_types, flat.rope, flat.eps)
    assert nested.fields["H"] == "text_config.hidden_size"
    assert nested.fields["vH"] == "vision_config.hidden_size"
    assert flat.fields["H"] == "hidden_size"


def test_head_dim_is_read_and_never_derived():
    config = read_config(
        text_config(hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, head_dim=256)
    )
    assert config.sizes["HD"] == 256


@pytest.mark.parametrize("bad", BAD_SIZES, ids=repr)
@pytest.mark.parametrize("field", [*TEXT, "num_hidden_layers"])
def test_a_wrong_text_size_is_refused_by_its_field(field, bad):
    refused(text_config(**{field: bad}), rf"^config\.json: {field} is .*expected an integer from 1")
    refused(hub_config(**{field: bad}), rf"text_config\.{field} is ")


@pytest.mark.parametrize("bad", BAD_SIZES, ids=repr)
@pytest.mark.parametrize("field", EXPERTS)
def test_a_wrong_expert_size_is_refused_by_its_field(field, bad):
    refused(text_config(moe=True, **{field: bad}), f"{field} is ")


@pytest.mark.parametrize("bad", BAD_SIZES, ids=repr)
@pytest.mark.parametrize("field", VISION)
def test_a_wrong_vision_size_is_refused_by_its_field(field, bad):
    raw = hub_config()
    raw["vision_config"][field] = bad
    refused(raw, rf"vision_config\.{field} is ")


@pytest.mark.parametrize("field", [*REQUIRED, "num_hidden_layers"])
def test_a_size_without_a_default_must_be_there(field):
    refused(without(text_config(), field), f"{field} is missing")
    refused(text_config(**{field: None}), f"{field} is missing")


def test_all_fields_that_were_lost_are_named_where_a_default_contradicts():
    config = without(without(text_config(), "linear_num_key_heads"), "linear_key_head_dim")
    refused(config, "add linear_num_key_heads, linear_key_head_dim, as ")


def test_all_fields_that_are_missing_are_named():
    config = without(without(text_config(), "hidden_size"), "num_hidden_layers")
    refused(config, "num_hidden_layers, hidden_size are missing")


@pytest.mark.parametrize("field", EXPERTS)
def test_expert_sizes_must_be_there(field):
    refused(without(text_config(moe=True), field), f"{field} is missing")


@pytest.mark.parametrize("field", DEFAULTED)
def test_a_default_is_taken_and_said(field):
    symbol = next(s for s, (name, _) in TEXT_FIELDS.items() if name == field)
    plain = text_config(linear_num_value_heads=48, linear_num_key_heads=16)
    for raw in (without(plain, field), plain | {field: None}):
        config = read_config(raw)
        assert config.sizes[symbol] == TEXT_FIELDS[symbol][1]
        assert config.fields[symbol] == f"{field} (absent, default)"
    assert "absent" in config.source_of(f"2*{symbol}, H")


def test_the_sizes_of_a_shape_are_named_once_and_in_order():
    config = read_config(text_config())
    assert config.source_of("2*NK*DK+NV*DV, 1, K") == (
        "linear_num_key_heads 1, linear_key_head_dim 64, linear_num_value_heads 3, "
        "linear_value_head_dim 128, linear_conv_kernel_dim 4"
    )
    assert config.source_of("H, H") == "hidden_size 128"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads is 2, expected a multiple of"),
        ({"linear_num_key_heads": 2}, "linear_num_value_heads is 3, expected a multiple of"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most num_experts 4"),
        ({"num_experts": 2**30}, "num_experts is 1073741824, expected at most"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    refused(text_config(moe=True, **changes), message)


def test_a_vision_tower_has_bounds_too():
    for field, bad in (("num_heads", 5), ("depth", 2**30)):
        raw = hub_config()
        raw["vision_config"][field] = bad
        refused(raw, r"vision_config\.")


@given(
    kinds=st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=1, max_size=9),
    interval=st.integers(1, 9),
)
def test_layer_types_win_over_the_interval(kinds, interval):
    raw = text_config(num_hidden_layers=len(kinds), layer_types=kinds)
    assert read_config(raw | {"full_attention_interval": interval}).layer_types == tuple(kinds)


@given(layers=st.integers(1, 100), interval=st.integers(1, 9))
def test_without_layer_types_every_nth_layer_is_full(layers, interval):
    raw = text_config(num_hidden_layers=layers, layer_types=None, full_attention_interval=interval)
    kinds = read_config(raw).layer_types
    full = [i for i in range(layers) if i % interval == interval - 1]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == full


def test_the_interval_is_four_where_it_is_absent():
    kinds = read_config(text_config(layer_types=None)).layer_types
    assert kinds == ("linear_attention",) * 3 + ("full_attention",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries, expected 4"),
        ({"layer_types": []}, "layer_types has 0 entries, expected 4"),
        ({"layer_types": "linear_attention"}, "layer_types has 'linear_attention' entries"),
        ({"layer_types": ["mamba"] * 4}, r"layer_types\[0\] is 'mamba'"),
        ({"layer_types": ["full_attention"] * 3 + [["x"]]}, r"layer_types\[3\] is \['x'\]"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000, over"),
    ],
)
def test_wrong_layer_types_are_refused(changes, message):
    refused(text_config(**changes), message)


def test_rope_is_read_from_its_block():
    rope = read_config(text_config()).rope
    assert (rope.theta, rope.partial, rope.sections) == (1e7, 0.25, (6, 5, 5))


def test_rope_beside_the_other_fields_is_read_too():
    config = read_config(text_config(moe=True, **NEXT))
    assert (config.rope.theta, config.rope.partial, config.rope.sections) == (5e6, 0.25, ())
    assert config.layer_types[3] == "full_attention"
    assert config.moe


def test_the_rope_block_wins_over_what_stands_beside_it():
    assert read_config(text_config(rope_theta=10000)).rope.theta == 1e7


def test_the_share_of_rotated_dimensions_has_a_default():
    assert read_config(text_config(rope_parameters={"rope_theta": 1e6})).rope.partial == 0.25


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (None, "rope_theta is missing"),
        ({}, "rope_theta is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": "1e7"}, "rope_theta is '1e7'"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": -1e7}, "rope_theta is -10000000.0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": 1e7, "partial_rotary_factor": 25}, "partial_rotary_factor is 25.0, over 1"),
        ({"rope_theta": 1e7, "partial_rotary_factor": 0}, "partial_rotary_factor is 0"),
        ({"rope_theta": 1e7, "mrope_section": "11"}, "mrope_section is '11'"),
        ({"rope_theta": 1e7, "mrope_section": [11.0]}, r"mrope_section is \[11.0\]"),
        ({"rope_theta": 1e7, "mrope_section": [True]}, r"mrope_section is \[True\]"),
        ({"rope_theta": 1e7, "rope_type": "axial"}, "rope_type is 'axial'"),
        ([1e7], "rope_parameters is not an object"),
        (False, "rope_parameters is not an object"),
    ],
)
def test_a_wrong_rope_is_refused_and_never_guessed(block, message):
    refused(text_config(rope_parameters=block), message)


@pytest.mark.parametrize("bad", [0, -1e-6, "1e-6", True, float("nan"), float("inf")], ids=repr)
def test_a_wrong_eps_is_refused(bad):
    refused(text_config(rms_norm_eps=bad), "rms_norm_eps is ")


@pytest.mark.parametrize("bad", [-1, 1.0, "1", True], ids=repr)
def test_a_wrong_number_of_mtp_layers_is_refused(bad):
    refused(text_config(mtp_num_hidden_layers=bad), "mtp_num_hidden_layers is ")


@pytest.mark.parametrize("count", [0, 1, None])
def test_there_may_be_no_mtp(count):
    assert read_config(text_config(mtp_num_hidden_layers=count)).mtp_layers == (count or 0)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("attn_output_gate", False),
        ("output_gate_type", "sigmoid"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("norm_topk_prob", False),
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("attn_output_gate", 1),
        ("attention_bias", 0),
        ("decoder_sparse_step", True),
    ],
)
def test_another_architecture_is_refused_by_its_field(field, bad):
    assert "is not part of the Qwen3.5 family" in refused(
        hub_config(moe=True, **{field: bad}), rf"text_config\.{field} is "
    )


@pytest.mark.parametrize("gate", ["silu", "swish", None])
def test_two_names_of_one_gate_are_accepted(gate):
    read_config(text_config(output_gate_type=gate))


@pytest.mark.parametrize(
    "bad", ["qwen4_exp", "qwen3", "llama", "", 5, None, ["qwen3_5_text"], {}], ids=repr
)
def test_another_model_type_is_refused(bad):
    refused(text_config(model_type=bad), "model_type is .*expected one of qwen3_5, ")


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_qwen4_is_told_apart_wherever_it_says_so(where):
    raw = hub_config(moe=True)
    (raw if where == "outside" else raw["text_config"])["model_type"] = "qwen4_exp"
    assert "hyper-connections" in refused(raw, "model_type is 'qwen4_exp'")


@pytest.mark.parametrize(
    ("outer", "inner", "moe"),
    [
        ("qwen3_5", None, False),
        ("qwen3_5_moe", None, True),
        (None, "qwen3_5_moe_text", True),
        (None, "qwen3_5", False),
    ],
)
def test_either_model_type_is_enough(outer, inner, moe):
    raw = hub_config(moe=moe)
    raw["model_type"], raw["text_config"]["model_type"] = outer, inner
    assert read_config(raw).moe is moe


@pytest.mark.parametrize("field", ["text_config", "vision_config"])
@pytest.mark.parametrize("bad", [[], "x", 1, False], ids=repr)
def test_a_part_that_is_no_object_is_refused(field, bad):
    refused(hub_config() | {field: bad}, f"{field} is not an object")


def test_a_vision_config_may_be_absent():
    for raw in (without(hub_config(), "vision_config"), hub_config() | {"vision_config": None}):
        config = read_config(raw)
        assert config.vision is None
        assert "vH" not in config.sizes


@pytest.mark.parametrize(
    ("top", "text", "flags"),
    [
        (True, False, {"tie_word_embeddings": True, "text_config.tie_word_embeddings": False}),
        (None, True, {"text_config.tie_word_embeddings": True}),
        (False, None, {"tie_word_embeddings": False}),
        (None, None, {}),
    ],
)
def test_both_tie_flags_of_a_nested_config_are_kept(top, text, flags):
    raw = hub_config(tie_word_embeddings=text) | {"tie_word_embeddings": top}
    assert read_config(raw).tie_flags == flags


def test_a_flat_config_has_one_tie_flag():
    assert read_config(text_config()).tie_flags == {"tie_word_embeddings": False}
    assert read_config(without(text_config(), "tie_word_embeddings")).tie_flags == {}


@pytest.mark.parametrize("bad", [1, "true", [], 0.0], ids=repr)
def test_a_tie_flag_is_true_or_false(bad):
    refused(text_config(tie_word_embeddings=bad), "tie_word_embeddings is .*true or false")
    refused(hub_config(tie_word_embeddings=bad) | {"tie_word_embeddings": True}, "text_config")


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_quantization_block_is_found_in_both_places(where):
    raw = hub_config()
    block = {"quant_method": "fp8"}
    (raw if where == "outside" else raw["text_config"])["quantization_config"] = block
    assert read_config(raw).quantization == block
    assert read_config(hub_config()).quantization is None
