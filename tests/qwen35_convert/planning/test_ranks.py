"""Which weights' groups tensor parallelism cannot share, and which stay unquantised, is said."""

from __future__ import annotations

import pytest

from formats.family.layout import Atom
from formats.stored import KEEP
from quant.choices import Choices
from quant.plain import Plain
from quant.policy import Policy, Weight, assign
from quant.registry import get_scheme
from qwen35_convert.planning.ranks import rank_notes


def atom(name, *shape):
    role = name.rsplit(".", 1)[-1]
    return Atom(name, name, role, shape, "BF16", Plain("BF16"), name, (name,))


@pytest.mark.parametrize(
    ("scheme", "group", "columns", "said"),
    [
        ("int4", 128, 3584, "for each of 8 tensor-parallel ranks: use fewer, or quantize.group 64"),
        ("int4", 128, 512, "for each of 8 tensor-parallel ranks: use fewer, or quantize.group 64"),
        ("int4", 32, 3584, None),
        ("int4", 128, 17408, None),
        ("nvfp4a16", None, 3584, None),
        ("mxfp4a16", None, 512, None),
        ("int8", None, 3584, None),
    ],
)
def test_groups_that_ranks_cannot_share_are_told(scheme, group, columns, said):
    form = get_scheme(scheme, Choices(group=group))
    down, up = atom("layers.0.mlp.down_proj", 64, columns), atom("layers.0.mlp.up_proj", 64, 320)
    notes = list(rank_notes([(down, form), (up, form)]))
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize(("columns", "said"), [(128, True), (256, False)])
def test_experts_of_one_single_group_are_told(columns, said):
    name = "layers.0.mlp.experts.3.down_proj"
    down = Atom(name, name, "expert", (64, columns), "BF16", Plain("BF16"), name, (name,))
    notes = list(rank_notes([(down, get_scheme("int4"))]))
    assert (
        any("one single group, which vLLM 0.26 computes wrongly" in note for note in notes) == said
    )


@pytest.mark.parametrize(
    ("scheme", "choices", "shape", "why"),
    [
        ("nvfp4a16", {}, (64, 72), "72 columns are not a whole number of groups of 16"),
        ("mxfp4a16", {}, (64, 80), "80 columns are not a whole number of groups of 32"),
        ("int4", {"group": 128}, (64, 192), "192 columns are not a whole number of groups of 128"),
        ("int4", {"group": 32, "symmetric": False}, (36, 64), "share a word, it has 36 rows"),
        ("int8", {}, (36, 64), "INT8 kernels need rows and columns divisible by 16"),
    ],
)
def test_a_shape_that_engines_cannot_take_is_kept_and_the_reason_says_why(
    scheme, choices, shape, why
):
    name = "layers.0.mlp.down_proj"
    policy = Policy(scheme, (), Choices(**choices))
    (choice,) = assign(policy, [Weight(name, "down_proj", shape, None)])
    assert choice.scheme == KEEP
    assert why in choice.reason
