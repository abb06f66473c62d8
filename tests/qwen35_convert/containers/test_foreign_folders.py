"""Right artifacts of other tools pass; fields that an engine would misread are named.

The artifacts are made by hand, by compressed-tensors' own quantiser, or by transformers.
"""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from qwen35_convert import api
from qwen35_convert.recipe.recipe import build_recipe, read_recipe
from qwen35_convert.write.receipt import receipt_name
from tests.checkpoints import dense, moe
from tests.gguf_reader import read_gguf
from tests.qwen35_convert.containers.gguf.test_convert_gguf import made
from tests.qwen35_convert.verification.damage import damage, edit_config

NO_PROOF = api.RunOptions(verify=False)
CODES = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """A dense model and its artifact in the official layout, without a receipt."""
    folder = tmp_path_factory.mktemp("official")
    source = dense(folder / "in")
    api.convert(source, folder / "out", read_recipe("fp8-block"), options=NO_PROOF)
    (folder / "out" / "qwen35-receipt.json").unlink()
    return source, folder / "out"


@pytest.fixture
def artifact(official, tmp_path):
    return official[0], shutil.copytree(official[1], tmp_path / "out")


def failures(out, source=None):
    return [f"{f.tensor} {f.problem}" for f in api.verify(out, source).failures]


def block_of(config):
    return config["quantization_config"]


def change_weights(out, change):
    weights = load_file(out / "model.safetensors")
    for name in [n for n, w in weights.items() if w.dtype == CODES]:
        change(weights, name)
    damage(out, lambda w: (w.clear(), w.update(weights)))


def test_a_file_without_metadata_passes(artifact):
    """llm-compressor writes none, and loaders ask for none."""
    source, out = artifact
    save_file(load_file(out / "model.safetensors"), out / "model.safetensors")
    assert failures(out, source) == []


def test_another_framework_s_metadata_do_not_pass(artifact):
    _, out = artifact
    weights = load_file(out / "model.safetensors")
    save_file(weights, out / "model.safetensors", metadata={"format": "mlx"})
    assert failures(out) == ["model.safetensors has metadata format: mlx, expected pt"]


def test_ignored_layers_is_the_list_too(artifact):
    source, out = artifact

    def rename(config):
        block = block_of(config)
        block["ignored_layers"] = block.pop("modules_to_not_convert")

    edit_config(out, rename)
    assert failures(out, source) == []


def test_a_list_may_name_vision_and_mtp_that_are_gone(artifact):
    source, out = artifact

    def list_more(config):
        block_of(config)["modules_to_not_convert"] += ["model.visual.blocks.0.attn.qkv"]

    edit_config(out, list_more)
    assert failures(out, source) == []


def test_an_mtp_head_that_is_gone_is_a_note(artifact):
    """Every model that transformers loads and saves loses it; its config does not say so."""
    source, out = artifact
    damage(out, lambda w: [w.pop(n) for n in list(w) if n.startswith("mtp.")])
    report = api.verify(out, source)
    assert report.failures == []
    assert report.structure["notes"] == [
        "mtp_num_hidden_layers is 1, but the tensors hold 0 MTP layers"
    ]


def test_one_scale_for_a_tensor_passes(artifact):
    source, out = artifact
    weights = load_file(source / "model.safetensors")

    def requantise(tensors, name):
        w = weights[name.replace("model.", "model.language_model.", 1)].float()
        scale = w.abs().max() / 448
        tensors[name] = (w / scale).to(CODES)
        del tensors[name + "_scale_inv"]
        tensors[name + "_scale"] = scale.reshape(1)

    damage(out, lambda w: [w.pop(n) for n in list(w) if n.startswith("mtp.")])
    change_weights(out, requantise)
    edit_config(out, lambda c: block_of(c).pop("weight_block_size"))
    assert failures(out, source) == []


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_compressed_tensors_own_scales_and_codes_pass(artifact, strategy):
    source, out = artifact
    weights = load_file(source / "model.safetensors")
    entry = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    entry |= {"block_structure": [128, 128]} if strategy == "block" else {}
    args = QuantizationArgs(**entry)

    def requantise(tensors, name):
        w = weights[name.replace("model.", "model.language_model.", 1)]
        rows, cols = (128, 128) if strategy == "block" else (1, w.shape[1])
        top = w.abs().reshape(len(w) // rows, rows, -1, cols).amax((1, 3))
        scale, zero_point = calculate_qparams(-top, top, args)
        tensors[name] = ct_quantize(w, scale, zero_point, args, dtype=CODES)
        del tensors[name + "_scale_inv"]
        tensors[name + "_scale"] = scale

    damage(out, lambda w: [w.pop(n) for n in list(w) if n.startswith("mtp.")])
    change_weights(out, requantise)

    def describe(config):
        ignore = [n for n in block_of(config)["modules_to_not_convert"] if "mtp" not in n]
        group = {"targets": ["Linear"], "format": "float-quantized", "weights": entry}
        group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [r"re:.*in_proj_[ab]$", *ignore],
        }

    edit_config(out, describe)
    assert failures(out, source) == []

    edit_config(
        out, lambda c: block_of(c)["config_groups"]["group_0"]["weights"].update(strategy="tensor")
    )
    (said,) = failures(out, source)
    assert f"strategy of weights is 'tensor', but '{strategy}' is stored" in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fmt": "e5m2"}, "fmt is 'e5m2', but E4M3 codes are stored"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static', but no scales of inputs"),
        ({"weight_block_size": None}, "weight_block_size is None, but fp8-block is stored"),
        ({"scale_fmt": "ue5m3"}, "scale_fmt is 'ue5m3', expected 'float' or 'ue8m0'"),
    ],
)
def test_fields_that_engines_act_on_are_read(artifact, fields, said):
    _, out = artifact
    edit_config(out, lambda c: block_of(c).update(fields))
    (found,) = failures(out)
    assert found.startswith("config.json quantization_config: ")
    assert said in found


def test_ue8m0_scales_are_powers_of_two(artifact):
    source, out = artifact
    edit_config(out, lambda c: block_of(c).update(scale_fmt="ue8m0"))
    assert failures(out, source) == []

    def stretch(tensors, name):
        tensors[name + "_scale_inv"] *= 1.5

    change_weights(out, stretch)
    assert any("is not a power of two, but scale_fmt" in said for said in failures(out))


def test_quantised_experts_in_one_stack_are_named(tmp_path):
    source, out = moe(tmp_path / "in"), tmp_path / "out"
    api.convert(source, out, read_recipe("fp8-block"), options=NO_PROOF)

    def stack(weights):
        for layer in ["model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3"]:
            base = f"{layer}.mlp.experts."
            for suffix in ("weight", "weight_scale_inv"):
                halves = [
                    torch.cat([bits(weights.pop(f"{base}{e}.{p}_proj.{suffix}")) for p in PARTS])
                    for e in range(4)
                ]
                downs = [bits(weights.pop(f"{base}{e}.down_proj.{suffix}")) for e in range(4)]
                end = suffix.removeprefix("weight")
                weights[f"{base}gate_up_proj{end}"] = typed(torch.stack(halves), end)
                weights[f"{base}down_proj{end}"] = typed(torch.stack(downs), end)

    damage(out, stack)
    found = failures(out, source)
    assert any(
        "layers.0.mlp.experts.gate_up_proj is a stack of quantised experts" in said
        for said in found
    )


PARTS = ("gate", "up")


def bits(x):
    return x.view(torch.uint8) if x.dtype == CODES else x


def typed(x, end):
    return x if end else x.view(CODES)


def test_what_transformers_saves_again_passes(nano, tmp_path):
    """It renames, drops vision and MTP, and keeps the numbers."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(nano, dtype=torch.float32)
        model.save_pretrained(tmp_path / "f32")
    weights = load_file(tmp_path / "f32" / "model.safetensors")
    kept = load_file(next(nano.glob("*.safetensors")))
    save_file(
        {name: w.to(kept[name].dtype) for name, w in weights.items()},
        tmp_path / "f32" / "model.safetensors",
        metadata={"format": "pt"},
    )
    report = api.verify(tmp_path / "f32", nano)
    assert report.failures == []


@pytest.mark.parametrize("scheme", ["f32", "bf16", "q8_0"])
def test_a_folder_and_the_gguf_made_from_it_prove_each_other(nano, tmp_path, scheme):
    """Of norms 1 + w is stored, of A_log -exp: they come back to their rounding only."""
    source = made(tmp_path / "in", nano)
    folder, file = tmp_path / "out", tmp_path / "m.gguf"
    api.convert(source, folder, read_recipe("bf16-split"), options=NO_PROOF)
    recipe = {"name": scheme, "quantize": {"scheme": scheme}, "export": {"format": "gguf"}}
    api.convert(folder, file, build_recipe(recipe), options=NO_PROOF)
    assert failures(file, folder) == []
    if scheme != "q8_0":
        assert failures(folder, file) == []
    back = tmp_path / "back"
    api.convert(file, back, read_recipe("bf16-split"), options=NO_PROOF)
    assert failures(back, file) == []
    file.with_name(receipt_name(file)).unlink()  # it names another model.safetensors
    assert failures(file, back) == []


def test_a_type_without_a_bound_is_unproven_not_passed(nano, tmp_path):
    """Its own encoder is not ours: with a source it does not pass, without one it is said."""
    import gguf
    import libgguf

    source = made(tmp_path / "in", nano, hidden_size=256)
    weights = load_file(source / "model.safetensors")
    weights["model.language_model.layers.1.mlp.up_proj.weight"].sign_()  # what TQ2_0 can hold
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "m.gguf"
    api.convert(source, path, build_recipe(Q8), options=NO_PROOF)
    reader = read_gguf(path)
    writer = gguf.GGUFWriter(tmp_path / "tq.gguf", "qwen35")
    name = "blk.1.ffn_up.weight"
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], kind)
    for tensor in reader.tensors:
        data, dtype = tensor.data, tensor.tensor_type
        if tensor.name == name:
            values, dtype = gguf.dequantize(data, dtype), gguf.GGMLQuantizationType.TQ2_0
            data = libgguf.quantize_rows(values, dtype.value)
        writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    alone, against = api.verify(tmp_path / "tq.gguf"), api.verify(tmp_path / "tq.gguf", source)
    assert alone.passed
    assert alone.structure["unproven"] == ["tq2_0"]
    assert [f"{f.tensor} {f.problem}" for f in against.failures] == [
        f"{name} is tq2_0: no bound is known of this type, it is unproven"
    ]
    assert [line["name"] for line in against.tensors if line.get("unproven")] == [
        "layers.1.mlp.up_proj"
    ]


Q8 = {"name": "q8_0", "quantize": {"scheme": "q8_0"}, "export": {"format": "gguf"}}
