"""Roles: one row each, and whoever has a question of the kind asks the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from formats.family import roles
from formats.family.layout import fused_group, fused_matrix
from formats.family.roles import ROLES, Role
from formats.stored import KEEP
from quant.errors import QuantError
from quant.mix.choose import choose
from quant.mix.tensors import Facts, MixTensor
from quant.policy import Policy, PolicyRule, Weight, assign

FACTS = Facts(num_layers=4, num_experts=0, gqa=2, tied=True, imatrix=False)


@pytest.fixture
def gate(monkeypatch):
    """Add a role: protected, fused with its like, F32 in GGUF."""
    row = Role("new_gate", protected=True, fused="new_pair", gguf=roles.F32_ONLY)
    monkeypatch.setitem(ROLES, row.name, row)
    return row


def test_a_new_role_is_kept_by_the_policy(gate):
    weight = Weight("layers.0.mlp.new_gate", gate.name, (256, 256))
    (kept,) = assign(Policy("fp8-block"), [weight])
    assert (kept.scheme, kept.reason) == (KEEP, "protected: new_gate")
    with pytest.raises(QuantError, match="whose role new_gate is protected"):
        assign(Policy(KEEP, (PolicyRule("layers.*", "fp8-block"),)), [weight])


def test_a_new_role_is_fused_under_its_name(gate):
    assert fused_group("layers.0.mlp.new_gate", gate.name) == "layers.0.mlp.new_pair"
    assert fused_matrix("layers.0.mlp.new_gate", gate.name) == "layers.0.mlp.new_pair"


def test_a_new_role_stays_f32_in_every_mix(gate):
    tensors = [
        MixTensor("blk.0.ffn_up.weight", "up_proj", (256, 256), ("layers.0.mlp.up_proj",)),
        MixTensor("blk.0.new_gate.weight", gate.name, (256, 256), ("layers.0.mlp.new_gate",)),
    ]
    assert choose("q4_k_m", tensors, FACTS)["blk.0.new_gate.weight"].type == "F32"


def test_a_linear_becomes_protected_by_its_row_alone(monkeypatch):
    monkeypatch.setitem(ROLES, "up_proj", replace(ROLES["up_proj"], linear=False, protected=True))
    (kept,) = assign(Policy("fp8-block"), [Weight("layers.0.mlp.up_proj", "up_proj", (256, 256))])
    assert kept.scheme == KEEP


def test_experts_of_a_layer_share_a_scheme_but_each_has_its_own_matrices():
    name = "layers.3.mlp.experts.7.gate_proj"
    assert fused_group(name, "expert") == "layers.3.mlp.experts"
    assert fused_matrix(name, "expert") == "layers.3.mlp.experts.7.gate_up"
    assert fused_matrix("layers.3.mlp.experts.7.down_proj", "expert").endswith("7.down_proj")


def test_what_a_gguf_file_may_have_is_said_by_the_row():
    assert ROLES["norm"].gguf_f32
    assert ROLES["in_proj_a"].gguf_takes("Q8_0")
    assert not ROLES["in_proj_a"].gguf_takes("Q4_K")
    assert ROLES["down_proj"].gguf_takes("Q4_K")
