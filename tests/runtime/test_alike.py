"""What two checkpoints have in common is computed once, and the digits are those of twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import runtime.alike as alike_module
import runtime.compare as compare_module
from qwen35_convert.containers.registry import open_checkpoint
from runtime.compare import compare_logits
from runtime.layer_pass import LayerPass
from runtime.layerwise import Walk
from tests.checkpoints import hub_config, make_weights, split_experts, write_checkpoint
from tests.formats.layouts import to_fp8
from tests.runtime.models import SHORT, load, some_ids

P = "model.language_model."
LAYERS = 3


@pytest.fixture
def runs(monkeypatch):
    """The names of layers that are run."""
    run, original = [], LayerPass.run

    def spy(self, x, layer, prefix):
        run.append(prefix)
        return original(self, x, layer, prefix)

    monkeypatch.setattr(LayerPass, "run", spy)
    return run


def never(monkeypatch):
    """Share nothing."""
    monkeypatch.setattr(alike_module, "_same_layer", lambda *_: False)
    monkeypatch.setattr(compare_module, "same_bits", lambda *_: False)


def written(folder, weights, config, **changes):
    text = {**config["text_config"], **changes}
    return write_checkpoint(folder, {**config, "text_config": text}, weights)


def compared(source, artifact):
    ids = torch.tensor(some_ids(60, load(source))).view(2, 30)
    return compare_logits(*map(open_checkpoint, (source, artifact)), ids, device="cpu")


def walked(folder):
    ids = [torch.tensor([1, 2, 3])]
    return Walk.over(open_checkpoint(folder), ids, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def made(request):
    config = hub_config(moe=request.param, hidden_size=256, **SHORT)
    return config, make_weights(config)


def with_other(weights, layer):
    """Return weights of which one of a layer is another."""
    name = f"{P}layers.{layer}.post_attention_layernorm.weight"
    return weights | {name: weights[name] + 0.25}


@pytest.mark.parametrize("layer", [0, 1, 2, None])
def test_layers_before_the_first_difference_are_run_once(made, tmp_path, monkeypatch, runs, layer):
    config, weights = made
    changed = weights if layer is None else with_other(weights, layer)
    source, artifact = (
        written(tmp_path / name, one, config)
        for name, one in (("source", weights), ("artifact", changed))
    )
    report = compared(source, artifact)
    assert len(runs) == LAYERS + (0 if layer is None else LAYERS - layer)
    shared = [one.shared for one in report.layers]
    assert shared == [layer is None or i < layer for i in range(LAYERS)]
    never(monkeypatch)
    plain = tuple(replace(one, shared=False) for one in report.layers)
    assert compared(source, artifact) == replace(report, layers=plain)
    assert [one.relative_error > 0 for one in report.layers] == [
        layer is not None and i >= layer for i in range(LAYERS)
    ]


def test_what_is_stored_otherwise_and_means_the_same_is_run_once(tmp_path, runs):
    config = hub_config(moe=True, sizes="ragged", **SHORT)
    weights = make_weights(config)
    source = write_checkpoint(tmp_path / "fused", config, weights)
    artifact = write_checkpoint(tmp_path / "split", config, split_experts(weights))
    assert compared(source, artifact).kl_mean == 0
    assert len(runs) == LAYERS


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-3}, {"rope_theta": 5e4}])
def test_the_same_weights_under_another_config_are_another_model(made, tmp_path, runs, change):
    config, weights = made
    if "rope_theta" in change:
        change = {"rope_parameters": {**config["text_config"]["rope_parameters"], **change}}
    source = written(tmp_path / "source", weights, config)
    artifact = written(tmp_path / "artifact", weights, config, **change)
    assert compared(source, artifact).kl_mean > 0
    assert len(runs) == 2 * LAYERS


def test_a_rounded_cache_is_another_model(made, tmp_path, runs):
    config, weights = made
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    source = written(tmp_path / "source", weights, config)
    cached = {**config, "quantization_config": {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme,
    }}  # fmt: skip
    artifact = write_checkpoint(tmp_path / "artifact", cached, weights)
    compared(source, artifact)
    assert len(runs) == 2 * LAYERS


def test_nan_is_equal_to_nothing_and_says_so(made, tmp_path):
    config, weights = made
    name = f"{P}layers.1.post_attention_layernorm.weight"
    broken = weights | {name: torch.full_like(weights[name], torch.nan)}
    source = written(tmp_path / "source", weights, config)
    report = compared(source, written(tmp_path / "artifact", broken, config))
    assert report.kl_mean != report.kl_mean
    assert [one.relative_error == 0 for one in report.layers] == [True, False, False]


def test_fp8_shares_nothing_with_its_source(made, tmp_path, runs):
    config, weights = made
    source = written(tmp_path / "source", weights, config)
    compared(source, write_checkpoint(tmp_path / "fp8", config, to_fp8(weights)))
    assert len(runs) == 2 * LAYERS


def test_no_tensor_of_a_layer_is_left_out_of_the_comparison(made, tmp_path):
    """One bit of any of them is another layer: of norms, A_log and the router, too."""
    config, weights = made
    one = walked(written(tmp_path / "source", weights, config))
    inside = [name for name in weights if name.startswith(f"{P}layers.")]
    assert len(inside) > 10 * LAYERS
    for name in inside:
        other = weights[name].clone()
        other.view(torch.uint8).view(-1)[-1] ^= 1
        artifact = written(tmp_path / "artifact", weights | {name: other}, config)
        layer = int(name.removeprefix(f"{P}layers.").split(".")[0])
        same = [alike_module._same_layer(one, walked(artifact), i) for i in range(LAYERS)]
        assert same == [i != layer for i in range(LAYERS)], name
