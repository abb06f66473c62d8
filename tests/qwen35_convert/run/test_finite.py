"""NaN and infinity are refused while converting, and found in an artifact without its source."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.gguf.file import GgufFile
from quant.errors import QuantError
from qwen35_convert import api
from qwen35_convert.recipe.recipe import build_recipe
from tests.checkpoints import Weights, hub_config, make_weights, moe, write_checkpoint

PREFIX = "model.language_model.layers."
KEPT = {
    "norm": (PREFIX + "2.input_layernorm.weight", (9,), "row 9"),
    "A_log": (PREFIX + "0.linear_attn.A_log", (1,), "row 1"),
    "conv1d": (PREFIX + "1.linear_attn.conv1d.weight", (300, 0, 3), "row 300, column 0, index 3"),
    "embedding": ("model.language_model.embed_tokens.weight", (255, 127), "row 255, column 127"),
    "vision": ("model.visual.blocks.0.mlp.linear_fc1.weight", (3, 4), "row 3, column 4"),
    "mtp": ("mtp.fc.weight", (7, 11), "row 7, column 11"),
}
QUANTISED = (PREFIX + "3.mlp.down_proj.weight", (100, 380), "row 100, column 380")


CONFIG = hub_config(vocab_size=2048, linear_value_head_dim=64)  # which GGUF takes too
SIDES = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")


@pytest.fixture
def write(tmp_path, nano):
    """Write a checkpoint with a tokenizer that every container takes."""

    def write(weights: Weights) -> Path:
        source = write_checkpoint(tmp_path / "in", CONFIG, weights, shards=2)
        for side in SIDES:
            shutil.copy(nano / side, source)
        return source

    return write


@pytest.fixture
def with_bad(write):
    """Write a checkpoint with a bad value at a place of a tensor and at its end."""

    def with_bad(name: str, place: tuple[int, ...], value: float) -> tuple[Path, int]:
        weights = make_weights(CONFIG)
        weights[name][place] = value
        weights[name].view(-1)[-1] = value
        return write(weights), weights[name].numel()

    return with_bad


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("recipe", ["fp8-block-hub", "bf16-split", "gguf-q8_0"])
def test_what_is_kept_is_refused_by_name_place_and_count(tmp_path, with_bad, what, value, recipe):
    name, place, says = KEPT[what]
    source, size = with_bad(name, place, value)
    out = tmp_path / ("m.gguf" if "gguf" in recipe else "out")
    if what == "vision" and recipe == "bf16-split":
        assert not api.convert(source, out, recipe).failed, "vision is dropped"
        return
    changes = ["vision=keep"] if recipe == "gguf-q8_0" else []
    with pytest.raises(QuantError) as refused:
        api.convert(source, out, recipe, overrides=changes)
    said = str(refused.value)
    assert said.startswith(f"{name} (")
    assert " in model-0000" in said
    assert f": 2 of {size} weights are NaN or infinite, the first at {says},\n" in said
    assert refused.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("scheme", ["fp8-block", "q8_0", "f16"])
def test_what_is_quantised_is_refused_with_its_place_in_the_tensor(tmp_path, with_bad, scheme):
    """Not that in the chunk which was being encoded."""
    name, place, says = QUANTISED
    source, size = with_bad(name, place, math.nan)
    recipe, out = ("fp8-block", "out") if scheme == "fp8-block" else ("gguf-q8_0", "m.gguf")
    changes = [f"quantize.scheme={scheme}"]
    with pytest.raises(QuantError, match=f": 2 of {size} weights .* the first at {says},"):
        api.convert(source, tmp_path / out, recipe, overrides=changes)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_expert_is_named_with_its_place_in_itself(tmp_path):
    source = moe(tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    weights[PREFIX + "1.mlp.experts.gate_up_proj"][2, 130, 5] = math.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantError, match=r"experts\.2\.up_proj.*1 of 16384.*row 2, column 5"):
        api.convert(source, tmp_path / "out", "bf16-split")


@pytest.mark.parametrize("recipe", ["bf16-split", "fp8-block", "gguf-bf16"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_verify_without_a_source_judges_kept_tensors_too(tmp_path, write, recipe, value):
    source = write(make_weights(CONFIG))
    out = tmp_path / ("m.gguf" if "gguf" in recipe else "out")
    api.convert(source, out, recipe, api.RunOptions(verify=False))
    assert api.verify(out).passed
    file = out if out.is_file() else out / "model.safetensors"
    opened = api.open_checkpoint(out)
    name = opened.layout.atoms["layers.2.input_layernorm"].stored
    begin, _ = opened.files[opened.where[name]].ranges[name]
    dtype = torch.float32 if opened.infos()[name].dtype == "F32" else torch.bfloat16
    bits = torch.full((2,), value, dtype=dtype).view(torch.uint8).numpy().tobytes()
    content = bytearray(file.read_bytes())
    content[begin : begin + len(bits)] = bits
    file.write_bytes(content)
    for receipt in tmp_path.rglob("*receipt.json"):
        receipt.unlink()
    (failure,) = api.verify(out).failures
    assert failure.tensor == name
    assert "has 2 values that are" in failure.problem


NAN = {"F32": b"\0\0\xc0\x7f", "F16": b"\0\x7e", "BF16": b"\xc0\x7f", "Q8_0": b"\0\x7e"}


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("f32", "blk.0.attn_norm.weight"),
        ("f32", "blk.0.ssm_a"),
        ("f16", "blk.3.attn_q.weight"),
        ("bf16", "token_embd.weight"),
        ("q8_0", "blk.1.ffn_up.weight"),
        ("q8_0", "blk.4.nextn.eh_proj.weight"),
    ],
)
@pytest.mark.parametrize("out", ["bf16-split", "gguf-q8_0"])
def test_a_gguf_source_is_refused_by_the_name_in_its_file(tmp_path, write, scheme, name, out):
    write(make_weights(CONFIG))
    file, target = tmp_path / "in.gguf", tmp_path / ("m.gguf" if out.startswith("gguf") else "out")
    recipe = build_recipe({"quantize": {"scheme": scheme}, "export": {"format": "gguf"}})
    api.convert(tmp_path / "in", file, recipe, options=api.RunOptions(verify=False))
    opened = GgufFile(file)
    start, bad = opened.ranges[name][0], NAN[opened.infos[name].dtype]
    data = bytearray(file.read_bytes())
    data[start : start + len(bad)] = bad
    file.write_bytes(data)
    with pytest.raises(
        QuantError, match=rf"{name} .*weights are NaN or infinite, the first at row"
    ):
        api.convert(file, target, out)
    assert not target.exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("out", ["bf16-split", "gguf-bf16"])
def test_what_is_kept_is_judged_in_every_type(tmp_path, write, dtype, out):
    weights = make_weights(CONFIG)
    name = PREFIX + "0.linear_attn.norm.weight"
    weights[name] = weights[name].to(dtype)
    weights[name][3] = math.inf
    target = tmp_path / ("m.gguf" if out.startswith("gguf") else "out")
    with pytest.raises(QuantError, match=rf"{name} .*1 of 64 weights are NaN or infinite.*row 3"):
        api.convert(write(weights), target, out)
