"""What an adapter changes of its base model: every form that PEFT saves, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from formats.adapter.changes import open_adapter
from formats.errors import FormatError
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.source import merge
from tests.adapters import (
    PREFIX,
    factors,
    is_merged,
    lora,
    noise,
    of_matrix,
    write_adapter,
)
from tests.checkpoints import (
    Weights,
    dense,
    hub_config,
    make_weights,
    moe,
    split_experts,
    text_config,
    write_checkpoint,
)

HUB = "model.language_model.layers.3."
Q = "model.language_model.layers.3.self_attn.q_proj"
EXPERTS = "model.language_model.layers.0.mlp.experts"


def weights_of(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def merged(base: Path, adapter: Path) -> Weights:
    """Return every stored tensor of a base model with an adapter merged."""
    opened = merge(open_checkpoint(base), adapter, "merged")
    return {name: opened.load(name, opened.read(name), ...) for name in opened.where}


def changed(base: Path, adapter: Path) -> Weights:
    """Return those that are other than in the base model."""
    before = weights_of(base)
    now = merged(base, adapter)
    return {name: w for name, w in now.items() if not torch.equal(w, before[name])}


def refused(base: Path, adapter: Path) -> str:
    with pytest.raises(FormatError) as error:
        open_adapter(adapter, open_checkpoint(base))
    return str(error.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return dense(tmp_path_factory.mktemp("dense") / "base")


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return moe(tmp_path_factory.mktemp("moe") / "base", sizes="ragged")


@pytest.fixture(scope="module")
def apart(tmp_path_factory, experts) -> Path:
    """The same with one tensor for each expert and projection."""
    config = json.loads((experts / "config.json").read_text())
    folder = tmp_path_factory.mktemp("apart") / "base"
    return write_checkpoint(folder, config, split_experts(weights_of(experts)))


@pytest.mark.parametrize("namespace", ["model.", "model.language_model.", "language_model.model."])
def test_a_linear_layer_is_found_whichever_way_it_was_trained(base, tmp_path, namespace):
    module = f"{namespace}layers.3.self_attn.q_proj"
    weight = weights_of(base)[f"{Q}.weight"]
    tensors = of_matrix(module, weight)
    found = changed(base, write_adapter(tmp_path / "in", tensors))
    assert set(found) == {f"{Q}.weight"}
    assert is_merged(found[f"{Q}.weight"], weight, *factors(tensors, module), 2.0)


def test_a_base_of_text_alone_takes_an_adapter_of_the_whole(base, tmp_path):
    config = text_config()
    weights = {
        name.replace("model.language_model.", "model."): w
        for name, w in weights_of(base).items()
        if not name.startswith("model.visual.")
    }
    text = write_checkpoint(tmp_path / "text", config, weights)
    tensors = of_matrix(Q, weights["model.layers.3.self_attn.q_proj.weight"])
    found = changed(text, write_adapter(tmp_path / "in", tensors))
    assert set(found) == {"model.layers.3.self_attn.q_proj.weight"}


@pytest.mark.parametrize(
    ("config", "r", "scale"),
    [
        ({"r": 4, "lora_alpha": 8}, 4, 2.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 4, 4.0),
        ({"rank_pattern": {"q_proj": 2}}, 2, 4.0),
        ({"rank_pattern": {"^model.language_model.layers.3.self_attn.q_proj": 2}}, 2, 4.0),
        ({"rank_pattern": {"_proj": 2, "k_proj": 9}}, 4, 2.0),
        ({"alpha_pattern": {r"layers\.\d\.self_attn.q_proj": 1}}, 4, 0.25),
        ({"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 3}}, 16, 3 / 16),
        ({"rank_pattern": {"q_proj": 16}, "use_rslora": True}, 16, 2.0),
        ({"fan_in_fan_out": True}, 4, 2.0),
    ],
)
def test_rank_and_scale_are_what_the_config_says(base, tmp_path, config, r, scale):
    weight = weights_of(base)[f"{Q}.weight"]
    tensors = of_matrix(Q, weight, r=r)
    found = changed(base, write_adapter(tmp_path / "in", tensors, **config))
    assert is_merged(found[f"{Q}.weight"], weight, *factors(tensors, Q), scale)


def test_the_embedding_has_its_factors_the_other_way_round(base, tmp_path):
    name, module = "model.language_model.embed_tokens.weight", "model.language_model.embed_tokens"
    weight = weights_of(base)[name]
    a, b = noise(4, weight.shape[0]), noise(weight.shape[1], 4, seed=2)
    tensors = {f"{PREFIX}{module}.lora_embedding_A": a, f"{PREFIX}{module}.lora_embedding_B": b}
    found = changed(base, write_adapter(tmp_path / "in", tensors))
    assert is_merged(found[name], weight, a.mT, b.mT, 2.0)


def test_modules_that_were_trained_whole_take_their_places(base, tmp_path):
    weights = weights_of(base)
    head, norm = noise(*weights["lm_head.weight"].shape), noise(128, seed=3)
    tensors = {f"{PREFIX}lm_head.weight": head}
    tensors[f"{PREFIX}model.language_model.norm.weight"] = norm
    saved = {"modules_to_save": ["lm_head", "norm"]}
    found = changed(base, write_adapter(tmp_path / "in", tensors, **saved))
    assert torch.equal(found["lm_head.weight"], head.bfloat16())
    assert torch.equal(found["model.language_model.norm.weight"], norm.bfloat16())
    assert len(found) == 2


def test_a_bias_of_the_factors_goes_to_the_layer_s(base, tmp_path):
    module = "model.visual.blocks.0.attn.qkv"
    weights = weights_of(base)
    weight, bias = weights[f"{module}.weight"], weights[f"{module}.bias"]
    tensors = of_matrix(module, weight)
    tensors[f"{PREFIX}{module}.lora_B.bias"] = noise(len(bias), seed=5)
    found = changed(base, write_adapter(tmp_path / "in", tensors, lora_bias=True))
    assert is_merged(found[f"{module}.weight"], weight, *factors(tensors, module), 2.0)
    column, one = noise(len(bias), seed=5)[:, None], torch.ones(1, 1)
    assert is_merged(found[f"{module}.bias"][:, None], bias[:, None], column, one, 2.0)


def stacks(weights: Weights, r: int = 4) -> tuple[Weights, dict[str, list[torch.Tensor]]]:
    """Return the factors of layer 0's fused experts, nested as peft does, and their products."""
    tensors: Weights = {}
    products = {}
    for i, (name, wrapped) in enumerate([("gate_up_proj", ".base_layer"), ("down_proj", "")]):
        count, rows, columns = weights[f"{EXPERTS}.{name}"].shape
        a, b = noise(count * r, columns, seed=7 + i), noise(rows, r * count, seed=17 + i)
        tensors[f"{PREFIX}{EXPERTS}{wrapped}.lora_A.weight"] = a
        tensors[f"{PREFIX}{EXPERTS}{wrapped}.lora_B.weight"] = b
        products[name] = [(b[:, e::count], a[e * r : (e + 1) * r]) for e in range(count)]
    return tensors, products


PARAMETERS = {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}


def test_fused_experts_each_have_their_own_factors(experts, tmp_path):
    weights = weights_of(experts)
    tensors, products = stacks(weights)
    found = changed(experts, write_adapter(tmp_path / "in", tensors, **PARAMETERS))
    assert set(found) == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}
    for name, pairs in products.items():
        before, after = weights[f"{EXPERTS}.{name}"], found[f"{EXPERTS}.{name}"]
        for e, pair in enumerate(pairs):
            assert is_merged(after[e], before[e], *pair, 2.0)


def test_factors_of_fused_experts_fit_split_ones(experts, apart, tmp_path):
    adapter = write_adapter(tmp_path / "in", stacks(weights_of(experts))[0], **PARAMETERS)
    expected = split_experts(merged(experts, adapter))
    found = merged(apart, adapter)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_factors_of_single_experts_fit_fused_ones(experts, apart, tmp_path):
    tensors: Weights = {}
    for name, weight in weights_of(apart).items():
        if name.startswith(f"{EXPERTS}.") and name.split(".")[-3] != "2":
            tensors |= of_matrix(name.removesuffix(".weight"), weight, seed=len(tensors))
    adapter = write_adapter(tmp_path / "in", tensors)
    expected = split_experts(merged(experts, adapter))
    found = merged(apart, adapter)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    before = weights_of(apart)
    other = {name for name in found if not torch.equal(found[name], before[name])}
    assert len(other) == len(tensors) // 2


def transposed(weights: Weights, **config: str) -> tuple[Weights, dict]:
    """Return an adapter of fused experts as peft 0.17 to 0.19 trained it."""
    count, rows, columns = weights[f"{EXPERTS}.down_proj"].shape
    a, b = noise(count * 4, rows), noise(columns, 4 * count, seed=2)
    tensors = {f"{PREFIX}{EXPERTS}.lora_A.weight": a, f"{PREFIX}{EXPERTS}.lora_B.weight": b}
    return tensors, {"target_parameters": ["mlp.experts.down_proj"]} | config


def test_an_older_peft_trained_experts_the_other_way_round(experts, tmp_path):
    weights = weights_of(experts)
    tensors, config = transposed(weights, peft_version="0.18.1")
    found = changed(experts, write_adapter(tmp_path / "in", tensors, **config))
    a, b = (tensors[f"{PREFIX}{EXPERTS}.lora_{side}.weight"] for side in "AB")
    before, count = weights[f"{EXPERTS}.down_proj"], len(weights[f"{EXPERTS}.down_proj"])
    for e in range(count):
        left, right = a[4 * e : 4 * e + 4].mT, b[:, e::count].mT
        assert is_merged(found[f"{EXPERTS}.down_proj"][e], before[e], left, right, 2.0)


@pytest.mark.parametrize(("version", "way"), [("0.19.1", True), ("0.20.0", False), (None, None)])
def test_square_experts_are_told_by_the_version(tmp_path, version, way):
    base = moe(tmp_path / "base")  # 128 columns of 128 rows
    tensors, config = transposed(weights_of(base))
    adapter = write_adapter(tmp_path / "in", tensors, **config, peft_version=version)
    if way is None:
        assert "does not show how it was trained" in refused(base, adapter)
        return
    a, b = (tensors[f"{PREFIX}{EXPERTS}.lora_{side}.weight"] for side in "AB")
    before, after = weights_of(base), merged(base, adapter)
    name, count = f"{EXPERTS}.down_proj", 4
    pair = (a[:4].mT, b[:, ::count].mT) if way else (b[:, ::count], a[:4])
    assert is_merged(after[name][0], before[name][0], *pair, 2.0)


VARIANT = "is set"
CONFIGS = {
    "dora": ({"use_dora": True}, "DoRA"),
    "qalora": ({"use_qalora": True}, "QALoRA"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
    "replicated": ({"layer_replication": [[0, 2], [1, 3]]}, "layer replication"),
    "tokens": ({"trainable_token_indices": [7]}, "trainable tokens"),
    "pissa": ({"init_lora_weights": "pissa_niter_16"}, "changed the base model"),
    "olora": ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
    "loha": ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected 'LORA'"),
    "none": ({"peft_type": None}, "peft_type is missing"),
    "rank-0": ({"r": 0}, "r is 0, expected a rank of 1 or more"),
    "rank-word": ({"rank_pattern": {"q_proj": "four"}}, "q_proj is 'four'"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha is '8', expected a number"),
    "pattern": ({"rank_pattern": {"q_(proj": 4}}, "expected a pattern"),
    "long": ({"rank_pattern": {"a" * 300: 4}}, "at most 200"),
    "saved": ({"modules_to_save": ["lm_head"]}, "lm_head is missing"),
    "names": ({"target_parameters": "mlp.experts.down_proj"}, "expected a list of names"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_merged_is_refused_by_name(base, tmp_path, case):
    config, said = CONFIGS[case]
    tensors = of_matrix(Q, weights_of(base)[f"{Q}.weight"])
    assert said in refused(base, write_adapter(tmp_path / "in", tensors, **config))


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_harmless_initialisations_are_merged(base, tmp_path, init):
    tensors = of_matrix(Q, weights_of(base)[f"{Q}.weight"])
    assert changed(base, write_adapter(tmp_path / "in", tensors, init_lora_weights=init))


def renamed(old: str, new: str) -> Weights:
    return {name.replace(old, new): w for name, w in lora(Q, 512, 128).items()}


TENSORS = {
    "prefix": (renamed(PREFIX, ""), "does not begin with base_model.model."),
    "layer": (renamed("layers.3", "layers.9"), "the base model does not have"),
    "mixer": (renamed("layers.3", "layers.1"), "the base model does not have"),
    "no-module": (renamed("q_proj", "qq_proj"), "layers.3.self_attn.qq_proj"),
    "half": ({f"{PREFIX}{Q}.lora_A.weight": noise(4, 128)}, "there is A alone"),
    "rank": (lora(Q, 512, 128, r=8), "lora_B.weight has shape [512, 8], expected [512, 4]"),
    "rows": (lora(Q, 384, 128), "has shape [384, 4], expected [512, 4]"),
    "columns": (lora(Q, 512, 96), "has shape [4, 96], expected [4, 128]"),
    "dora": ({f"{PREFIX}{Q}.lora_magnitude_vector": noise(512)}, "belongs to DoRA"),
    "ia3": ({f"{PREFIX}{Q}.ia3_l": noise(512, 1)}, "another kind of adapter"),
    "conv": (lora(f"{HUB}x".replace("3.x", "0.linear_attn.conv1d"), 5, 4), "not a matrix"),
    "score": ({f"{PREFIX}score.weight": noise(2, 128)}, "score, which the base model does not"),
    "whole": ({f"{PREFIX}lm_head.weight": noise(300, 128)}, "expected [256, 128]"),
    "bytes": ({n: w.to(torch.float8_e4m3fn) for n, w in lora(Q, 512, 128).items()}, "F8_E4M3"),
    "bias": ({f"{PREFIX}{Q}.lora_B.bias": noise(512)} | lora(Q, 512, 128), "without lora_bias"),
    "nothing": ({}, "holds no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(base, tmp_path, case):
    tensors, said = TENSORS[case]
    assert said in refused(base, write_adapter(tmp_path / "in", tensors))


def test_one_tensor_too_many_is_refused_beside_right_ones(base, tmp_path):
    tensors = of_matrix(Q, weights_of(base)[f"{Q}.weight"])
    tensors |= lora("model.layers.7.self_attn.q_proj", 512, 128)
    assert "layers.7.self_attn.q_proj" in refused(base, write_adapter(tmp_path / "in", tensors))


def test_one_weight_is_not_changed_twice(base, tmp_path):
    weight = weights_of(base)[f"{Q}.weight"]
    tensors = of_matrix(Q, weight) | of_matrix(Q.replace("language_model.", ""), weight, seed=9)
    assert "changes the same weights as" in refused(base, write_adapter(tmp_path / "in", tensors))


def tied(folder: Path) -> Path:
    config = hub_config(tie_word_embeddings=True)
    weights = make_weights(config)
    del weights["lm_head.weight"]
    return write_checkpoint(folder, config, weights)


def test_a_tied_embedding_is_not_changed_alone(tmp_path):
    base, embed = tied(tmp_path / "base"), "model.language_model.embed_tokens"
    value = noise(256, 128)
    alone = {f"{PREFIX}{embed}.weight": value}
    saved = {"modules_to_save": ["embed_tokens"]}
    assert "alone" in refused(base, write_adapter(tmp_path / "one", alone, **saved))
    head = lora("lm_head", 256, 128)
    assert "alone" in refused(base, write_adapter(tmp_path / "two", head))
    both = alone | {f"{PREFIX}lm_head.weight": value.clone()}
    found = changed(base, write_adapter(tmp_path / "three", both, **saved))
    assert torch.equal(found[f"{embed}.weight"], value.bfloat16())
    both[f"{PREFIX}lm_head.weight"][3, 5] += 1
    assert "alone" in refused(base, write_adapter(tmp_path / "four", both, **saved))
    found = changed(
        base, write_adapter(tmp_path / "five", alone, **saved, ensure_weight_tying=True)
    )
    assert list(found) == [f"{embed}.weight"]


def test_a_pickled_adapter_is_refused(base, tmp_path):
    folder = write_adapter(tmp_path / "in", lora(Q, 512, 128))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "adapter_model.safetensors is missing" in refused(base, folder)
