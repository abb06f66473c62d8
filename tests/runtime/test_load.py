from __future__ import annotations

import dataclasses

import pytest
import torch

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.names import TEXT
from qwen35_convert.containers.registry import open_checkpoint
from runtime.kernels.linear.weight import Fp8Weight
from runtime.load import Loader
from runtime.weights import Model
from tests.checkpoints import (
    hub_config,
    make_weights,
    split_experts,
    text_config,
    write_checkpoint,
)
from tests.formats.layouts import FP8_ROLES, role_of, shiftable, to_fp8, to_mlx, to_next, without
from tests.fp8_weights import dequantize_block, dequantize_channel, quantize_channel
from tests.runtime.models import SHORT, distance, full, load, some_ids, write

P = "model.language_model."


def leaves(value, name="model"):
    """Yield (path, tensor) of everything a model or a layer holds."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name != "config":
                yield from leaves(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from leaves(part, f"{name}.{i}")


def same(got, expected):
    got, expected = dict(leaves(got)), dict(leaves(expected))
    assert got.keys() == expected.keys()
    return all(torch.equal(got[name], expected[name]) for name in got)


def without_mtp(model: Model) -> Model:
    return dataclasses.replace(model, mtp=None)


@pytest.fixture(scope="module")
def moe_weights():
    config = hub_config(moe=True, sizes="ragged", **SHORT)
    return config, make_weights(config)


def test_every_layout_loads_the_same_model(tmp_path, moe_weights):
    config, weights = moe_weights
    weights = shiftable(weights)
    bare = without(weights, "model.visual.")
    text = text_config(moe=True, sizes="ragged", **SHORT)
    flat = {name.replace(P, "model."): value for name, value in bare.items()}
    hub = load(write_checkpoint(tmp_path / "hub", config, weights))
    for name, its_config, its_weights in (
        ("split", config, split_experts(weights)),
        ("text", text, flat),
        ("text split", text, split_experts(flat)),
        ("next", text, to_next(flat, text)),
    ):
        assert same(load(write_checkpoint(tmp_path / name, its_config, its_weights)), hub), name
    mlx = load(write_checkpoint(tmp_path / "mlx", config, to_mlx(weights)))
    assert same(mlx, without_mtp(hub))


def test_float32_holds_the_stored_values_exactly(tmp_path, moe_weights):
    """Gate rows first, b before a, z after v; the shared expert keeps a size of its own."""
    config, weights = moe_weights
    model = load(write_checkpoint(tmp_path, config, weights))
    mixer, ff = model.layers[0].mixer, model.layers[0].feed_forward
    stored = {n.removeprefix(P + "layers.0."): w for n, w in weights.items()}
    gdn, mlp = "linear_attn.", "mlp."
    parts = [stored[f"{gdn}in_proj_{x}.weight"] for x in ("qkv", "z", "b", "a")]
    assert torch.equal(mixer.qkvz, torch.cat(parts[:2]).float())
    assert torch.equal(mixer.ba, torch.cat(parts[2:]).float())
    assert torch.equal(ff.gate_up, stored[mlp + "experts.gate_up_proj"].float())
    assert torch.equal(ff.down, stored[mlp + "experts.down_proj"].float())
    shared = [stored[f"{mlp}shared_expert.{x}_proj.weight"] for x in ("gate", "up", "down")]
    assert torch.equal(ff.shared_gate_up, torch.cat(shared[:2]).float())
    assert torch.equal(ff.shared_down, shared[2].float())
    attention = {n.removeprefix(P + "layers.1.self_attn."): w for n, w in weights.items()}
    qkv = torch.cat([attention[f"{x}_proj.weight"] for x in ("q", "k", "v")])
    assert torch.equal(model.layers[1].mixer.qkv, qkv.float())


def test_float32_of_the_delta_rule_stays_where_the_checkpoint_has_it(tmp_path):
    folder = write(tmp_path / "three")
    model = load(folder, torch.bfloat16)
    mixer = model.layers[0].mixer
    assert (mixer.A_log.dtype, mixer.norm.dtype) == (torch.float32, torch.float32)
    assert (mixer.dt_bias.dtype, mixer.conv.dtype) == (torch.bfloat16, torch.bfloat16)
    config = hub_config(sizes="ragged", **SHORT)
    weights = {n: w.to(torch.bfloat16) for n, w in make_weights(config).items()}
    mixer = (
        load(write_checkpoint(tmp_path / "six", config, weights), torch.bfloat16).layers[0].mixer
    )
    assert (mixer.A_log.dtype, mixer.norm.dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_layer_reads_nothing_but_itself(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write(tmp_path))
    expected = load(tmp_path)
    read = []
    original = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name: read.append(name) or original(self, name)
    )
    assert same(Loader(checkpoint, torch.device("cpu"), torch.float32).layer(1), expected.layers[1])
    assert read
    assert all(name.startswith(P + "layers.1.") for name in read)


def test_an_equally_large_shared_expert_joins_the_stack(tmp_path):
    model = load(write(tmp_path, moe=True, shared_expert_intermediate_size=40))
    ff = model.layers[0].feed_forward
    assert ff.shared_gate_up is None
    assert ff.router.shape[0] == ff.gate_up.shape[0] == ff.down.shape[0] == 6


def test_lazy_experts_are_those_of_the_stack(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, moe=True))
    cpu = torch.device("cpu")
    lazy = Loader(checkpoint, cpu, torch.float32, lazy_experts=True).layer(0).feed_forward
    stacked = Loader(checkpoint, cpu, torch.float32).layer(0).feed_forward
    for e in range(5):
        assert torch.equal(lazy.gate_up[e], stacked.gate_up[e])
        assert torch.equal(lazy.down[e], stacked.down[e])


def to_channel(weights):
    """Return the weights with one FP8 scale per row, float32."""
    result = {}
    for name, value in weights.items():
        if role_of(name) in FP8_ROLES and value.dim() == 2:
            result[name], result[name + "_scale"] = quantize_channel(value, "float32")
        else:
            result[name] = value
    return result


def decoded(weights):
    """Return FP8 weights as float32, without scales."""
    result = {}
    for name, value in weights.items():
        if name + "_scale_inv" in weights:
            result[name] = dequantize_block(value, weights[name + "_scale_inv"])
        elif name + "_scale" in weights:
            result[name] = dequantize_channel(value, weights[name + "_scale"])
        elif not name.endswith(("_scale", "_scale_inv")):
            result[name] = value
    return result


@pytest.mark.parametrize("kind", ["block", "channel"])
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_fp8_is_decoded_exactly_and_kept_without_loss(tmp_path, is_moe, kind):
    config = hub_config(moe=is_moe, hidden_size=256, **SHORT)
    weights = make_weights(config)
    coded = to_fp8(weights) if kind == "block" else to_channel(split_experts(weights))
    folder = write_checkpoint(tmp_path / "fp8", config, coded)
    expected = load(write_checkpoint(tmp_path / "plain", config, decoded(coded)))
    assert same(load(folder), expected)
    kept = load(folder, keep_fp8=True)
    for weight in (kept.layers[0].mixer.qkvz, kept.layers[0].feed_forward.gate_up):
        assert isinstance(weight, Fp8Weight)
        assert weight.scale.shape[-1] == (2 if kind == "block" else 1)
    ids = some_ids(40, expected)
    assert distance(full(kept, ids), full(expected, ids)) < 1e-5


def test_fp8_blocks_that_do_not_line_up_are_decoded(tmp_path):
    """z starts at row 464 of qkvz here: no grid of 128-row blocks has one scale there."""
    config = hub_config(hidden_size=256, linear_value_head_dim=112, **SHORT)
    coded = to_fp8(make_weights(config))
    model = load(write_checkpoint(tmp_path, config, coded), keep_fp8=True)
    assert isinstance(model.layers[0].mixer.qkvz, torch.Tensor)
    assert isinstance(model.layers[0].mixer.out, Fp8Weight)
    name = P + "layers.0.linear_attn.in_proj_z.weight"
    z = dequantize_block(coded[name], coded[name + "_scale_inv"])
    assert torch.equal(model.layers[0].mixer.qkvz[-len(z) :], z)


def test_fp8_in_bfloat16_is_rounded_once(tmp_path):
    config = hub_config(**SHORT)
    coded = to_channel(make_weights(config))
    down = P + "layers.0.mlp.down_proj.weight"
    model = load(write_checkpoint(tmp_path, config, coded), torch.bfloat16)
    exact = dequantize_channel(coded[down], coded[down + "_scale"])
    assert torch.equal(model.layers[0].feed_forward.down, exact.to(torch.bfloat16))


def test_a_checkpoint_with_problems_is_refused_by_name(tmp_path):
    config = text_config(sizes="ragged", **SHORT)
    weights = make_weights(config, namespace=TEXT)
    gone = "model.layers.2.mlp.down_proj.weight"
    del weights[gone]
    with pytest.raises(FormatError, match=r"layers\.2\.mlp\.down_proj\.weight is missing"):
        load(write_checkpoint(tmp_path, config, weights))


def test_the_mtp_head_is_loaded_where_there_is_one(tmp_path):
    config = hub_config(sizes="ragged", **SHORT)
    weights = make_weights(config)
    assert load(write_checkpoint(tmp_path / "with", config, weights)).mtp is not None
    rest = without(weights, "mtp.")
    assert load(write_checkpoint(tmp_path / "bare", config, rest)).mtp is None
