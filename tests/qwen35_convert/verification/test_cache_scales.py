"""Artifacts with an FP8 cache: written, proven, and every wrong scale named."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.containers.safetensors.activation_scales import stray_scales
from qwen35_convert.errors import RecipeError
from qwen35_convert.inspection.source import inspect
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.planted.models import write_model

RECEIPT, FILE = "qwen35-receipt.json", "model.safetensors"
TEXT = " ".join(f"w{i % 97} the quick {i} brown fox" for i in range(100))
# by model: what stands before the scales
ATTENTION = {"wide": "model.language_model.layers.2.self_attn.",
             "moe": "model.language_model.layers.1.self_attn."}  # fmt: skip


def convert(folder: Path, model: str, *more: str) -> Path:
    """Return an artifact with an FP8 cache, beside its source and its text."""
    write_model(model, folder).rename(folder / "in")
    text = folder / "text.txt"
    text.write_text(TEXT)
    changes = ["quantize.kv_cache=fp8", f"quantize.calibrate.text={text}", *more]
    done = api.convert(folder / "in", folder / "out", "fp8-block-hub", overrides=changes)
    assert done.report.passed, done.report.failures
    return folder / "out"


@pytest.fixture(scope="module", params=["wide", "moe"])
def made(request, tmp_path_factory):
    return convert(tmp_path_factory.mktemp(request.param), request.param), request.param


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return convert(tmp_path_factory.mktemp("copied"), "wide")


@pytest.fixture
def copied(wide, tmp_path):
    """A copy of the artifact, to be spoilt, its source, and what stands before its scales."""
    return shutil.copytree(wide, tmp_path / "out"), wide.parent / "in", ATTENTION["wide"]


def edit(artifact: Path, change) -> None:
    """Change the tensors in the one file of an artifact, which then has no index."""
    (artifact / "model.safetensors.index.json").unlink()
    tensors = load_file(artifact / FILE)
    change(tensors)
    save_file(tensors, artifact / FILE, {"format": "pt"})


def put(artifact: Path, prefix: str, change) -> set[str]:
    """Change the two scales where they lie; return which have become others."""
    path = artifact / FILE
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    names = [prefix + last for last in ("k_scale", "v_scale")]
    old = [load_file(path)[name].clone() for name in names]
    new = change(*old)
    for name, value in zip(names, new, strict=True):
        first, last = (8 + size + place for place in header[name]["data_offsets"])
        content[first:last] = bytes(value.view(torch.uint8).tolist())
    path.write_bytes(content)
    pairs = zip(("k_scale", "v_scale"), old, new, strict=True)
    return {last for last, one, other in pairs if not torch.equal(one, other)}


def without_hashes(artifact: Path) -> None:
    """Let the receipt say nothing of the bytes."""
    path = artifact / RECEIPT
    receipt = json.loads(path.read_text())
    for entry in receipt["output"]["files"].values():
        entry["sha256"] = None
    path.write_text(json.dumps(receipt))


def test_what_is_written_is_what_engines_read(made):
    artifact, model = made
    stored = load_file(artifact / FILE)
    scales = {n: t for n, t in stored.items() if n.endswith(("k_scale", "v_scale"))}
    assert scales.keys() == {ATTENTION[model] + "k_scale", ATTENTION[model] + "v_scale"}
    assert all(t.dtype == torch.bfloat16 and t.shape == (1,) for t in scales.values())
    block = json.loads((artifact / "config.json").read_text())["quantization_config"]
    assert block["quant_method"] == "compressed-tensors"
    assert block["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False,
    }  # fmt: skip
    told = json.loads((artifact / RECEIPT).read_text())["calibration"]
    assert told["text"] == "text.txt"
    assert told["tokens"] > 512
    inspection = inspect(artifact)
    assert inspection.kv_cache == "fp8"
    assert "--kv-cache-dtype fp8" in inspection.serving["vllm"]


def test_the_same_text_gives_the_same_bytes(made, tmp_path):
    artifact, model = made
    again = convert(tmp_path, model)
    ours, theirs = ((f / FILE).read_bytes() for f in (artifact, again))
    assert ours == theirs


def test_with_its_text_it_is_computed_again_and_without_it_held_to_be_plausible(copied):
    artifact, source, _ = copied
    assert proof(artifact, source) == {"scales": 2, "proof": "again", "why": None}
    assert proof(artifact, source, by_bounds=True)["why"] == "as was asked for"
    receipt = (artifact / RECEIPT).read_text()
    (artifact / RECEIPT).write_text(receipt.replace("text.txt", "gone.txt"))
    assert "gone.txt cannot be read" in proof(artifact, source)["why"]
    (artifact / RECEIPT).write_text(receipt.replace('"text_sha256": "', '"text_sha256": "0'))
    assert "is not the text that calibrated" in proof(artifact, source)["why"]
    assert proof(artifact, None)["proof"] == "bounds"
    (artifact / RECEIPT).unlink()
    assert proof(artifact, source)["proof"] == "bounds"


def proof(artifact: Path, source: Path | None, **more) -> dict:
    """Return how the scales of an artifact that passes were proven."""
    report = api.verify(artifact, source, **more)
    assert report.failures == []
    return report.cache


def test_an_interrupted_walk_is_taken_again(wide, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    changes = ["quantize.kv_cache=fp8", f"quantize.calibrate.text={wide.parent / 'text.txt'}"]
    call = partial(api.convert, wide.parent / "in", tmp_path / "out", "fp8-block-hub")
    with monkeypatch.context() as patch:
        patch.setattr("runtime.layerwise.observe_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(overrides=changes)
    assert not (tmp_path / "out").exists()
    assert call(overrides=changes).report.passed
    assert (tmp_path / "out" / FILE).read_bytes() == (wide / FILE).read_bytes()


def named(report) -> list[str]:
    return [failure.tensor.rpartition(".")[2] for failure in report.failures]


SPOILT = {
    "zero": (lambda k, v: (k * 0, v), "k_scale is 0, expected a number above 0"),
    "negative": (lambda k, v: (-k, v), "k_scale is -.*, expected a number above 0"),
    "nan": (lambda k, v: (k, v * torch.nan), "v_scale is nan, expected a number above 0"),
    "infinite": (lambda k, v: (k, v / 0), "v_scale is inf, expected a number above 0"),
    "tiny": (lambda k, v: (k * 1e-6, v), "k_scale is .*, at which keys saturate from .*"),
    "tiny-value": (lambda k, v: (k, v * 1e-9), "v_scale is .*, at which values saturate from"),
    "huge": (lambda k, v: (k, v * 1e9), "v_scale is .*, but values reach .* at most"),
    "huge-key": (lambda k, v: (k * 1e9, v), "k_scale is .*, but keys reach .* at most"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_scale_that_cannot_be_right_is_named_without_source_and_text(copied, how):
    artifact, _, prefix = copied
    change, says = SPOILT[how]
    put(artifact, prefix, change)
    (artifact / RECEIPT).unlink()
    (failure,) = api.verify(artifact).failures
    assert re.search(says, f"{failure.tensor} {failure.problem}"), failure


WRONG = {
    **{how: change for how, (change, _) in SPOILT.items()},
    "swapped": lambda k, v: (v, k),
    "doubled": lambda k, v: (k * 2, v),
    "ones": lambda k, v: (torch.ones_like(k), torch.ones_like(v)),
    "near": lambda k, v: (k, v * 1.02),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_scale_that_the_text_does_not_give_is_named(copied, how):
    artifact, source, prefix = copied
    changed = put(artifact, prefix, WRONG[how])
    without_hashes(artifact)
    report = api.verify(artifact, source)
    assert {*named(report)} == changed, report.failures
    if how == "swapped":
        assert all(", which is that of " in failure.problem for failure in report.failures)


@pytest.mark.parametrize("lost", ["k_scale", "v_scale"])
def test_a_scale_that_is_missing_is_named(copied, lost):
    artifact, source, prefix = copied
    edit(artifact, lambda t: t.pop(prefix + lost))
    assert any(lost in f"{f.tensor} {f.problem}" for f in api.verify(artifact, source).failures)
    (artifact / RECEIPT).unlink()
    (failure,) = api.verify(artifact).failures
    assert failure.problem == "scales the attention cache, without the other one"


def test_scales_of_another_layer_or_shape_are_named(copied):
    artifact, _, prefix = copied
    (artifact / RECEIPT).unlink()
    other = prefix.replace("layers.2", "layers.0").replace("layers.1", "layers.0")

    def change(tensors):
        tensors |= {other + last: torch.ones(1) for last in ("k_scale", "v_scale")}
        tensors[prefix + "k_scale"] = torch.full((2,), 0.1)

    edit(artifact, change)
    problems = {f.tensor: f.problem for f in api.verify(artifact).failures}
    assert problems == {
        other + "k_scale": "scales the attention cache of layers.0.self_attn, which has none",
        prefix + "k_scale": "is F32 of shape [2], expected one number, in BF16, F16 or F32",
    }


def test_a_layer_without_scales_among_others_that_have_them_is_named(tmp_path):
    kinds = ["full_attention", "linear_attention", "full_attention"]
    config = hub_config(num_hidden_layers=3, layer_types=kinds)
    scheme = {"num_bits": 8, "type": "float"}
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    config["quantization_config"] |= {"config_groups": {}, "kv_cache_scheme": scheme}
    prefix = "model.language_model.layers."
    scales = {f"{prefix}2.self_attn.{last}": torch.ones(1) for last in ("k_scale", "v_scale")}
    folder = write_checkpoint(tmp_path, config, make_weights(config) | scales)
    (failure,) = stray_scales(open_checkpoint(folder), ())
    assert failure.tensor == prefix + "0.self_attn.k_scale"
    assert failure.problem.startswith("is missing: engines run this layer's FP8 cache at a scale")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_bits", 4), ("type", "int"), ("dynamic", True), ("symmetric", False), ("zz", 1)],
)
def test_a_scheme_that_engines_do_not_take_is_named(copied, field, value):
    artifact, _, _ = copied
    path = artifact / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"][field] = value
    path.write_text(json.dumps(config))
    (artifact / RECEIPT).unlink()
    (failure,) = api.verify(artifact).failures
    assert f"kv_cache_scheme: {field} is {value!r}" in failure.problem


@pytest.mark.parametrize(
    ("recipe", "change", "says"),
    [
        ("bf16-split", "mtp=keep", "quantize.kv_cache is fp8, but no weight is quantised"),
        ("fp8-block-hub", "only=layers.0.*", "a slice of a model has no cache"),
        ("int4", "quantize.dialect=gptq", "config.json is that of gptq"),
        ("nvfp4a16", "quantize.dialect=modelopt", "config.json is that of modelopt"),
        ("fp8-block-hub", "quantize.calibrate.text=nowhere.txt", "nowhere.txt cannot be read"),
    ],
)
def test_what_cannot_have_such_a_cache_is_refused_before_any_work(wide, recipe, change, says):
    source, changes = wide.parent / "in", ["quantize.kv_cache=fp8", change]
    with pytest.raises(RecipeError, match=says):
        api.plan(source, recipe, "out", overrides=changes)


def test_the_plan_says_it(wide):
    source = wide.parent / "in"
    changes = ["quantize.kv_cache=fp8", "quantize.calibrate.tokens=700"]
    plan = api.plan(source, "fp8-block-hub", "out", overrides=changes)
    notes = "\n".join(plan.notes)
    assert "2 scales of the keys and values of 1 layers, from at most 700 tokens" in notes
    assert "the MTP head's cache has no scales" in notes
    assert sum(name.endswith(".self_attn.k_scale") for name in plan.tensors) == 1


def test_a_foreign_artifact_with_such_a_cache_is_dequantised_and_its_scales_dropped(wide, tmp_path):
    done = api.convert(wide, tmp_path / "bf16", "bf16-split")
    assert done.report.passed, done.report.failures
    assert any("scales of the attention cache are left out" in note for note in done.plan.notes)
    stored = load_file(tmp_path / "bf16" / FILE)
    assert not [name for name in stored if name.endswith("_scale")]
