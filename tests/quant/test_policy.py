"""Policy: who gets which scheme, and which wishes are refused."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.family.roles import ROLES
from formats.stored import KEEP
from quant.errors import QuantError
from quant.policy import Policy, PolicyRule, Weight, assign

QKV = "layers.3.self_attn.qkv"
WEIGHTS = (
    Weight("embed_tokens", "embed", (1024, 256)),
    Weight("layers.3.input_layernorm", "norm", (256,)),
    Weight("layers.3.self_attn.q_proj", "q_proj", (512, 256), QKV),
    Weight("layers.3.self_attn.k_proj", "k_proj", (128, 256), QKV),
    Weight("layers.3.self_attn.v_proj", "v_proj", (128, 256), QKV),
    Weight("layers.3.mlp.down_proj", "down_proj", (256, 384)),
    Weight("layers.3.mlp.experts.gate_up_proj", "expert", (4, 256, 256)),
    Weight("layers.4.linear_attn.in_proj_a", "in_proj_a", (16, 256)),
    Weight("layers.4.mlp.down_proj", "down_proj", (256, 160)),
    Weight("lm_head", "lm_head", (1024, 256)),
)

LINEAR = [role.name for role in ROLES.values() if role.linear]
PROTECTED = [role.name for role in ROLES.values() if role.protected]


def outcome(*rules, default="fp8-block", weights=WEIGHTS):
    policy = Policy(default, tuple(PolicyRule(*rule) for rule in rules))
    return {a.name: (a.scheme, a.reason) for a in assign(policy, weights)}


def refusal(*rules, default="fp8-block", weights=WEIGHTS):
    with pytest.raises(QuantError) as refused:
        outcome(*rules, default=default, weights=weights)
    return str(refused.value)


def test_the_default_goes_to_linear_layers_whose_shape_is_taken():
    default = ("fp8-block", "default")
    needs = "128x128 blocks need rows and columns divisible by 128"
    assert outcome() == {
        "embed_tokens": (KEEP, "kept: no rule names it"),
        "layers.3.input_layernorm": (KEEP, "protected: norm"),
        "layers.3.self_attn.q_proj": default,
        "layers.3.self_attn.k_proj": default,
        "layers.3.self_attn.v_proj": default,
        "layers.3.mlp.down_proj": default,
        "layers.3.mlp.experts.gate_up_proj": default,
        "layers.4.linear_attn.in_proj_a": (KEEP, "protected: in_proj_a"),
        "layers.4.mlp.down_proj": (KEEP, f"kept: {needs}, it has 160 columns"),
        "lm_head": (KEEP, "kept: no rule names it"),
    }


def test_the_first_rule_that_matches_wins():
    got = outcome(("layers.4.*.down_proj", KEEP), ("layers.*.down_proj", "fp8-channel"))
    assert got["layers.4.mlp.down_proj"] == (KEEP, "rule layers.4.*.down_proj")
    assert got["layers.3.mlp.down_proj"] == ("fp8-channel", "rule layers.*.down_proj")


def test_a_rule_may_name_lm_head():
    assert outcome(("lm_head", "fp8-channel"))["lm_head"] == ("fp8-channel", "rule lm_head")


def test_keep_may_hit_anything():
    assert {scheme for scheme, _ in outcome(("*", KEEP)).values()} == {KEEP}


def test_globs_match_whole_names_only():
    assert refusal(("mlp.down_proj", KEEP)) == (
        "rule mlp.down_proj matches no weight,\n  expected a name like layers.*.mlp.down_proj"
    )


def test_a_rule_that_comes_too_late_is_an_error():
    assert refusal(("*.mlp.*", KEEP), ("layers.4.mlp.down_proj", "fp8-channel")) == (
        "rule layers.4.mlp.down_proj decides nothing,\n"
        "  expected before rule *.mlp.*, which takes layers.4.mlp.down_proj"
    )


@pytest.mark.parametrize("role", PROTECTED)
def test_no_rule_quantises_a_protected_weight(role):
    weights = [Weight("layers.0.x", role, (256, 256))]
    message = refusal(("layers.*", "fp8-channel"), weights=weights)
    assert message.startswith("rule layers.* gives fp8-channel to layers.0.x, whose role")
    assert role in message


def test_no_loader_reads_an_embedding_in_fp8():
    assert refusal(("embed_tokens", "fp8-channel")) == (
        "rule embed_tokens gives fp8-channel to embed_tokens,\n"
        "  expected keep: no loader reads an embedding in FP8"
    )


def test_a_fused_group_must_not_be_torn_by_rules():
    assert refusal(("*.k_proj", KEEP)) == (
        "loaders fuse these into one matrix, but they would have two schemes,\n"
        "  layers.3.self_attn.q_proj  fp8-block (default)\n"
        "  layers.3.self_attn.k_proj  keep (rule *.k_proj)\n"
        "  layers.3.self_attn.v_proj  fp8-block (default)\n"
        "  expected one for all of them"
    )


def test_what_is_refused_to_one_is_kept_for_its_whole_group():
    narrow = Weight("layers.3.self_attn.k_proj", "k_proj", (64, 256), QKV)
    got = outcome(weights=[*WEIGHTS[2:3], narrow, *WEIGHTS[4:6]])
    needs = "128x128 blocks need rows and columns divisible by 128, it has 64 rows"
    fused = f"kept: fused with layers.3.self_attn.k_proj, {needs}"
    assert got["layers.3.self_attn.q_proj"] == (KEEP, fused)
    assert got["layers.3.self_attn.k_proj"] == (KEEP, f"kept: {needs}")
    assert got["layers.3.self_attn.v_proj"] == (KEEP, fused)
    assert got["layers.3.mlp.down_proj"] == ("fp8-block", "default")


@pytest.mark.parametrize("rules", [(), (("*.down_proj", "fp9"),)])
def test_unknown_schemes_are_errors_even_where_nothing_would_get_them(rules):
    message = refusal(*rules, default=KEEP if rules else "fp9", weights=WEIGHTS[:2])
    assert message.startswith("scheme 'fp9' is not known, expected fp8-block, ")


@given(
    st.lists(st.sampled_from([*LINEAR, *PROTECTED, "embed", "lm_head"]), min_size=1),
    st.sampled_from([KEEP, "fp8-block", "fp8-channel"]),
)
def test_every_weight_is_assigned_once_in_order_with_a_reason(roles, default):
    weights = [Weight(f"layers.{i}.{role}", role, (256, 256)) for i, role in enumerate(roles)]
    assignments = assign(Policy(default), weights)
    assert [a.name for a in assignments] == [w.name for w in weights]
    for assignment, weight in zip(assignments, weights, strict=True):
        assert assignment.reason
        assert fnmatchcase(assignment.name, "layers.*")
        assert assignment.scheme == (default if weight.role in LINEAR else KEEP)
