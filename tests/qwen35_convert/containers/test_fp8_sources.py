"""FP8 checkpoints of other writers: what they decode to is written by hand, in float64.

    code * scale, rounded once to the type that is written

A scale may be one for all, for each row or for each block, in any axes, type and under either name;
static quantisers add scales of activations, which are left out and said.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from formats.errors import FormatError
from quant.errors import QuantError
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.inspection.source import inspect
from qwen35_convert.planning.lost_scales import check_scales
from qwen35_convert.recipe.recipe import build_recipe
from tests.checkpoints import hub_config, make_weights
from tests.formats.layouts import FP8_ROLES, role_of
from tests.gguf_reader import read_gguf
from tests.qwen35_convert.containers.gguf.test_convert_gguf import made, written
from tests.qwen35_convert.verification.damage import edit_config

NANO = Path(__file__).parents[2] / "data" / "nano-dense"
HUB = "model.language_model."
UP = "layers.1.mlp.up_proj.weight"
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
CODES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
KEEP = build_recipe({"quantize": {"scheme": "keep"}})
Weights = dict[str, torch.Tensor]


def blocks(x: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-n // 128) for n in x.shape)
    grid = [
        [x[128 * r :][:128, 128 * c :][:, :128].amax() for c in range(columns)] for r in range(rows)
    ]
    return torch.tensor(grid)


# how: (amax of what shares a scale, shape of the scale on the disk)
SCALES = {
    "tensor": (lambda x: x.amax(), lambda s: s.reshape(())),
    "tensor, one axis": (lambda x: x.amax(), lambda s: s.reshape(1)),
    "tensor, two axes": (lambda x: x.amax(), lambda s: s.reshape(1, 1)),
    "channel": (lambda x: x.amax(1, keepdim=True), lambda s: s),
    "channel, one axis": (lambda x: x.amax(1, keepdim=True), lambda s: s.reshape(-1)),
    "block": (blocks, lambda s: s),
    "block, four axes": (blocks, lambda s: s[:, None, :, None]),
}


def of_every_weight(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the scale of every weight, float64."""
    if (scale.dim() == 2 and scale.shape[1] > 1) or scale.shape[:1] == (-(-shape[0] // 128),):
        scale = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)
        return scale[:, : shape[1]].double()
    return scale.double().expand(shape)


def quantised(w: Weights, how: str, dtype: str, suffix: str, codes: str) -> tuple[Weights, Weights]:
    """Return the weights in FP8, and what each decodes to in float64."""
    amax, spell = SCALES[how]
    code_type, largest = CODES[codes]
    stored, exact = dict(w), {}
    for name, value in w.items():
        if role_of(name) not in FP8_ROLES or value.dim() != 2:
            continue
        x = value.float()
        scale = (amax(x.abs()) / largest).to(TYPES[dtype]).clamp(min=2.0**-24)
        full = of_every_weight(scale, x.shape)
        stored[name] = (x.double() / full).clamp(-largest, largest).float().to(code_type)
        stored[f"{name}_{suffix}"] = spell(scale).contiguous()
        exact[name] = stored[name].double() * full
    return stored, exact


def source_of(folder: Path, how="tensor", dtype="F32", suffix="scale", codes="e4m3"):
    config = hub_config(linear_value_head_dim=64, vocab_size=2048)
    stored, exact = quantised(make_weights(config), how, dtype, suffix, codes)
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if how.startswith("block"):
        config["quantization_config"]["weight_block_size"] = [128, 128]
    return written(folder, config, stored, NANO), exact


def save(source: Path, weights: Weights) -> None:
    """Replace the weights of a checkpoint."""
    copies = {name: value.contiguous().clone() for name, value in weights.items()}
    save_file(copies, source / "model.safetensors", metadata={"format": "pt"})


def gguf(kind: str):
    quantize = {"scheme": kind, "mix": "llama.cpp"}
    return build_recipe({"quantize": quantize, "export": {"format": "gguf"}, "mtp": "drop"})


EVERY = [
    *itertools.product(SCALES, ["F32"], ["scale"], ["e4m3"]),
    *itertools.product(["tensor", "channel"], ["BF16", "F16"], ["scale", "scale_inv"], ["e4m3"]),
    ("tensor", "BF16", "scale", "e5m2"),
    ("block", "F32", "scale_inv", "e5m2"),
]


@pytest.mark.parametrize(("how", "dtype", "suffix", "codes"), EVERY)
def test_a_folder_holds_code_times_scale_rounded_once(tmp_path, how, dtype, suffix, codes):
    source, exact = source_of(tmp_path / "in", how, dtype, suffix, codes)
    done = api.convert(source, tmp_path / "out", KEEP)
    assert done.report.passed, done.report.failures
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in exact.items():
        expected = value.float().to(torch.bfloat16)
        assert torch.equal(found[name.replace(HUB, "model.")], expected), name


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("how", ["tensor", "channel", "block"])
def test_a_gguf_file_holds_code_times_scale_rounded_once(tmp_path, how, kind):
    """No BF16 lies between, as none does in llama.cpp's converter."""
    source, exact = source_of(tmp_path / "in", how)
    done = api.convert(source, tmp_path / "m.gguf", gguf(kind))
    assert done.report.passed, done.report.failures
    tensors = {t.name: t for t in read_gguf(tmp_path / "m.gguf").tensors}
    expected = exact[HUB + UP].float()
    stored = torch.from_numpy(np.array(tensors["blk.1.ffn_up.weight"].data))
    types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    assert torch.equal(stored.view(types[kind]).view(expected.shape), expected.to(types[kind]))
    assert not torch.equal(expected, expected.to(torch.bfloat16).float()), "else it shows nothing"
    (note,) = [note for note in done.plan.notes if "the source is" in note]
    assert note.endswith(f"its weights are dequantised to {kind.upper()}")


def test_blocks_are_encoded_from_the_exact_product_and_proven_without_a_receipt(tmp_path):
    source, exact = source_of(tmp_path / "in")
    done = api.convert(source, tmp_path / "m.gguf", gguf("q8_0"))
    assert any("two roundings" in note for note in done.plan.notes)
    tensors = {t.name: t for t in read_gguf(tmp_path / "m.gguf").tensors}
    wanted = exact[HUB + UP].float().numpy()
    theirs = quants.quantize(wanted, GGMLQuantizationType.Q8_0)
    assert np.array_equal(np.array(tensors["blk.1.ffn_up.weight"].data), theirs)
    next(tmp_path.glob("*receipt*")).unlink()
    report = api.verify(tmp_path / "m.gguf", source)
    assert report.passed, report.failures


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k_m"])
def test_a_file_made_through_bf16_is_right_too(tmp_path, kind):
    """Most tools dequantise to the model's type first."""
    source, _ = source_of(tmp_path / "in")
    api.convert(source, tmp_path / "bf16", KEEP, options=api.RunOptions(verify=False))
    api.convert(tmp_path / "bf16", tmp_path / "m.gguf", gguf(kind))
    next(tmp_path.glob("*receipt*")).unlink()
    report = api.verify(tmp_path / "m.gguf", source)
    assert report.passed, report.failures


# Static quantisers

GROUP = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
STATIC = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "autofp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": GROUP, "input_activations": GROUP}
        },
        "kv_cache_scheme": GROUP,
    },
}
LIST = {"modelopt": "ignore", "autofp8": "ignored_layers", "compressed-tensors": "ignore"}
CACHE = [f"{HUB}layers.3.self_attn.{name}_scale" for name in ("k_proj.k", "v_proj.v")]


def static(folder: Path, writer: str) -> tuple[Path, Weights]:
    """Write a checkpoint as a static quantiser does; return it, and what its weights decode to."""
    config = hub_config(linear_value_head_dim=64, vocab_size=2048)
    stored, exact = quantised(make_weights(config), "tensor", "F32", "scale", "e4m3")
    inputs = {n.removesuffix("weight") + "input_scale": torch.tensor(0.0123) for n in exact}
    cache = {name: torch.tensor(1.0) for name in CACHE}
    kept = [n.removesuffix(".weight") for n, w in stored.items() if w.dim() >= 2]
    kept = [n for n in kept if n + ".weight" not in exact]
    config["quantization_config"] = STATIC[writer] | {LIST[writer]: kept}
    return written(folder, config, stored | inputs | cache, NANO), exact


@pytest.mark.parametrize("writer", STATIC)
def test_static_quantisers_are_read_and_their_other_scales_left_out(tmp_path, writer):
    source, exact = static(tmp_path / "in", writer)
    done = api.convert(source, tmp_path / "out", KEEP)
    assert done.report.passed, done.report.failures
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in found if "scale" in name]
    for name, value in exact.items():
        expected = value.float().to(torch.bfloat16)
        assert torch.equal(found[name.replace(HUB, "model.")], expected), name
    said = [note.split(" (")[0] for note in done.plan.notes if "left out" in note]
    assert said == [
        f"{len(exact)} scales of inputs are left out",
        "2 scales of the attention cache are left out",
    ]
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("writer", STATIC)
def test_as_an_artifact_a_static_one_is_right_with_all_its_scales(tmp_path, writer):
    source, _ = static(tmp_path / "fp8", writer)
    original = hub_config(linear_value_head_dim=64, vocab_size=2048)
    original = written(tmp_path / "in", original, make_weights(original), NANO)
    report = api.verify(source, original)
    assert report.passed, report.failures


def test_modelopts_list_may_be_globs(tmp_path):
    source, _ = static(tmp_path / "fp8", "modelopt")
    globs = ["*linear_attn.conv1d*", "*in_proj_a", "*in_proj_b", "lm_head", "*router*", "*visual*"]
    edit_config(source, lambda c: c["quantization_config"].update(ignore=[*globs, "mtp.fc"]))
    assert api.verify(source).passed
    edit_config(source, lambda c: c["quantization_config"].update(ignore=globs[1:]))
    assert [failure.tensor for failure in api.verify(source).failures] == ["mtp.fc"]


@pytest.mark.parametrize(
    ("writer", "lost", "says"),
    [
        ("autofp8", "input_scale", "activation_scheme is 'static', but no scales of inputs"),
        ("compressed-tensors", "input_scale", "dynamic of input_activations is False, expected"),
        ("modelopt", "v_scale", "scales the attention cache, without the other one"),
    ],
)
def test_an_artifact_without_the_scales_it_promises_fails(tmp_path, writer, lost, says):
    source, _ = static(tmp_path / "fp8", writer)
    weights = load_file(source / "model.safetensors")
    name = next(name for name in weights if name.endswith(lost))
    save(source, {n: w for n, w in weights.items() if n != name})
    failures = [failure.problem for failure in api.verify(source).failures]
    assert any(says in problem for problem in failures), failures


@pytest.mark.parametrize("writer", STATIC)
@pytest.mark.parametrize("value", [0.0, -0.0123, float("nan"), float("inf")])
def test_scales_of_inputs_that_are_no_scales_are_named(tmp_path, writer, value):
    source, _ = static(tmp_path / "fp8", writer)
    weights = load_file(source / "model.safetensors")
    name = next(name for name in weights if name.endswith("input_scale"))
    save(source, weights | {name: torch.tensor(value)})
    failures = [(failure.tensor, failure.problem) for failure in api.verify(source).failures]
    assert (name, "has 1 scales that are not finite and positive") in failures


@pytest.mark.parametrize("name", [HUB + UP.replace("weight", "input_scale"), CACHE[0]])
def test_scales_that_no_config_promises_are_named(tmp_path, name):
    source, _ = source_of(tmp_path / "in")
    weights = load_file(source / "model.safetensors") | {name: torch.tensor(1.0)}
    save(source, weights)
    assert any(failure.tensor == name for failure in api.verify(source).failures)


@pytest.mark.parametrize("algo", ["NVFP4_AWQ", "W4A16_AWQ", "MXFP8"])
def test_other_algorithms_of_modelopt_are_refused_by_name(tmp_path, algo):
    source, _ = static(tmp_path / "in", "modelopt")
    edit_config(source, lambda c: c["quantization_config"].update(quant_algo=algo))
    with pytest.raises(FormatError, match=f"quantised by modelopt {algo}, expected BF16"):
        inspect(source)


# A scale that was lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", ["tensor", "channel", "block"])
def test_codes_without_their_scale_are_refused_by_name(tmp_path, how, dtype):
    source, _ = source_of(tmp_path / "in", how)
    weights = load_file(source / "model.safetensors")
    weights[HUB + UP] = weights[HUB + UP].to(dtype)
    del weights[f"{HUB}{UP}_scale"]
    save(source, weights)
    for out in ("out", "m.gguf"):
        with pytest.raises(FormatError, match=rf"{HUB}{UP} holds FP8 codes in .*, without a") as no:
            api.convert(source, tmp_path / out)
        assert no.value.exit_code == 3
        assert not (tmp_path / out).exists()


def test_codes_are_told_where_no_scale_at_all_is_left(tmp_path):
    source, exact = source_of(tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    for name in exact:
        weights[name] = weights[name].to(torch.bfloat16)
        del weights[f"{name}_scale"]
    save(source, weights)
    with pytest.raises(FormatError, match=rf"weight and {len(exact) - 1} more hold FP8 codes"):
        check_scales(open_checkpoint(source))


def test_codes_may_be_e5m2(tmp_path):
    source, _ = source_of(tmp_path / "in", codes="e5m2")
    weights = load_file(source / "model.safetensors")
    weights[HUB + UP] = weights[HUB + UP].to(torch.bfloat16)
    del weights[f"{HUB}{UP}_scale"]
    save(source, weights)
    with pytest.raises(FormatError, match=f"{HUB}{UP} holds FP8 codes"):
        check_scales(open_checkpoint(source))


def test_every_lost_scale_is_counted(tmp_path):
    source, exact = source_of(tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    for name in list(exact)[:3]:
        weights[name] = weights[name].to(torch.bfloat16)
        del weights[f"{name}_scale"]
    save(source, weights)
    with pytest.raises(FormatError, match=r"weight and 2 more hold FP8 codes in BF16"):
        check_scales(open_checkpoint(source))


@pytest.mark.parametrize("role", ["up_proj", "o_proj", "mtp"])
def test_a_linear_that_was_never_quantised_is_no_reason_to_refuse(tmp_path, role):
    """Also where the list of unquantised modules forgets it: MTP heads often are."""
    source, exact = source_of(tmp_path / "in")
    original = load_file(made(tmp_path / "bf16", NANO) / "model.safetensors")
    weights = load_file(source / "model.safetensors")
    for name in exact:
        if role in name.split("."):
            weights[name] = original[name]
            del weights[f"{name}_scale"]
    save(source, weights)
    check_scales(open_checkpoint(source))


def test_zeros_and_small_numbers_of_few_bits_are_weights(tmp_path):
    source, _ = source_of(tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    for layer, value in enumerate((0.0, 2.0**-6, 0.5)):
        name = f"{HUB}layers.{layer}.mlp.up_proj.weight"
        weights[name] = torch.full_like(weights[name], value, dtype=torch.bfloat16)
        del weights[f"{name}_scale"]
    save(source, weights)
    check_scales(open_checkpoint(source))


@pytest.mark.parametrize("how", ["tensor", "channel", "block"])
@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_above_zero_is_refused_by_name(tmp_path, how, scale):
    source, _ = source_of(tmp_path / "in", how)
    weights = load_file(source / "model.safetensors")
    weights[f"{HUB}{UP}_scale"].view(-1)[-1] = scale
    save(source, weights)
    with pytest.raises(QuantError, match=rf"{HUB}{UP} .*the scale of row .* is -?[01], expected"):
        api.convert(source, tmp_path / "out", KEEP)
    assert not (tmp_path / "out").exists()


def test_a_block_of_zeros_may_have_a_scale_of_zero(tmp_path):
    """ModelOpt's quotient of its largest weight and 448."""
    source, _ = source_of(tmp_path / "in", "channel")
    weights = load_file(source / "model.safetensors")
    weights[HUB + UP].view(torch.uint8)[3] = 0
    weights[f"{HUB}{UP}_scale"][3] = 0
    save(source, weights)
    done = api.convert(source, tmp_path / "out", KEEP)
    assert done.report.passed, done.report.failures
