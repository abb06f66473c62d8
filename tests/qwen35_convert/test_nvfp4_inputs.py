"""NVFP4 with scales of inputs: what a text says, where it is stored, and how it is proven."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import qwen35_convert as q
from qwen35_convert.calibration.scales import rounded_up
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.recipe import build_recipe
from qwen35_convert.text.tokens import text_ids
from runtime.largest_inputs import LargestInputs
from runtime.layerwise import observe_all
from runtime.workers import Workers
from tests.checkpoints import moe
from tests.qwen35_convert.verification.damage import damage

FAST = q.RunOptions(workers=1)
LAYER = "model.language_model.layers."
DOWN = LAYER + "1.mlp.down_proj.input_global_scale"


@pytest.fixture(scope="module")
def made(tmp_path_factory, nano_path):
    """Return the bundled model, the text on the disk, with its receipt."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text.txt").write_text("In the beginning was the Word, and the Word was long. " * 60)
    recipe = q.read_recipe("nvfp4", [f"quantize.calibrate.text={folder / 'text.txt'}"])
    done = q.convert(nano_path, folder / "out", recipe, FAST)
    assert done.report.passed, done.report.failures
    return folder / "out"


@pytest.fixture
def artifact(made, tmp_path):
    return shutil.copytree(made, tmp_path / "out")


def scales(folder):
    tensors = load_file(folder / "model.safetensors")
    return {n: float(t) for n, t in tensors.items() if n.endswith(".input_global_scale")}


def test_it_is_proven_with_its_receipt_and_without(artifact, nano):
    assert q.verify(artifact, nano).failures == []
    (artifact / "qwen35-receipt.json").unlink()
    assert q.verify(artifact, nano).failures == []
    assert q.inspect(artifact).quantization == "nvfp4"


def test_without_its_text_it_is_judged_by_bounds(artifact, nano):
    receipt = artifact / "qwen35-receipt.json"
    receipt.write_text(receipt.read_text().replace("text.txt", "gone.txt"))
    report = q.verify(artifact, nano)
    assert report.failures == []
    assert report.calibration["proof"] == "bounds"
    assert "gone.txt" in report.calibration["why"]


@pytest.mark.filterwarnings("ignore:You passed")
def test_scales_are_those_of_the_largest_inputs_that_transformers_sees(made, nano_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(nano_path, dtype=torch.float32)
    largest: dict[str, float] = {}

    def watch(name):
        def hook(_module, inputs):
            largest[name] = max(largest.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name.replace("model.", LAYER[:-7], 1)))
    ids = text_ids(open_checkpoint(nano_path), str(made.parent / "text.txt"))
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, 512):
            model(torch.tensor([ids[start : start + 512]]))
    found = scales(made)
    assert len(found) == 25
    for name, scale in found.items():
        amax = largest[name.removesuffix(".input_global_scale")]
        assert amax * 0.9999 <= 2688 / scale <= amax * (1 + 2.0**-7), name


def test_what_has_one_input_has_one_scale(made):
    found = scales(made)
    for layer, names in ((3, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                         (0, ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")),
                         (0, ("mlp.gate_proj", "mlp.up_proj"))):  # fmt: skip
        assert len({found[f"{LAYER}{layer}.{name}.input_global_scale"] for name in names}) == 1


def test_config_says_that_inputs_are_four_bits(made):
    block = json.loads((made / "config.json").read_text())["quantization_config"]
    (group,) = block["config_groups"].values()
    assert group["input_activations"]["dynamic"] == "local"
    assert group["input_activations"]["group_size"] == 16
    quantization = pytest.importorskip("compressed_tensors.quantization")
    quantization.QuantizationScheme.model_validate(group)


def test_modelopts_scales_are_the_reciprocals(made, nano, tmp_path):
    text = f"quantize.calibrate.text={made.parent / 'text.txt'}"
    recipe = q.read_recipe("nvfp4", [text, "quantize.dialect=modelopt"])
    done = q.convert(nano, tmp_path / "out", recipe, FAST)
    assert done.report.passed, done.report.failures
    (tmp_path / "out" / "qwen35-receipt.json").unlink()
    assert q.verify(tmp_path / "out", nano).failures == []
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, scale in scales(made).items():
        own = tensors[name.replace("input_global_scale", "input_scale")]
        assert own.shape == ()
        assert float(own) == pytest.approx(1 / scale, rel=1e-6)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["quant_algo"] == "NVFP4"


def test_the_receipt_says_which_text_it_was(made):
    receipt = json.loads((made / "qwen35-receipt.json").read_text())
    text = (made.parent / "text.txt").read_bytes()
    assert receipt["calibration"]["text"] == "text.txt"
    assert receipt["calibration"]["text_sha256"] == hashlib.sha256(text).hexdigest()
    assert receipt["recipe"]["quantize"]["calibrate"]["tokens"] == 32768


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_another_scale_is_named_by_its_receipt(artifact, nano, factor):
    receipt = (artifact / "qwen35-receipt.json").read_bytes()
    damage(artifact, lambda w: w[DOWN].mul_(factor))
    (artifact / "qwen35-receipt.json").write_bytes(receipt)
    assert any(
        DOWN.removesuffix("input_global_scale") in f.tensor
        for f in q.verify(artifact, nano).failures
    )


def test_a_recipe_without_such_a_scheme_reads_no_text():
    with pytest.raises(RecipeError, match="calibrate is for"):
        q.read_recipe("nvfp4a16", ["quantize.calibrate.tokens=512"])
    assert q.read_recipe("nvfp4a16").quantize.calibrate is None
    rules = [{"match": "layers.*.mlp.*", "scheme": "nvfp4"}]
    recipe = build_recipe({"quantize": {"scheme": "keep", "rules": rules}})
    assert recipe.quantize.calibrate.text == "default"


def test_a_text_that_is_not_there_is_said(nano, tmp_path):
    recipe = q.read_recipe("nvfp4", ["quantize.calibrate.text=nowhere.txt"])
    with pytest.raises(q.Qwen35Error, match=r"nowhere\.txt"):
        q.convert(nano, tmp_path / "out", recipe, FAST)
    assert not (tmp_path / "out").exists()


def test_an_expert_that_no_token_reached_gets_the_largest_of_its_layer(tmp_path):
    source = open_checkpoint(moe(tmp_path / "in", num_experts=32, num_experts_per_tok=1))
    largest = LargestInputs()
    with Workers("cpu") as workers:
        observe_all(source, [torch.arange(3)], largest, workers=workers)
    largest.fill()
    unseen = [n for n in largest.unseen if n.startswith("layers.0.mlp.experts.")]
    assert unseen
    kin = [v for n, v in largest.values.items() if n.startswith("layers.0.mlp.experts.")
           and n.endswith(".down_proj") and n not in largest.unseen]  # fmt: skip
    for name in unseen:
        if name.endswith(".down_proj"):
            assert largest.values[name] == max(kin)


def test_inputs_that_are_not_finite_get_no_scale():
    with pytest.raises(q.Qwen35Error, match="a has inputs that are NaN or infinite"):
        LargestInputs().observe(["a"], torch.tensor([[1.0, torch.nan]]))


def test_the_largest_is_that_of_all_calls():
    largest = LargestInputs()
    for x in (torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 0.0]])):
        largest.observe(["a.gate_proj", "a.up_proj"], x)
    assert largest.values == {"a.gate_proj": 3.0, "a.up_proj": 3.0}


@pytest.mark.parametrize("value", [0.0, 1.0, 1.001, 3.7, 2.0**-30])
def test_inputs_are_rounded_up_to_bfloat16(value):
    found = float(rounded_up(value))
    assert value <= found <= value * (1 + 2.0**-7)
    assert float(torch.tensor(found).bfloat16()) == found


def test_many_machines_are_refused(nano_path, tmp_path):
    many = q.RunOptions(executor="ray")
    with pytest.raises(RecipeError, match=r"the scheme is nvfp4, which goes .* is ray"):
        q.convert(nano_path, tmp_path / "out", "nvfp4", many)
