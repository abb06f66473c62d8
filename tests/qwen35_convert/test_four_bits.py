"""Four and eight bits from a recipe to an artifact that other libraries read, and back."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import qwen35_convert as q
from quant.fourbit.parts import GLOBAL, PACKED, SCALE
from quant.opening import open_value
from qwen35_convert.containers.registry import open_checkpoint
from tests.qwen35_convert.verification.damage import edit_config

RECIPES = ("nvfp4a16", "mxfp4a16", "int4", "int4-g32", "int8", "nvfp4-mixed", "int4-mixed")
DOWN = "model.language_model.layers.1.mlp.down_proj.weight"
FAST = q.RunOptions(workers=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory, nano_path):
    """Return a function that converts the bundled model once by each recipe."""
    folder = tmp_path_factory.mktemp("four-bits")

    def make(recipe):
        out = folder / recipe
        if not out.exists():
            done = q.convert(nano_path, out, recipe, FAST)
            assert done.report.passed, done.report.failures
        return out

    return make


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_artifact_is_proven_with_its_receipt_and_without(made, nano_path, tmp_path, recipe):
    out = shutil.copytree(made(recipe), tmp_path / "out")
    assert q.verify(out, nano_path).passed
    (out / "qwen35-receipt.json").unlink()
    report = q.verify(out, nano_path)
    assert report.passed, report.failures


@pytest.mark.filterwarnings("ignore:You passed")
@pytest.mark.parametrize("recipe", RECIPES[:5])
def test_transformers_reads_the_values_that_we_read(made, recipe):
    transformers = pytest.importorskip("transformers")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        made(recipe), dtype=torch.bfloat16, quantization_config=config, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not [key for key in info["unexpected_keys"] if not key.startswith(("mtp", "model.vis"))]
    artifact, state = open_checkpoint(made(recipe)), model.state_dict()
    atoms = [atom for atom in artifact.layout.atoms.values() if atom.quantized]
    assert len(atoms) == 25
    for atom in atoms:
        assert torch.equal(state[f"model.{atom.hub}"], open_value(artifact, atom).all()), atom.name


def test_nothing_but_linears_outside_mtp_is_quantised(made):
    for name, atom in open_checkpoint(made("int4")).layout.atoms.items():
        assert not (atom.quantized and name.startswith(("mtp.", "visual."))), name


def test_fused_weights_have_one_global_scale(made):
    tensors = load_file(made("nvfp4a16") / "model.safetensors")
    layer = "model.language_model.layers.{}.{}.weight_global_scale"
    fused = (
        (3, [f"self_attn.{x}_proj" for x in "qkv"]),
        (0, ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"]),
        (0, ["mlp.gate_proj", "mlp.up_proj"]),
    )
    for index, names in fused:
        assert len({float(tensors[layer.format(index, name)]) for name in names}) == 1
    alone = {float(tensors[layer.format(0, f"mlp.{x}_proj")]) for x in ("gate", "down")}
    assert len(alone) == 2


def _double_a_scale(tensors):
    tensors[DOWN + SCALE][:, 0] = (tensors[DOWN + SCALE][:, 0].float() * 2).to(
        tensors[DOWN + SCALE].dtype
    )


def _erase_a_row(tensors):
    tensors[DOWN + PACKED][5] = 0 if tensors[DOWN + PACKED].dtype == torch.uint8 else -2004318072


def _swap_halves(tensors):
    rows = tensors[DOWN + PACKED]
    tensors[DOWN + PACKED] = rows.roll(len(rows) // 2, 0)


def _flip_signs(tensors):
    words = tensors[DOWN + PACKED]
    words[0] = (words[0] ^ 0x88) if words.dtype == torch.uint8 else ~words[0]


@pytest.mark.parametrize("change", [_double_a_scale, _erase_a_row, _swap_halves, _flip_signs])
@pytest.mark.parametrize("recipe", ["nvfp4a16", "int4"])
def test_what_no_right_encoder_writes_is_named_without_a_receipt(
    made, nano_path, tmp_path, recipe, change
):
    out = shutil.copytree(made(recipe), tmp_path / "out")
    (out / "qwen35-receipt.json").unlink()
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    report = q.verify(out, nano_path)
    assert [f for f in report.failures if f.tensor.startswith(DOWN)], report.failures


def test_a_global_scale_that_is_not_shared_is_named(made, nano_path, tmp_path):
    out = shutil.copytree(made("nvfp4a16"), tmp_path / "out")
    (out / "qwen35-receipt.json").unlink()
    tensors = load_file(out / "model.safetensors")
    up = DOWN.replace("down_proj", "up_proj")
    tensors[up + GLOBAL] *= 2
    tensors[up + SCALE] = (tensors[up + SCALE].float() * 2).clamp(max=448).to(torch.float8_e4m3fn)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    report = q.verify(out, nano_path)
    assert [f for f in report.failures if "global" in f.problem], report.failures


@pytest.mark.parametrize("recipe", ["nvfp4a16", "int4-g32"])
def test_an_artifact_is_converted_back(made, tmp_path, recipe):
    out = tmp_path / "back"
    assert q.convert(made(recipe), out, "bf16-split", FAST).report.passed
    source = open_checkpoint(made(recipe))
    atom = source.layout.atoms["layers.1.mlp.down_proj"]
    back = load_file(out / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(back, open_value(source, atom).all())


def test_inspect_names_the_scheme(made):
    assert q.inspect(made("int8")).quantization == "int8"
    assert q.inspect(made("nvfp4a16")).quantization == "nvfp4a16"


def test_a_rule_for_what_this_model_lacks_is_no_mistake(nano_path, tmp_path):
    rules = "quantize.rules=[{match: 'layers.*.mlp.experts.*', scheme: int4}]"
    assert q.convert(nano_path, tmp_path / "out", q.read_recipe("fp8-channel", [rules]), FAST)


# W4A4 of other writers


def _with_inputs(out, scale=71.7):
    """Make it llm-compressor's NVFP4, whose inputs have scales."""
    tensors = load_file(out / "model.safetensors")
    modules = [n.removesuffix(GLOBAL) for n in tensors if n.endswith(GLOBAL)]
    names = [module.removesuffix("weight") + "input_global_scale" for module in modules]
    tensors |= {name: torch.tensor([scale]) for name in names}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def describe(config):
        (group,) = config["quantization_config"]["config_groups"].values()
        group["weights"].pop("scale_dtype")  # as before compressed-tensors 0.13
        group["input_activations"] = {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
            "symmetric": True, "dynamic": "local", "observer": "minmax",
        }  # fmt: skip

    edit_config(out, describe)
    (out / "model.safetensors.index.json").unlink()
    return out


@pytest.fixture
def with_inputs(made, tmp_path):
    return _with_inputs(shutil.copytree(made("nvfp4a16"), tmp_path / "out"))


def test_w4a4_of_llm_compressor_passes_and_is_converted_on(with_inputs, nano_path, tmp_path):
    report = q.verify(with_inputs, nano_path)
    assert report.passed, report.failures
    assert q.inspect(with_inputs).quantization == "nvfp4"
    done = q.convert(with_inputs, tmp_path / "back", "bf16-split", FAST)
    assert done.report.passed
    assert any("25 scales of inputs are left out" in note for note in done.plan.notes)


@pytest.mark.parametrize("value", [1.4e-45, 4e15, float("nan"), -3.0])
def test_scales_of_inputs_that_nobody_wrote_are_named(with_inputs, value):
    tensors = load_file(with_inputs / "model.safetensors")
    name = DOWN.removesuffix("weight") + "input_global_scale"
    tensors[name].fill_(value)
    save_file(tensors, with_inputs / "model.safetensors", metadata={"format": "pt"})
    (said,) = dict.fromkeys(q.verify(with_inputs).failures)
    assert (said.tensor, "no calibration" in said.problem) == (name, True)


def test_scales_of_inputs_that_no_config_promises_are_named(with_inputs):
    def null(config):
        (group,) = config["quantization_config"]["config_groups"].values()
        group["input_activations"] = None

    edit_config(with_inputs, null)
    (said,) = q.verify(with_inputs).failures
    assert "input_activations is null, but scales of inputs are stored" in said.problem
