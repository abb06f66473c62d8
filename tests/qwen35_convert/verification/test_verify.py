"""`verify` names every planted fault; an artifact is opened with its own eyes, not by a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.checkpoints import Weights, dense, hub_config, make_weights, moe, write_checkpoint
from tests.qwen35_convert.verification.damage import damage, edit_config


@pytest.fixture
def converted(tmp_path) -> tuple[Path, Path]:
    """A square-MLP model and its FP8 artifact, to be damaged."""
    config = hub_config(intermediate_size=128)
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    api.convert(
        source, tmp_path / "out", read_recipe("fp8-block"), options=api.RunOptions(verify=False)
    )
    return source, tmp_path / "out"


def swap(weights: Weights, one: str, two: str) -> None:
    for suffix in ("weight", "weight_scale_inv"):
        a, b = f"{one}.{suffix}", f"{two}.{suffix}"
        if a in weights:
            weights[a], weights[b] = weights[b].clone(), weights[a].clone()


def failures(source: Path | None, out: Path, level: str = "tensors") -> str:
    report = api.verify(out, source, level=level)
    assert not report.passed
    return "\n".join(f"{f.tensor} {f.problem}" for f in report.failures)


def test_an_undamaged_artifact_passes(converted):
    source, out = converted
    report = api.verify(out, source)
    assert report.failures == []
    assert api.verify(out).failures == []


def test_a_transposed_tensor_is_named(converted):
    def transpose(weights):
        name = "model.layers.0.mlp.up_proj.weight"
        weights[name] = weights[name].view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)

    source, out = converted
    damage(out, transpose)
    said = failures(source, out)
    assert "model.layers.0.mlp.up_proj.weight holds the transpose" in said
    assert said.count("\n") == 0


def test_swapped_gate_and_up_are_named(converted):
    source, out = converted
    damage(out, lambda w: swap(w, "model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj"))
    said = failures(source, out)
    assert "layers.2.mlp.gate_proj.weight holds the values of layers.2.mlp.up_proj" in said
    assert "layers.2.mlp.up_proj.weight holds the values of layers.2.mlp.gate_proj" in said


def test_swapped_in_proj_a_and_b_are_named(converted):
    source, out = converted
    prefix = "model.layers.1.linear_attn.in_proj_"
    damage(out, lambda w: swap(w, prefix + "a", prefix + "b"))
    said = failures(source, out)
    assert "in_proj_a.weight holds the values of layers.1.linear_attn.in_proj_b" in said


def test_a_dropped_scale_is_named_without_a_source(converted):
    _, out = converted
    name = "model.layers.3.self_attn.o_proj.weight_scale_inv"
    damage(out, lambda w: w.pop(name))
    assert "o_proj.weight is FP8 without a scale" in failures(None, out, "structure")


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_norm_is_named(converted, shift):
    def shifted(weights):
        weights["model.layers.2.input_layernorm.weight"] += shift

    source, out = converted
    damage(out, shifted)
    said = failures(source, out)
    assert f"model.layers.2.input_layernorm.weight is the source shifted by {shift:+d}" in said


def test_value_heads_in_another_order_are_named(converted):
    def tile(weights):
        name = "model.layers.0.linear_attn.in_proj_z.weight"
        rows = weights[name].view(torch.uint8).reshape(3, 128, -1)
        weights[name] = rows[[2, 0, 1]].reshape(384, -1).view(torch.float8_e4m3fn)
        scale = weights[name + "_scale_inv"]
        weights[name + "_scale_inv"] = scale[[2, 0, 1]]

    source, out = converted
    damage(out, tile)
    assert "in_proj_z.weight holds the source's rows in another order" in failures(source, out)


def test_a_control_tensor_cast_to_bf16_is_named(converted):
    def cast(weights):
        name = "model.layers.0.linear_attn.A_log"
        weights[name] = weights[name].to(torch.bfloat16)

    source, out = converted
    damage(out, cast)
    assert "A_log is BF16, but the source has F32" in failures(source, out)


def test_one_flipped_bit_of_a_protected_tensor_is_named(converted):
    def flip(weights):
        weights["model.layers.1.linear_attn.dt_bias"].view(torch.uint8)[0] ^= 1

    source, out = converted
    damage(out, flip)
    assert "layers.1.linear_attn.dt_bias differs" in failures(source, out)


def test_one_wrong_code_is_named(converted):
    def spoil(weights):
        codes = weights["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)
        codes[5, 9] = 0x7E if codes[5, 9] & 0x80 else 0xFE

    source, out = converted
    damage(out, spoil)
    assert "layers.0.mlp.down_proj.weight differs" in failures(source, out)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_scale_is_named_without_a_source(converted, bad):
    def spoil(weights):
        weights["model.layers.0.mlp.down_proj.weight_scale_inv"][0, 0] = bad

    _, out = converted
    damage(out, spoil)
    assert "not finite and positive" in failures(None, out)


def test_a_nan_code_is_named_without_a_source(converted):
    def spoil(weights):
        weights["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[0, 0] = 0x7F

    _, out = converted
    damage(out, spoil)
    assert "codes that are NaN" in failures(None, out)


def test_a_quantised_control_tensor_is_named(tmp_path):
    config = hub_config(linear_num_value_heads=128, linear_value_head_dim=8)
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    api.convert(
        source, tmp_path / "out", read_recipe("fp8-block"), options=api.RunOptions(verify=False)
    )

    def quantise(weights):
        name = "model.layers.0.linear_attn.in_proj_a.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = torch.ones(1, 1, dtype=torch.bfloat16)

    damage(tmp_path / "out", quantise)
    assert "in_proj_a is never quantised" in failures(None, tmp_path / "out", "structure")


def test_a_missing_tensor_is_named(converted):
    source, out = converted
    damage(out, lambda w: w.pop("mtp.norm.weight"))
    assert "mtp.norm.weight is missing" in failures(source, out, "structure")


def test_a_changed_file_is_caught_by_the_receipt(converted):
    _, out = converted
    tokenizer = out / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().swapcase())
    assert "tokenizer.json is not the file that the receipt describes" in failures(None, out)


def listed(config: dict) -> list[str]:
    return config["quantization_config"]["modules_to_not_convert"]


def test_a_linear_missing_from_the_list_is_named_for_each_engine(converted):
    _, out = converted
    module = "model.layers.0.linear_attn.in_proj_b"
    edit_config(out, lambda c: listed(c).remove(module))
    said = failures(None, out, "structure")
    for engine in ("vLLM", "transformers", "SGLang"):
        assert (
            f"{module} is not quantised, and is not listed as unquantised under the rule of "
            f"{engine}" in said
        )


def test_a_list_in_the_wrong_namespace_is_named(converted):
    def wrap(config):
        block = config["quantization_config"]
        block["modules_to_not_convert"] = [
            n.replace("model.", "model.language_model.", 1) for n in listed(config)
        ]

    _, out = converted
    edit_config(out, wrap)
    said = failures(None, out, "structure")
    assert "is listed as unquantised, but no such module is stored" in said
    assert "in_proj_a is not quantised, and is not listed" in said


def test_a_name_of_another_layout_beside_the_right_one_is_not_named(converted):
    """As AutoRound writes in_proj_a of the hub's layout: another entry covers it."""
    _, out = converted
    other = "model.language_model.layers.0.linear_attn.in_proj_a"
    edit_config(out, lambda c: listed(c).append(other))
    tensors = {failure.tensor for failure in api.verify(out, level="structure").failures}
    assert other not in tensors  # the receipt knows that config.json was edited


def test_a_router_name_in_a_dense_list_is_named(converted):
    _, out = converted
    edit_config(out, lambda c: listed(c).append("mlp.gate"))
    assert "mlp.gate is listed as unquantised, but no such module" in failures(
        None, out, "structure"
    )


def test_a_config_without_its_block_is_named(converted):
    _, out = converted
    edit_config(out, lambda c: c.pop("quantization_config"))
    assert "has no quantization_config" in failures(None, out, "structure")


def test_a_false_mtp_count_and_class_are_named(converted):
    def lie(config):
        config["mtp_num_hidden_layers"] = 0
        config["architectures"] = ["Qwen3_5ForConditionalGeneration"]

    _, out = converted
    edit_config(out, lie)
    said = failures(None, out, "structure")
    assert "mtp_num_hidden_layers is 0, but 1 MTP layers are stored" in said
    assert "names Qwen3_5ForConditionalGeneration" in said


def test_swapped_experts_are_named(tmp_path):
    source = moe(tmp_path / "in")
    api.convert(
        source, tmp_path / "out", read_recipe("fp8-block"), options=api.RunOptions(verify=False)
    )
    prefix = "model.layers.1.mlp.experts."
    damage(tmp_path / "out", lambda w: swap(w, prefix + "0.up_proj", prefix + "3.up_proj"))
    said = failures(source, tmp_path / "out")
    assert "layers.1.mlp.experts.0.up_proj.weight holds the values of" in said
    assert "experts.3.up_proj" in said


def test_verify_reads_the_artifact_of_another_tool(tmp_path):
    """Scales as amax / 448 rounded to bfloat16 after quantising, float32 or fused experts: fine."""
    source = dense(tmp_path / "in")
    for scale in ("float32", "bfloat16"):
        recipe = read_recipe("fp8-block", [f"quantize.scale={scale}"])
        done = api.convert(source, tmp_path / scale, recipe)
        assert done.report is not None
        assert done.report.failures == []
