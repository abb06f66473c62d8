"""Sizes by unit and form: what a plan of the chosen forms has, to the byte."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import qwen35_convert as q
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.fit.sizes import sizes_of
from qwen35_convert.serving.memory import longest_context, memory_needed, room_for_weights
from tests.checkpoints import moe

TYPES = ("q2_k", "q4_0", "q4_k", "q5_0", "q6_k", "q8_0", "bf16")
SCHEMES = ("keep", "fp8-channel", "int8", "int4", "nvfp4a16")


@pytest.fixture(scope="module")
def sources(tmp_path_factory, nano_path):
    folder = tmp_path_factory.mktemp("fit") / "moe"
    experts = moe(folder, linear_key_head_dim=128, vocab_size=2048)
    shutil.copy(nano_path / "tokenizer.json", folder)
    return {name: open_checkpoint(p) for name, p in (("dense", nano_path), ("moe", experts))}


def chosen(sizes, seed: int) -> dict[str, str]:
    pick = random.Random(seed)
    return {unit.name: pick.choice(sorted(unit.sizes)) for unit in sizes.units}


@pytest.mark.parametrize("source", ["dense", "moe"])
@pytest.mark.parametrize("seed", range(3))
def test_a_gguf_file_has_the_size_that_was_told(sources, source, seed):
    out = Path("m.gguf")
    sizes = sizes_of(sources[source], q.read_recipe("gguf-q8_0"), out, TYPES)
    forms = chosen(sizes, seed)
    planned = q.plan(sources[source].folder, sizes.recipe_of(forms), out)
    assert planned.nbytes == sizes.total(forms)
    types = {item.outputs[0].name: item.scheme.type for item in planned.items}
    assert all(types[name] == form.upper() for name, form in forms.items())


@pytest.mark.parametrize("source", ["dense", "moe"])
@pytest.mark.parametrize("seed", range(3))
def test_the_tensors_of_a_folder_have_the_size_that_was_told(sources, source, seed):
    recipe = q.read_recipe("nvfp4-mixed", ["quantize.rules=[]"])
    sizes = sizes_of(sources[source], recipe, Path("out"), SCHEMES)
    forms = chosen(sizes, seed)
    planned = q.plan(sources[source].folder, sizes.recipe_of(forms), Path("out"))
    assert sum(info.nbytes for info in planned.tensors.values()) == sizes.total(forms)
    got = {item.atom.group or item.atom.name: item.scheme.name for item in planned.items}
    assert all(got[name] == form for name, form in forms.items())


def test_a_rule_of_the_recipe_stays(sources):
    rule = "quantize.rules=[{match: 'layers.0.mlp.*', scheme: q6_k}]"
    sizes = sizes_of(sources["dense"], q.read_recipe("gguf-q8_0", [rule]), Path("m.gguf"), TYPES)
    assert not any(unit.matches[0].startswith("layers.0.mlp.") for unit in sizes.units)
    assert any(unit.matches[0].startswith("layers.1.mlp.") for unit in sizes.units)


def test_only_forms_that_a_weight_may_have(sources):
    theirs = q.read_recipe("gguf-q8_0", ["quantize.mix=llama.cpp"])
    sizes = sizes_of(sources["dense"], theirs, Path("m.gguf"), TYPES)
    units = {unit.matches[0]: unit for unit in sizes.units}
    assert set(units["layers.0.linear_attn.in_proj_a"].sizes) == {"q8_0", "bf16"}
    ours = sizes_of(sources["dense"], q.read_recipe("gguf-q8_0"), Path("m.gguf"), TYPES)
    assert units.keys() - {unit.matches[0] for unit in ours.units} == {
        f"layers.{i}.linear_attn.in_proj_{x}" for i in range(4) for x in "ab"
        if f"layers.{i}.linear_attn.in_proj_a" in units
    }, "what our mixes keep in F32"  # fmt: skip
    assert "layers.0.input_layernorm" not in units
    folder = sizes_of(sources["dense"], q.read_recipe("int4"), Path("out"), SCHEMES)
    assert not any("in_proj_a" in match for unit in folder.units for match in unit.matches)


@pytest.mark.parametrize(("out", "recipe"), [("m.gguf", "gguf-q8_0"), ("out", "int4")])
def test_a_form_that_is_not_known_is_refused(sources, out, recipe):
    with pytest.raises(q.QuantError, match="is not known"):
        sizes_of(sources["dense"], q.read_recipe(recipe), Path(out), ["q9_z"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_what_a_cache_leaves_to_the_weights(sources, engine):
    config, memory = sources["dense"].config, 10**8
    room = room_for_weights(config, 4096, 8, engine, memory)
    assert memory_needed(config, room, 4096, 8, engine).total == memory
    assert longest_context(config, room, 8, engine, memory) >= 4096
    assert room_for_weights(config, 4096, 8, engine, 1) < 0
