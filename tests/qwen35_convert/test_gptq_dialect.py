"""INT4 in GPTQ's dialect: what is stored, what the config says of the rest, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import qwen35_convert as q
from quant.choices import Choices
from quant.errors import QuantError
from quant.fourbit.parts import PACKED, SCALE, ZERO
from quant.fourbit.qweight import GPTQ_WRITTEN
from quant.opening import open_value
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.containers.safetensors.gptq_rules import with_rules
from qwen35_convert.errors import RecipeError
from qwen35_convert.run import memory
from tests import packed
from tests.checkpoints import hub_config, make_weights
from tests.qwen35_convert.containers.gguf.test_convert_gguf import written
from tests.qwen35_convert.containers.test_packed_sources import NANO

FAST = q.RunOptions(workers=1)
GPTQ = "quantize.dialect=gptq"
LAYER = "model.language_model.layers.1."
Q_PROJ = "model.language_model.layers.3.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory, nano_path):
    """Return the artifacts of one recipe in both dialects."""
    folder = tmp_path_factory.mktemp("gptq")
    recipes = {"gptq": [GPTQ], "compressed": []}
    for name, changes in recipes.items():
        done = q.convert(nano_path, folder / name, q.read_recipe("int4", changes), FAST)
        assert done.report.passed, done.report.failures
    return folder


def test_the_bytes_do_not_depend_on_the_chunks(made, nano_path, tmp_path, monkeypatch):
    """Rows are written with those before them, as long as there is memory to hold them."""
    for chunk_bytes in (1, 50_000):
        share = memory.Share(1, chunk_bytes, 1)
        monkeypatch.setattr(memory.Need, "part", lambda *_, share=share: share)
        out, settings = tmp_path / str(chunk_bytes), q.RunOptions(workers=1, verify=False)
        q.convert(nano_path, out, q.read_recipe("int4", [GPTQ]), settings)
        names = [path.name for path in out.glob("*.safetensors")]
        assert names
        for name in names:
            assert (out / name).read_bytes() == (made / "gptq" / name).read_bytes()


def test_codes_are_those_of_the_other_dialect(made):
    ours, other = (open_checkpoint(made / name) for name in ("gptq", "compressed"))
    names = [name for name, atom in other.layout.atoms.items() if atom.quantized]
    assert len(names) == 25
    for name in names:
        assert ours.layout.atoms[name].scheme == "gptq-int4"
        got, expected = (open_value(c, c.layout.atoms[name]).all() for c in (ours, other))
        assert torch.equal(got, expected), name


def test_tensors_are_packed_as_gptqmodel_packs_them(made):
    """`packed.gptq` is held to the bytes of gptqmodel 7.7.0 and auto-round 0.16.1."""
    tensors, source = (
        load_file(made / "gptq" / "model.safetensors"),
        load_file(made / "compressed" / "model.safetensors"),
    )
    for last in ("mlp.down_proj.", "linear_attn.in_proj_qkv."):
        weight = f"{LAYER}{last}weight"
        words, steps = source[weight + "_packed"], source[weight + "_scale"]
        codes = ((words[:, :, None] >> torch.arange(0, 32, 4)) & 15).flatten(1)
        zeros, groups = torch.full(steps.shape, 8), torch.arange(codes.shape[1]) // 128
        x = packed.Codes(codes.long(), zeros, steps.float(), groups, 4)
        expected = packed.gptq(LAYER + last, x, g_idx=False)
        found = {n: t for n, t in tensors.items() if n.startswith(LAYER + last)}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype
                   for n, t in expected.items())  # fmt: skip
        assert (found[f"{LAYER}{last}qzeros"] == 0x77777777).all()


def test_it_is_proven_without_its_receipt(made, nano_path, tmp_path):
    out = shutil.copytree(made / "gptq", tmp_path / "out")
    assert q.verify(out, nano_path).passed
    (out / "qwen35-receipt.json").unlink()
    report = q.verify(out, nano_path)
    assert report.passed, report.failures


@pytest.mark.parametrize("last", ["qweight", "scales", "qzeros"])
@pytest.mark.parametrize("receipt", [True, False])
def test_a_changed_byte_is_named(made, nano_path, tmp_path, last, receipt):
    out, name = shutil.copytree(made / "gptq", tmp_path / "out"), f"{LAYER}mlp.down_proj.{last}"
    tensors = load_file(out / "model.safetensors")
    if last == "scales":
        tensors[name][1] *= 4
    else:
        tensors[name][1] ^= 0x70707070
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    if not receipt:
        (out / "qwen35-receipt.json").unlink()
    failures = q.verify(out, nano_path).failures
    assert [f for f in failures if f.tensor.startswith(f"{LAYER}mlp.down_proj.")], failures


def test_the_config_says_what_engines_read(made):
    block = json.loads((made / "gptq" / "config.json").read_text())["quantization_config"]
    rules = block.pop("dynamic")
    assert block == {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32",
    }  # fmt: skip
    assert all(value == {} and key.startswith("-:.*") for key, value in rules.items())
    left = [
        "mtp.layers.0.self_attn.q_proj", "model.visual.blocks.0.attn.qkv", "visual.merger.fc1",
        f"{LAYER}linear_attn.in_proj_a", "language_model.model.layers.2.linear_attn.conv1d",
    ]  # fmt: skip
    for module in left:
        assert leaves(rules, module), module
    for module in (f"{LAYER}linear_attn.in_proj_qkv", f"{LAYER}mlp.gate_proj", Q_PROJ):
        assert not leaves(rules, module), module


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lm_head", True),
        ("pack_dtype", "int64"),
        ("format", "marlin"),
        ("modules_in_block_to_quantize", [["self_attn.q_proj"], ["mlp.up_proj"]]),
    ],
)
def test_a_field_that_engines_obey_is_named(made, nano_path, tmp_path, field, value):
    assert said_of(made, nano_path, tmp_path, {field: value}) == [field]


@pytest.mark.parametrize(
    "fields",
    [
        {"pack_dtype": "torch.int32", "format": "gptq", "true_sequential": False},
        {"modules_in_block_to_quantize": [["self_attn", "mlp"], ["linear_attn", "mtp"]]},
    ],
)
def test_what_means_the_same_is_not(made, nano_path, tmp_path, fields):
    assert said_of(made, nano_path, tmp_path, fields) == []


def said_of(made, source, folder, fields):
    """Return the first words of what is found of another tool's artifact with these fields."""
    out = shutil.copytree(made / "gptq", folder / "out")
    (out / "qwen35-receipt.json").unlink()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] |= fields
    (out / "config.json").write_text(json.dumps(config))
    failures = q.verify(out, source, level="structure").failures
    return [one.problem.removeprefix("quantization_config: ").split(" ")[0] for one in failures]


def leaves(rules, module):
    return any(re.match(rule.removeprefix("-:"), module) for rule in rules)


EXPERTS = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(3) for e in range(2)]
ROUTER = [f"model.layers.{i}.mlp.gate" for i in range(3)]


def test_experts_of_some_layers_may_be_left_alone():
    kept = ["model.layers.1.mlp.experts", *EXPERTS[2:4], *ROUTER]
    rules = with_rules({}, kept, EXPERTS[:2] + EXPERTS[4:])["dynamic"]
    named = {n for n in (*EXPERTS, *ROUTER, "model.layers.1.mlp.experts") if leaves(rules, n)}
    assert named == {*kept}
    assert not leaves(rules, "language_model.model.layers.0.mlp.experts")
    assert leaves(rules, "language_model.model.layers.1.mlp.experts")


def test_mtp_may_be_quantised_where_the_trunk_is_not():
    mtp = "mtp.layers.0.mlp.up_proj"
    kept = ["model.layers.0.mlp.up_proj", "mtp.fc", "model.visual.blocks.0.mlp.linear_fc1"]
    block = with_rules({}, kept, [mtp, "model.layers.1.mlp.up_proj", "lm_head"])
    rules = block["dynamic"]
    assert [leaves(rules, name) for name in (*kept, mtp)] == [True, True, True, False]
    assert not leaves(rules, "model.layers.1.mlp.up_proj")
    assert block["lm_head"]


def test_a_mixture_of_experts_is_written_and_proven(tmp_path):
    config = hub_config(moe=True, linear_value_head_dim=64, vocab_size=2048)
    source = written(tmp_path / "in", config, make_weights(config), NANO)
    changes = [GPTQ, "quantize.group=32", "layout=text", "vision=drop"]
    done = q.convert(source, tmp_path / "out", q.read_recipe("int4", changes), FAST)
    assert done.report.passed, done.report.failures
    (tmp_path / "out" / "qwen35-receipt.json").unlink()
    report = q.verify(tmp_path / "out", source)
    assert report.passed, report.failures


@pytest.mark.parametrize(
    ("recipe", "changes", "says"),
    [
        ("int4", ["quantize.symmetric=false"], "vLLM runs no other"),
        ("nvfp4a16", [], "nvfp4a16 cannot be written in the dialect gptq"),
        ("int4-mixed", [], "cannot be written in the dialect gptq"),
        ("gguf-q8_0", [], "export.format is gguf: leave quantize.dialect out"),
        ("fp8-block", [], "expected int4 or keep, or the dialect compressed-tensors"),
    ],
)
def test_what_has_no_place_in_the_dialect_is_refused(nano_path, tmp_path, recipe, changes, says):
    with pytest.raises(RecipeError, match=says):
        q.convert(nano_path, tmp_path / "out", q.read_recipe(recipe, [GPTQ, *changes]), FAST)


def test_steps_are_numbers_of_both_types():
    form = GPTQ_WRITTEN.with_choices(Choices(group=32))
    w = torch.randn(64, 64) * torch.logspace(-9, 3, 64)[:, None]
    w[3], w[4, :32] = 0, 1e-9
    parts = form.encode(w.bfloat16())
    steps = parts[SCALE].float()
    assert torch.equal(steps.bfloat16().float(), steps)
    assert (steps != 0).all()
    assert parts[PACKED].shape == (64, 8)
    assert parts[ZERO].shape == (8, 2)
    gap = (form.decode(form.apart(parts)) - w.bfloat16().float()).abs()
    assert (gap <= steps.abs().repeat_interleave(32, 1) * 1.01).all()


def test_a_step_beyond_float16_is_refused():
    with pytest.raises(QuantError, match="beyond 65504 of float16"):
        GPTQ_WRITTEN.with_choices(Choices(group=32)).encode(torch.full((8, 32), 1e6))
