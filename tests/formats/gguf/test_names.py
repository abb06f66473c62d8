"""GGUF names and transforms against a hand-written copy of llama.cpp's map."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from formats.family.arithmetic import NegExp, NegLog
from formats.family.config import read_config
from formats.family.moves import Tile
from formats.family.names import normalise
from formats.family.ops import apply_all, shape_after
from formats.family.recognise import recognise
from formats.gguf.checkpoint import ORIGIN
from formats.gguf.dialect import GgufDialect
from formats.gguf.names import gguf_name, hub_name, ops_from_gguf, ops_to_gguf
from quant.registry import GGUF_RECOGNISERS
from tests.checkpoints import make_weights, split_experts, text_config
from tests.formats.layouts import infos_of, role_of, to_gguf

KINDS = [pytest.param(moe, id="moe" if moe else "dense") for moe in (False, True)]


def model(*, moe):
    config = text_config(moe=moe, sizes="ragged")
    return config, make_weights(config, namespace="text")


@pytest.mark.parametrize("moe", KINDS)
def test_every_gguf_tensor_is_recognised_and_comes_back(moe):
    config, weights = model(moe=moe)
    stored = to_gguf(weights, config)
    layout = recognise(infos_of(stored), read_config(config), GGUF_RECOGNISERS, GgufDialect())
    assert layout.problems == []
    assert layout.kind == "gguf"
    wanted = {normalise(n).removesuffix(".weight"): v for n, v in split_experts(weights).items()}
    assert set(layout.atoms) == set(wanted)
    for name, atom in layout.atoms.items():
        found = apply_all(atom.ops, stored[atom.stored])
        assert tuple(found.shape) == atom.shape == shape_after(atom.ops, stored[atom.stored].shape)
        torch.testing.assert_close(found, wanted[name].float(), rtol=2**-22, atol=2**-21)
        if atom.role not in ("norm", "A_log"):
            assert torch.equal(found, wanted[name].float()), name


@pytest.mark.parametrize("moe", KINDS)
def test_the_hub_s_tensors_become_what_llama_cpp_stores(moe):
    config, weights = model(moe=moe)
    stored, sizes = to_gguf(weights, config), read_config(config).sizes
    seen = set()
    for name, value in split_experts(weights).items():
        hub = normalise(name)
        target, index = gguf_name(hub, 4)
        made = apply_all(ops_to_gguf(role_of(name), sizes), value).float()
        assert torch.equal(made, stored[target] if index is None else stored[target][index]), name
        seen.add(target)
    assert seen == set(stored)


def test_fused_gate_and_up_of_experts_are_read_too():
    config, weights = model(moe=True)
    stored = to_gguf(weights, config)
    for block in range(5):
        pair = [stored.pop(f"blk.{block}.ffn_{half}_exps.weight") for half in ("gate", "up")]
        stored[f"blk.{block}.ffn_gate_up_exps.weight"] = torch.cat(pair, 1)
    layout = recognise(infos_of(stored), read_config(config), GGUF_RECOGNISERS, GgufDialect())
    assert layout.problems == []
    atom = layout.atoms["layers.1.mlp.experts.3.up_proj"]
    wanted = split_experts(weights)["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert torch.equal(apply_all(atom.ops, stored[atom.stored]), wanted.float())


def test_a_flat_shared_expert_gate_of_older_files_is_read():
    config, weights = model(moe=True)
    stored = to_gguf(weights, config)
    flat = {n: v[0] if n.endswith("gate_inp_shexp.weight") else v for n, v in stored.items()}
    assert (
        recognise(infos_of(flat), read_config(config), GGUF_RECOGNISERS, GgufDialect()).problems
        == []
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blk.0.attn_sinks.weight", "is not a tensor of the Qwen3.5 family"),
        ("layers.0.input_layernorm.weight", "is not a tensor"),
        ("blk.0.nextn.enorm.weight", "is not a tensor"),
        ("blk.0.1.attn_norm.weight", "is not a tensor"),
        ("model.token_embd.weight", "is not a tensor"),
    ],
)
def test_a_strange_tensor_is_a_problem(name, said):
    config, weights = model(moe=False)
    stored = to_gguf(weights, config)
    stored[name] = torch.ones(96)
    layout = recognise(infos_of(stored), read_config(config), GGUF_RECOGNISERS, GgufDialect())
    assert [p.tensor for p in layout.problems] == [name]
    assert said in str(layout.problems[0])


@pytest.mark.parametrize("harm", ["missing", "misshapen", "strange"])
def test_what_is_wrong_with_a_file_sends_nobody_to_a_config_json(harm):
    config, weights = model(moe=False)
    stored = to_gguf(weights, config)
    value = stored.pop("blk.0.ffn_up.weight")
    stored |= {"misshapen": {"blk.0.ffn_up.weight": value[:7]}}.get(harm, {})
    stored |= {"strange": {"blk.0.ffn_sub.weight": value}}.get(harm, {})
    of_file = replace(read_config(config), origin=ORIGIN)
    layout = recognise(infos_of(stored), of_file, GGUF_RECOGNISERS, GgufDialect())
    assert layout.problems
    for problem in layout.problems:
        assert "make the file again" in problem.remedy
        assert "config.json" not in str(problem)
        assert "download" not in str(problem)


def test_a_block_beyond_the_last_is_a_problem():
    config, weights = model(moe=False)
    stored = to_gguf(weights, config) | {"blk.9.attn_norm.weight": torch.ones(96)}
    layout = recognise(infos_of(stored), read_config(config), GGUF_RECOGNISERS, GgufDialect())
    assert "blk.5.attn_q.weight" in {p.tensor for p in layout.problems}


def test_names_go_both_ways():
    for hub in (
        "embed_tokens.weight",
        "norm.weight",
        "lm_head.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
        "layers.3.linear_attn.A_log",
        "layers.11.self_attn.q_norm.weight",
        "mtp.layers.0.mlp.down_proj.weight",
    ):
        assert hub_name(gguf_name(hub, 12)[0], 12, fused=False) == hub


def test_tiling_is_undone_only_by_its_own_inverse():
    """With three value heads to a key head the swap is no involution: twice is not once undone."""
    tile, heads = Tile(2, 3, 4), torch.arange(24.0)
    moved = tile.apply(heads)
    assert torch.equal(tile.inverse().apply(moved), heads)
    assert not torch.equal(tile.apply(moved), heads)
    # head g*r + j goes to j*NK + g: heads 0..5 in the order 0, 3, 1, 4, 2, 5
    assert torch.equal(moved.view(6, 4)[:, 0] / 4, torch.tensor([0.0, 3, 1, 4, 2, 5]))


def test_a_bfloat16_logarithm_comes_back_bit_for_bit():
    log = torch.linspace(-9, 4, 4001).to(torch.bfloat16).float()
    assert torch.equal(NegLog().apply(NegExp().apply(log)), log)


def test_any_logarithm_comes_back_to_what_has_the_same_rate():
    log = torch.randn(4001, generator=torch.Generator().manual_seed(0)) * 2
    rate = NegExp().apply(log)
    back = NegLog().apply(rate)
    gap = (NegExp().apply(back).double() / rate.double() - 1).abs()
    # one rounding of a logarithm of up to 8 moves the rate by half an ulp of 8, 2^-22
    assert float(gap.max()) <= 2**-21


def test_nothing_is_tiled_where_every_key_head_has_one_value_head():
    sizes = {"NK": 4, "NV": 4, "DK": 8, "DV": 8}
    for role in ("in_proj_qkv", "in_proj_z", "out_proj", "in_proj_a", "dt_bias"):
        assert ops_to_gguf(role, sizes) == ops_from_gguf(role, sizes) == ()
