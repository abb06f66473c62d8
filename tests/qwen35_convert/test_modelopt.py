"""ModelOpt's checkpoints as input, as artifacts to be judged, and as a dialect that is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qwen35_convert as q
from formats.errors import FormatError
from formats.gguf.file import GgufFile
from formats.quant_methods import MODELOPT
from quant.errors import QuantError
from quant.fourbit.ggml_nvfp4 import split
from quant.fourbit.nvfp4 import NVFP4
from quant.fourbit.parts import GLOBAL, PACKED, SCALE
from quant.fourbit.reference import pack
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.text.generation import Prompt
from tests.checkpoints import moe
from tests.qwen35_convert.verification.damage import damage, edit_config

FAST = q.RunOptions(workers=1)
LAYER = "model.language_model.layers."
DOWN, UP = LAYER + "1.mlp.down_proj", LAYER + "1.mlp.up_proj"
ATTENTION = {"match": "layers.*.self_attn.*", "scheme": "keep"}


def modelopt(*overrides: str) -> q.Recipe:
    return q.read_recipe("nvfp4a16", ["quantize.dialect=modelopt", *overrides])


@pytest.fixture(scope="module")
def weights_alone(tmp_path_factory, nano_path):
    """Return the bundled model as ModelOpt's W4A16_NVFP4, with its receipt."""
    out = tmp_path_factory.mktemp("modelopt") / "out"
    done = q.convert(nano_path, out, modelopt(), FAST)
    assert done.report.passed, done.report.failures
    return out


@pytest.fixture
def artifact(weights_alone, tmp_path):
    """Return a copy that may be changed."""
    return shutil.copytree(weights_alone, tmp_path / "out")


def block_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def modules(weights: dict) -> list[str]:
    """Return the modules whose weights are NVFP4."""
    suffix = ".weight_scale_2"
    return [name.removesuffix(suffix) for name in weights if name.endswith(suffix)]


def set_algorithm(out: Path, algorithm: str) -> None:
    """Say another algorithm in both files."""
    edit_config(out, lambda c: c["quantization_config"].update(quant_algo=algorithm))
    path = out / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"]["quant_algo"] = algorithm
    path.write_text(json.dumps(content))


def with_inputs(out: Path, scale: float = 0.0123) -> Path:
    """Make it NVFP4, whose inputs have scales."""
    damage(out, lambda w: w.update({f"{m}.input_scale": torch.tensor(scale) for m in modules(w)}))
    set_algorithm(out, "NVFP4")
    return out


def mixed(out: Path, source: Path) -> Path:
    """Make it MIXED_PRECISION: FP8 with static scales in attention, NVFP4 in the MLP."""
    original = load_file(next(source.glob("*.safetensors")))

    def requantise(weights):
        for module in [m for m in modules(weights) if ".mlp." not in m]:
            w = original[f"{module}.weight"].float()
            scale = w.abs().max() / 448
            weights[f"{module}.weight"] = (w / scale).to(torch.float8_e4m3fn)
            weights[f"{module}.weight_scale"] = scale
            weights[f"{module}.input_scale"] = torch.tensor(0.02)
            del weights[f"{module}.weight_scale_2"]

    quantised = modules(load_file(out / "model.safetensors"))
    damage(out, requantise)
    four = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    layers = {m: four if ".mlp." in m else {"quant_algo": "FP8"} for m in quantised}
    said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    edit_config(out, lambda c: c["quantization_config"].update(said))
    (out / "hf_quant_config.json").unlink()
    return out


def failures(out: Path, source: Path | None = None) -> list[str]:
    return [f"{f.tensor} {f.problem}" for f in q.verify(out, source).failures]


# As a dialect


def test_it_is_proven_with_its_receipt_and_without(artifact, nano):
    assert failures(artifact, nano) == []
    (artifact / "qwen35-receipt.json").unlink()
    assert failures(artifact, nano) == []


def test_names_shapes_and_values_are_modelopts(weights_alone, nano_path):
    tensors = load_file(weights_alone / "model.safetensors")
    original = load_file(next(nano_path.glob("*.safetensors")))
    names = {name for name in tensors if name.startswith(DOWN)}
    assert names == {DOWN + end for end in (".weight", ".weight_scale", ".weight_scale_2")}
    w = original[DOWN + ".weight"]
    scheme = NVFP4.in_dialect(MODELOPT)
    rows = scheme.encode(w, (w.float().abs().max() / 2688).reshape(()))
    for key, end in ((PACKED, ".weight"), (SCALE, ".weight_scale"), (GLOBAL, ".weight_scale_2")):
        assert torch.equal(tensors[DOWN + end].float(), rows[key].float()), end
    pair = [float(tensors[f"{LAYER}1.mlp.{x}_proj.weight_scale_2"]) for x in ("gate", "up")]
    assert pair[0] == pair[1]


def test_config_and_own_file_are_as_its_exporter_writes_them(weights_alone):
    block = block_of(weights_alone)
    own = json.loads((weights_alone / "hf_quant_config.json").read_text())
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert block["config_groups"] == {"group_0": {"weights": numbers, "targets": ["Linear"]}}
    assert (block["quant_method"], block["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert own["producer"]["name"] == block["producer"]["name"] == "modelopt"
    assert own["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": block["ignore"],
    }
    assert "lm_head" in block["ignore"]


def test_experts_are_written_one_by_one_and_proven(tmp_path):
    source = moe(tmp_path / "in")
    assert q.convert(source, tmp_path / "out", modelopt("mtp=drop"), FAST).report.passed
    (tmp_path / "out" / "qwen35-receipt.json").unlink()
    assert failures(tmp_path / "out", source) == []
    weights = load_file(tmp_path / "out" / "model.safetensors")
    pair = [weights[f"{LAYER}0.mlp.experts.1.{x}_proj.weight_scale_2"] for x in ("gate", "up")]
    assert torch.equal(*pair)


def test_other_schemes_are_refused_in_it_by_name(nano, tmp_path):
    with pytest.raises(RecipeError, match="fp8-channel cannot be written in the dialect modelopt"):
        q.plan(nano, "nvfp4-mixed", tmp_path / "out", overrides=["quantize.dialect=modelopt"])


def test_a_gguf_file_has_no_dialect():
    with pytest.raises(RecipeError, match=r"leave quantize\.dialect out"):
        q.read_recipe("gguf-q8_0", ["quantize.dialect=modelopt"])


def test_it_generates_text(weights_alone):
    assert "".join(api.run_text(weights_alone, Prompt("In the beginning", max_tokens=4)))


# As input


@pytest.mark.parametrize("kind", ["W4A16_NVFP4", "NVFP4", "MIXED_PRECISION", "own file alone"])
def test_it_is_converted_back_to_what_its_codes_say(artifact, nano, tmp_path, kind):
    if kind == "NVFP4":
        with_inputs(artifact)
    elif kind == "MIXED_PRECISION":
        mixed(artifact, nano)
    elif kind == "own file alone":
        edit_config(artifact, lambda c: c.pop("quantization_config"))
    stored = load_file(artifact / "model.safetensors")
    done = q.convert(artifact, tmp_path / "back", "bf16-split", FAST)
    assert done.report.passed, done.report.failures
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert not [name for name in back if "scale" in name]
    codes, scale = stored[DOWN + ".weight"], stored[DOWN + ".weight_scale"]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    apart = values[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    step = (scale.float() * stored[DOWN + ".weight_scale_2"]).repeat_interleave(16, 1)
    found = back[DOWN.replace(".language_model", "") + ".weight"]
    assert torch.equal(found, (apart * step).bfloat16())
    said = [note for note in done.plan.notes if "scales of inputs are left out" in note]
    assert bool(said) == (kind in ("NVFP4", "MIXED_PRECISION"))


@pytest.mark.parametrize(("out", "recipe"), [("m.gguf", "gguf-q8_0"), ("out", "fp8-channel")])
def test_it_is_converted_on(artifact, tmp_path, out, recipe):
    assert q.convert(with_inputs(artifact), tmp_path / f"on-{out}", recipe, FAST).report.passed


@pytest.mark.parametrize("kind", ["W4A16_NVFP4", "NVFP4", "MIXED_PRECISION"])
def test_its_codes_go_to_gguf_without_a_second_rounding(artifact, nano, tmp_path, kind):
    if kind == "NVFP4":
        with_inputs(artifact)
    elif kind == "MIXED_PRECISION":
        mixed(artifact, nano)
    done = q.convert(artifact, tmp_path / "m.gguf", "gguf-nvfp4", FAST)
    assert done.report.passed, done.report.failures
    stored, made = load_file(artifact / "model.safetensors"), GgufFile(tmp_path / "m.gguf")
    codes, scales = split(made.read("blk.1.ffn_down.weight"))
    assert torch.equal(pack(codes), stored[DOWN + ".weight"])
    assert torch.equal(scales, stored[DOWN + ".weight_scale"].view(torch.uint8))
    assert made.read("blk.1.ffn_down.scale") == stored[DOWN + ".weight_scale_2"]


def test_inspect_names_it(artifact):
    assert q.inspect(artifact).quantization == "nvfp4a16 (modelopt)"
    inspection = q.inspect(with_inputs(artifact))
    assert (inspection.quantization, inspection.problems) == ("nvfp4 (modelopt)", [])


def test_scales_of_the_cache_are_left_out(artifact, tmp_path):
    names = [f"{LAYER}3.self_attn.{x}" for x in ("k_proj.k_scale", "v_proj.v_scale")]
    damage(artifact, lambda w: w.update({name: torch.tensor(1.0) for name in names}))
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    edit_config(artifact, lambda c: c["quantization_config"].update(kv_cache_scheme=scheme))
    assert failures(artifact) == []
    done = q.convert(artifact, tmp_path / "back", "bf16-split", FAST)
    assert any("2 scales of the attention cache are left out" in note for note in done.plan.notes)


@pytest.mark.parametrize(
    ("end", "value", "what"),
    [
        ("weight_scale_2", -1.0, "one of 1 global scales holds"),
        ("weight_scale_2", float("nan"), "49152 weights are NaN or infinite"),
        ("weight_scale", -2.0, "one of 1 scales holds"),
    ],
)
def test_a_source_whose_scales_are_not_above_zero_is_refused_by_name(
    artifact, tmp_path, end, value, what
):
    damage(artifact, lambda w: w[f"{DOWN}.{end}"].view(-1)[:1].fill_(value))
    with pytest.raises(QuantError, match=rf"{DOWN}.weight .*{what}"):
        q.convert(artifact, tmp_path / "back", "bf16-split", FAST)
    assert any(f"{DOWN}.{end} has 1 " in said for said in failures(artifact))


@pytest.mark.parametrize("end", [".weight_scale", ".weight_scale_2"])
def test_codes_without_a_scale_are_refused_by_name(artifact, tmp_path, end):
    damage(artifact, lambda w: w.pop(DOWN + end))
    with pytest.raises(FormatError, match=rf"{DOWN}.weight"):
        q.convert(artifact, tmp_path / "back", "bf16-split", FAST)


# As an artifact to be judged


@pytest.mark.parametrize("make", [with_inputs, mixed])
def test_right_ones_pass(artifact, nano, make):
    make(artifact, *([nano] if make is mixed else []))
    assert failures(artifact, nano) == []


def test_its_own_file_alone_passes(artifact, nano):
    edit_config(artifact, lambda c: c.pop("quantization_config"))
    assert failures(artifact, nano) == []


def set_own(out: Path, **fields: object) -> None:
    """Say other things in ModelOpt's own file."""
    content = json.loads((out / "hf_quant_config.json").read_text())
    content["quantization"] |= fields
    (out / "hf_quant_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_a_cache_without_scales_is_its_exporters_default(artifact, nano, algorithm):
    """`fp8_cast` caches at a scale of 1, and stores none."""
    bits = 8 if algorithm == "FP8" else 4
    scheme = {"dynamic": False, "num_bits": bits, "type": "float"}
    set_own(artifact, kv_cache_quant_algo=algorithm)
    edit_config(artifact, lambda c: c["quantization_config"].update(kv_cache_scheme=scheme))
    assert failures(artifact, nano) == []


@pytest.mark.parametrize(("algorithm", "shown"), [("FP8", "fp8"), ("NVFP4", None), (None, None)])
@pytest.mark.parametrize("alone", [False, True], ids=["in config.json", "in its own file"])
def test_a_cache_that_only_its_algorithm_states_is_shown(artifact, nano, algorithm, shown, alone):
    if alone:
        set_own(artifact, kv_cache_quant_algo=algorithm)
        edit_config(artifact, lambda c: c.pop("quantization_config"))
    else:
        said = {"kv_cache_quant_algo": algorithm}
        edit_config(artifact, lambda c: c["quantization_config"].update(said))
    assert q.inspect(artifact).kv_cache == shown
    assert failures(artifact, nano) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kv_cache_quant_algo", "INT8", "kv_cache_quant_algo is 'INT8', expected 'FP8' or 'NVFP4'"),
        ("kv_cache_quant_algo", 8, "kv_cache_quant_algo is 8, expected"),
        ("exclude_modules", "lm_head", "exclude_modules is 'lm_head', expected a list of modules"),
        ("exclude_modules", {}, "exclude_modules is {}, expected a list of modules"),
        ("exclude_modules", [], "layers.0.linear_attn.in_proj_b is not quantised, and is not"),
    ],
)
def test_what_its_own_file_says_of_nothing_stored_is_named(artifact, field, value, said):
    set_own(artifact, **{field: value})
    found = failures(artifact)
    assert any(said in text for text in found), found


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, "neither kv_cache_scheme nor kv_cache_quant_algo"),
        ({"kv_cache_quant_algo": "NVFP4"}, "'NVFP4'"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "'NVFP4'"),
    ],
)
def test_a_cache_that_its_own_file_alone_promises_is_named(artifact, stated, said):
    set_own(artifact, kv_cache_quant_algo="FP8")
    edit_config(artifact, lambda c: c["quantization_config"].update(stated))
    found = failures(artifact)
    problem = f"kv_cache_quant_algo is 'FP8', but config.json says {said}"
    assert found == [f"hf_quant_config.json {problem}"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_cache_quant_algo": "INT4"}, "kv_cache_quant_algo is 'INT4', expected"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme: is 'fp8', expected an object"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme: type is 'int'"),
        ({"kv_cache_scheme": {"num_bits": 2, "type": "float"}}, "num_bits is 2"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}, "dynamic is True"),
    ],
)
def test_a_cache_that_no_engine_has_is_named(artifact, fields, said):
    edit_config(artifact, lambda c: c["quantization_config"].update(fields))
    found = failures(artifact)
    assert any(said in text for text in found), found


def test_experts_are_one_layer_of_a_mixed_one(tmp_path):
    source, out = moe(tmp_path / "in"), tmp_path / "out"
    rule = "quantize.rules=[{match: 'layers.*_attn.*', scheme: keep}]"
    q.convert(source, out, modelopt("mtp=drop", rule), FAST)
    stored = modules(load_file(out / "model.safetensors"))
    holders = dict.fromkeys(
        m.split(".experts.")[0] + ".experts" * (".experts." in m) for m in stored
    )
    layers = {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in holders}
    said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    edit_config(out, lambda c: c["quantization_config"].update(said))
    (out / "hf_quant_config.json").unlink()
    assert failures(out, source) == []
    del layers[f"{LAYER}0.mlp.experts"]
    edit_config(out, lambda c: c["quantization_config"].update(said))
    assert any("algorithm of" in text and "experts" in text for text in failures(out))


def test_a_missing_scale_of_inputs_is_named(artifact):
    damage(with_inputs(artifact), lambda w: w.pop(DOWN + ".input_scale"))
    assert f"{DOWN}.input_scale is missing: engines read it for NVFP4" in failures(artifact)


def test_a_missing_scale_of_fp8_inputs_is_named(artifact, nano):
    name = LAYER + "3.self_attn.o_proj.input_scale"
    damage(mixed(artifact, nano), lambda w: w.pop(name))
    assert f"{name} is missing: engines read it for FP8" in failures(artifact)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), 1.4e-45])
def test_a_scale_of_inputs_that_nobody_wrote_is_named(artifact, scale):
    damage(with_inputs(artifact), lambda w: w[DOWN + ".input_scale"].fill_(scale))
    (said,) = dict.fromkeys(failures(artifact))
    assert said == f"{DOWN}.input_scale has 1 scales of inputs that no calibration gives"


@pytest.mark.parametrize("end", [".weight_scale_2", ".input_scale"])
def test_scales_that_a_fused_matrix_does_not_share_are_named(artifact, end):
    damage(with_inputs(artifact), lambda w: w[UP + end].mul_(2))
    assert any(said.startswith(f"{UP}{end} is not that of") for said in failures(artifact))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_algo": "NVFP4"}, "input_scale is missing: engines read it for NVFP4"),
        ({"quant_algo": "FP8"}, "is 'FP8', but nvfp4a16 is stored, expected 'W4A16_NVFP4'"),
        ({"group_size": 32}, "group_size is 32, expected 16"),
        ({"ignore": ["lm_head", "*visual*"]}, "is not quantised, and is not listed"),
        ({"ignore": ["*"]}, "is quantised, but is listed as unquantised under the rule of vLLM"),
        ({"pre_quant_scale": True}, "pre_quant_scale is True, which an engine may obey"),
    ],
)
def test_fields_that_are_not_so_are_named(artifact, change, says):
    edit_config(artifact, lambda c: c["quantization_config"].update(change))
    assert any(says in text for text in failures(artifact)), failures(artifact)


def test_a_head_that_no_list_excludes_is_named(tmp_path):
    source, out = moe(tmp_path / "in"), tmp_path / "out"
    q.convert(source, out, modelopt("mtp=drop"), FAST)
    edit_config(out, lambda c: c["quantization_config"]["ignore"].remove("lm_head"))
    assert any(text.startswith("lm_head is not quantised") for text in failures(out))


def test_an_own_file_that_says_otherwise_is_named(artifact):
    path = artifact / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"]["quant_algo"] = "NVFP4"
    path.write_text(json.dumps(content))
    (artifact / "qwen35-receipt.json").unlink()
    (said,) = failures(artifact)
    assert said.startswith("hf_quant_config.json quant_algo is 'NVFP4', but config.json says")


def test_names_of_the_other_dialect_are_named(artifact):
    block = {"quant_method": "compressed-tensors", "config_groups": {}}
    edit_config(artifact, lambda c: c.update(quantization_config=block))
    assert any("expected model.language_model.layers.0" in text for text in failures(artifact))
    assert open_checkpoint(artifact).layout.problems == []
