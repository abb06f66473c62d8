"""Namespaces: every spelling in the wild leads to one name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.family.names import (
    HOLDERS,
    HUB,
    OUTER,
    TEXT,
    WRAPPERS,
    holders,
    normalise,
    place,
    place_beside,
    prefixes,
    rename,
    strip_strangers,
)
from formats.family.rules import RULES
from formats.stored import Problem

HUB_NAMES = [rule.hub.replace("{i}", "3").replace("{e}", "17") for rule in RULES.values()]
names = st.sampled_from(HUB_NAMES)


@pytest.mark.parametrize("namespace", [HUB, TEXT])
@pytest.mark.parametrize("hub", HUB_NAMES)
def test_placing_a_name_and_normalising_it_gives_it_back(hub, namespace):
    assert normalise(place(hub, namespace)) == hub


@given(hub=names, wrappers=st.lists(st.sampled_from([*WRAPPERS, *OUTER, *HOLDERS]), max_size=6))
def test_any_wrappers_in_front_are_stripped(hub, wrappers):
    assert normalise(".".join([*wrappers, hub])) == hub


@given(hub=names, at=st.integers(0, 9), holder=st.sampled_from(sorted(HOLDERS)))
def test_what_held_a_module_is_stripped_anywhere(hub, at, holder):
    segments = hub.split(".")
    segments.insert(min(at, len(segments)), holder)
    stored = ".".join(["model", *segments])
    assert normalise(stored) == hub
    assert holders(stored) == {holder: HOLDERS[holder]}


@pytest.mark.parametrize("hub", HUB_NAMES)
def test_no_tensor_of_the_family_stands_under_a_wrapper(hub):
    assert not {*hub.split(".")} & {*HOLDERS, *OUTER}
    assert holders(place(hub, HUB)) == {}


def test_an_outer_wrapper_is_in_front_only():
    assert normalise("model.layers.0.policy.mlp.gate.weight") == "layers.0.policy.mlp.gate.weight"
    assert list(holders("module.actor.model.layers.0.actor.weight")) == ["module", "actor"]


def strangers(*stored: str) -> tuple[dict[str, str], list[Problem]]:
    return strip_strangers({normalise(name): name for name in stored})


def test_a_prefix_that_nobody_knows_is_one_problem_and_nothing_is_missing_for_it():
    inner = ["layers.0.mlp.up_proj.weight", "norm.weight", "layers.0.mlp.up_proj.weight_scale_inv"]
    found, problems = strangers(*(f"thinker.model.{name}" for name in inner))
    assert found == {name: f"thinker.model.{name}" for name in inner}
    assert len(problems) == 1
    assert "'thinker', as 3 tensors do" in problems[0].problem
    assert "name.split('thinker.', 1)" in problems[0].remedy


@pytest.mark.parametrize(
    "name",
    [
        "critic.model.layers.0.mlp.up_proj.weight",  # beside the model's own
        "audio_tower.layers.0.norm.weight",
        "layers.0.extra.embed_tokens.weight",
        "mtp.embed_tokens.weight",
    ],
)
def test_what_only_looks_like_a_prefix_is_left_alone(name):
    found, problems = strangers("model.layers.0.mlp.up_proj.weight", name)
    assert problems == []
    assert name in found.values()
    assert normalise(name) in found


@pytest.mark.parametrize(
    ("stored", "hub"),
    [
        ("language_model.model.layers.0.mlp.gate.weight", "layers.0.mlp.gate.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("vision_tower.pos_embed.weight", "visual.pos_embed.weight"),
        ("model.language_model.visual.pos_embed.weight", "visual.pos_embed.weight"),
        ("model.mtp.fc.weight", "mtp.fc.weight"),
        ("model.layers.0.linear_attn._fp32_params.A_log", "layers.0.linear_attn.A_log"),
    ],
)
def test_spellings_in_the_wild(stored, hub):
    assert normalise(stored) == hub


@pytest.mark.parametrize(
    "name",
    [
        "models.layers.0.mlp.gate.weight",
        "language_models.layers.0.mlp.gate.weight",
        "thinker.model.layers.0.mlp.gate.weight",
        "layers.0.model.mlp.gate.weight",
        "visual_model.pos_embed.weight",
    ],
)
def test_a_wrapper_is_a_whole_segment_in_front_never_a_substring(name):
    assert normalise(name) == name


@pytest.mark.parametrize("name", ["", "model", "language_model.model"])
def test_a_name_of_wrappers_only_is_empty(name):
    assert normalise(name) == ""


@pytest.mark.parametrize("namespace", [HUB, TEXT])
def test_head_mtp_and_vision_stand_where_the_hub_has_them(namespace):
    assert place("lm_head.weight", namespace) == "lm_head.weight"
    assert place("mtp.fc.weight", namespace) == "mtp.fc.weight"
    assert place("visual.pos_embed.weight", namespace) == "model.visual.pos_embed.weight"


@given(names, names, st.sampled_from([HUB, TEXT]))
def test_a_missing_tensor_is_named_as_its_kin_are(hub, kin, namespace):
    found = prefixes([place(kin, namespace)])
    assert normalise(place_beside(found, hub)) == hub
    if hub.split(".")[0] == kin.split(".")[0]:
        assert place_beside(found, hub) == place(hub, namespace)


def test_a_missing_tensor_is_named_in_a_namespace_of_the_wild():
    wild = "model.language_model.language_model."
    found = prefixes(["score.weight", wild + "norm.weight"])
    assert place_beside(found, "layers.0.mlp.gate.weight") == wild + "layers.0.mlp.gate.weight"
    assert place_beside(found, "mtp.norm.weight") == "mtp.norm.weight"


def test_two_spellings_of_one_tensor_collide():
    one, two = "model.layers.0.mlp.gate.weight", "model.language_model.layers.0.mlp.gate.weight"
    found, problems = rename([one, two, "lm_head.weight"])
    assert found == {"layers.0.mlp.gate.weight": one, "lm_head.weight": "lm_head.weight"}
    assert [problem.tensor for problem in problems] == [two]
    assert one in problems[0].problem


@given(st.lists(names, unique=True, max_size=20))
def test_different_tensors_never_collide(hubs):
    found, problems = rename(place(hub, HUB) for hub in hubs)
    assert list(found) == hubs
    assert problems == []


def test_a_problem_reads_as_one_block():
    assert str(Problem("x", "is odd", "mend it")) == "x is odd\n  fix   mend it"
