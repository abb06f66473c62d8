"""`convert --fit`, `--target-size`, `--target-bpw`: the artifact is that small, and the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import qwen35_convert as q
from quant.ggml.kinds import POOR_UNWEIGHTED, WRITABLE
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.fit.sizes import sizes_of
from qwen35_convert.serving.memory import memory_needed
from qwen35_convert.write.digests import sha256_file
from tests.qwen35_convert.command import called

GGUF = ("q4_0", "q5_0", "q8_0", "bf16")
FOLDER = ("int4", "fp8-block", "keep")


def table_for(source, recipe, out, forms, path):
    """Write a table without measuring: what a weight costs follows from its bytes."""
    checkpoint = q.plan(source, recipe, out)
    sizes = sizes_of(open_checkpoint(source), checkpoint.recipe, Path(out), forms)
    units = {
        unit.name: {
            "weights": list(unit.matches),
            "elements": unit.elements,
            "forms": {
                form: {"bytes": size, "error": 1.0, "kl": i * 1e-3 * unit.elements / size**2}
                for i, (form, size) in enumerate(unit.sizes.items(), 1)
            },
        }
        for unit in sizes.units
    }
    files = {
        file.name: {"size": file.stat().st_size, "sha256": sha256_file(file)}
        for file in sorted(source.iterdir())
    }
    values = {"schema": "qwen35-sensitivity", "schema_version": 2, "units": units,
              "source": {"repo": None, "revision": None, "files": files},
              "recipe": checkpoint.recipe.model_dump(mode="json")}  # fmt: skip
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory, nano_path):
    folder = tmp_path_factory.mktemp("tables")
    return {
        "m.gguf": table_for(nano_path, "gguf-q8_0", "m.gguf", GGUF, folder / "gguf.json"),
        "out": table_for(nano_path, "fp8-block", "out", FOLDER, folder / "folder.json"),
    }


@pytest.mark.parametrize("out", ["m.gguf", "out"])
@pytest.mark.parametrize("share", [0.45, 0.6, 0.9])
def test_the_files_have_the_size_that_was_told(tables, nano_path, out, share):
    whole = q.plan(nano_path, "gguf-bf16" if out == "m.gguf" else "bf16-split", out).nbytes
    goal = q.Goal(size=int(share * whole), table=tables[out])
    fitted = q.fit_recipe(nano_path, out, goal)
    assert q.plan(nano_path, fitted.recipe, out).nbytes == fitted.nbytes <= goal.size
    assert fitted.nbytes > 0.8 * goal.size or share == 0.9


@pytest.mark.parametrize("size", range(1_700_000, 2_300_000, 150_001))
def test_a_mix_that_gives_the_rest_other_types_stays_within_the_size(tables, nano_path, size):
    goal = q.Goal(size=size, table=tables["m.gguf"])
    fitted = q.fit_recipe(nano_path, "m.gguf", goal, "gguf-q4_k_m")
    assert q.plan(nano_path, fitted.recipe, "m.gguf").nbytes == fitted.nbytes <= size


@pytest.mark.parametrize("out", ["m.gguf", "out"])
def test_what_is_too_small_is_refused_with_the_smallest_size(tables, nano_path, out):
    with pytest.raises(q.RecipeError, match=r"expected at least [\d,]+,"):
        q.fit_recipe(nano_path, out, q.Goal(size=1000, table=tables[out]))


def test_bits_are_those_of_all_weights(tables, nano_path):
    fitted = q.fit_recipe(nano_path, "m.gguf", q.Goal(bits=9.0, table=tables["m.gguf"]))
    plan = q.plan(nano_path, fitted.recipe, "m.gguf")
    wide = q.plan(nano_path, "gguf-bf16", "m.gguf", overrides=["quantize.scheme=f32"])
    count = sum(info.nbytes // 4 for info in wide.tensors.values())
    assert 8.0 < 8 * plan.nbytes / count <= 9.0


@pytest.mark.parametrize(("out", "engine"), [("m.gguf", "llama.cpp"), ("out", "vllm")])
def test_memory_holds_weights_and_sequences(tables, nano_path, out, engine):
    config = open_checkpoint(nano_path).config
    cache = memory_needed(config, 0, 2048, 3, engine).total
    goal = q.Goal(memory=cache + 2_500_000, context=2048, batch=3, table=tables[out])
    fitted = q.fit_recipe(nano_path, out, goal)
    assert memory_needed(config, fitted.nbytes, 2048, 3, engine).total <= goal.memory
    with pytest.raises(q.RecipeError, match=r"takes for 3 x 2,048 tokens: .* MB"):
        q.fit_recipe(
            nano_path, out, q.Goal(memory=cache // 2, context=2048, batch=3, table=tables[out])
        )


def test_a_rule_of_the_recipe_stays(tables, nano_path):
    rule = "quantize.rules=[{match: 'layers.0.mlp.*', scheme: q8_0}]"
    goal = q.Goal(size=3_000_000, table=tables["m.gguf"])
    fitted = q.fit_recipe(nano_path, "m.gguf", goal, "gguf-q8_0", overrides=[rule])
    items = q.plan(nano_path, fitted.recipe, "m.gguf").items
    ruled = [item for item in items if item.atom.name.startswith("layers.0.mlp.")]
    assert {item.scheme.name for item in ruled} == {"q8_0"}


def test_a_table_of_other_weights_or_other_means_is_refused(tables, tmp_path, nano_path):
    values = json.loads(tables["out"].read_text())
    name = next(iter(values["units"]))
    other = tmp_path / "other.json"
    for entry, why in ((None, "is not in the table"), ({"elements": 7}, "another size there")):
        units = {n: unit for n, unit in values["units"].items() if n != name}
        units |= {name: values["units"][name] | entry} if entry else {}
        other.write_text(json.dumps(values | {"units": units}))
        with pytest.raises(q.RecipeError, match=why):
            q.fit_recipe(nano_path, "out", q.Goal(size=3_000_000, table=other))
    goal = q.Goal(size=3_000_000, table=tables["out"])
    with pytest.raises(q.RecipeError, match="method nearest, without an imatrix"):
        q.fit_recipe(nano_path, "out", goal, "int4-gptq")


def test_a_table_of_another_model_of_the_same_shapes_is_refused(tables, tmp_path, nano_path):
    other = shutil.copytree(nano_path, tmp_path / "other")
    (other / "generation_config.json").write_text('{"temperature": 0.5}\n')
    file = next(other.glob("*.safetensors"))
    goal = q.Goal(size=3_000_000, table=tables["m.gguf"])
    same = q.fit_recipe(nano_path, "m.gguf", goal)
    assert q.fit_recipe(other, "m.gguf", goal).recipe == same.recipe, "its weights are the same"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(q.RecipeError, match="this source has other values in") as refused:
        q.fit_recipe(other, "m.gguf", goal)
    assert "--sensitivity by-role" in str(refused.value)
    fitted = q.fit_recipe(other, "m.gguf", q.Goal(size=3_000_000, by_role=True))
    assert fitted.nbytes <= 3_000_000, "costs by role are of no one model"
    values = json.loads(tables["m.gguf"].read_text())
    short = tmp_path / "short.json"
    short.write_text(json.dumps({k: v for k, v in values.items() if k != "source"}))
    with pytest.raises(q.RecipeError, match="does not say of which files it is"):
        q.fit_recipe(nano_path, "m.gguf", q.Goal(size=3_000_000, table=short))


@pytest.mark.parametrize("mix", ["q4_k_m", "q5_k_m"])
@pytest.mark.parametrize("more", [0, 1000, 30_000, 200_000])
def test_a_fit_is_expected_to_lose_no_more_than_the_mix_it_starts_from(
    tmp_path, nano_path, mix, more
):
    recipe = q.read_recipe(f"gguf-{mix}")
    plan = q.plan(nano_path, recipe, "m.gguf")
    forms = [name.lower() for name in WRITABLE if name not in POOR_UNWEIGHTED and name != "NVFP4"]
    table = table_for(nano_path, recipe, "m.gguf", forms, tmp_path / "all.json")
    units = json.loads(table.read_text())["units"]
    types = {name: info.dtype.lower() for name, info in plan.tensors.items()}
    own = sum(unit["forms"][types[name]]["kl"] for name, unit in units.items())
    fitted = q.fit_recipe(nano_path, "m.gguf", q.Goal(size=plan.nbytes + more, table=table), recipe)
    assert fitted.kl <= own * (1 + 1e-9)
    assert fitted.nbytes <= plan.nbytes + more


def test_convert_keeps_the_recipe_and_it_gives_the_same_bytes(tables, tmp_path, nano_path):
    out, kept = tmp_path / "m.gguf", tmp_path / "kept.yaml"
    words = ("--target-size", "3MB", "--sensitivity", tables["m.gguf"], "--save-recipe", kept)
    done = called("convert", nano_path, "-o", out, *words)
    assert done.returncode == 0, done.stderr
    assert "expected mean KL" in done.stderr
    assert out.stat().st_size <= 3_000_000
    assert kept.read_text().startswith("# Chosen by qwen35: ")
    again = tmp_path / "again" / "m.gguf"
    assert called("convert", nano_path, "-o", again, "--recipe", kept).returncode == 0
    assert again.read_bytes() == out.read_bytes()
    assert called("verify", out, "--against", nano_path).returncode == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--target-size", "3MB", "--target-bpw", "4"], "are given"),
        (["--context", "4096"], "are for --fit"),
        (["--save-recipe", "x.yaml"], "are for a size"),
        (["--target-size", "3 bananas"], "is not a size"),
        (["--target-bpw", "-1"], "a number above 0"),
        (["--target-size", "3MB", "--sensitivity", "none.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_misuse(tmp_path, nano_path, words, why):
    done = called("convert", nano_path, "-o", tmp_path / "m.gguf", *words)
    assert done.returncode == 2
    assert why in done.stderr


def test_a_folder_whose_mtp_head_has_another_scheme_than_its_namesake(tables, tmp_path, nano_path):
    """Layer 0 of the MTP head and layer 0 of the decoder: patterns tell them apart."""
    rule = "quantize.rules=[{match: 'layers.0.mlp.*_proj', scheme: int8}]"
    out, options = tmp_path / "out", q.RunOptions(workers=1)
    done = q.convert(nano_path, out, "fp8-block", options, overrides=[rule])
    assert done.report.passed
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert any("(?<!mtp" in target for target in groups["int8"]["targets"])
    fitted = q.fit_recipe(nano_path, tmp_path / "fit", q.Goal(size=3_000_000, table=tables["out"]))
    assert q.convert(nano_path, tmp_path / "fit", fitted.recipe, options).report.passed
