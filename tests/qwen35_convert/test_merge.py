"""An adapter is merged while its base model is converted, and proven with both at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import qwen35_convert as q
from qwen35_convert.cli import app
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.source import merge, open_source
from tests.adapters import PREFIX, noise, of_matrix, write_adapter
from tests.checkpoints import Weights, moe, split_experts, write_checkpoint

NANO_FILE = "model.safetensors-00001-of-00001.safetensors"
TRUNK = "model.language_model."
# One linear of each kind, whose changes touch rows that are moved, cut and quantised.
MODULES = (
    "layers.0.linear_attn.in_proj_qkv",
    "layers.1.linear_attn.out_proj",
    "layers.2.mlp.down_proj",
    "layers.3.self_attn.q_proj",
    "layers.3.mlp.gate_proj",
)


def adapter_of(folder: Path, weights: Weights, **config: Any) -> Path:
    """Write an adapter of a few linear layers of these weights."""
    tensors: Weights = {}
    for i, module in enumerate(MODULES):
        tensors |= of_matrix(f"{TRUNK}{module}", weights[f"{TRUNK}{module}.weight"], seed=10 * i)
    return write_adapter(folder, tensors, **config)


def premerged(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the model that results, so that nothing is merged when it is converted."""
    opened = merge(open_checkpoint(base), adapter, "merged")
    shutil.copytree(base, folder)
    (file,) = folder.glob("*.safetensors")
    values = {n: opened.load(n, opened.read(n), ...).clone() for n in opened.where}
    save_file(values, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, nano_path) -> Path:
    return adapter_of(tmp_path_factory.mktemp("lora") / "tuned", load_file(nano_path / NANO_FILE))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, nano_path, adapter) -> Path:
    """The merged model, under the adapter's name."""
    return premerged(tmp_path_factory.mktemp("merged") / "tuned", nano_path, adapter)


def held(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file of an artifact, without receipts."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    told = ("receipt", "README")  # of what they were made
    return {f.name: f.read_bytes() for f in files if not any(word in f.name for word in told)}


@pytest.mark.parametrize(
    "recipe", ["bf16-split", "fp8-block", "nvfp4a16", "int4", "gguf-q4_k_m", "gguf-bf16"]
)
def test_every_recipe_makes_what_it_makes_of_the_merged_model(
    nano, adapter, tuned, tmp_path, recipe
):
    name = "out.gguf" if recipe.startswith("gguf") else "out"
    ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
    for out in (ours, theirs):
        out.parent.mkdir()
    source = q.Merge(adapter, nano)
    done = q.convert(source, ours, recipe)
    assert done.report is not None
    assert done.report.passed, done.report.failures
    q.convert(tuned, theirs, recipe)
    assert held(ours) == held(theirs)
    again = q.verify(ours, source)
    assert again.passed, again.failures


def test_mtp_and_everything_else_stay_as_they_are(nano, adapter, tmp_path):
    q.convert(q.Merge(adapter, nano), tmp_path / "out", "bf16-split")
    before = {n.replace(TRUNK, "model."): w for n, w in load_file(nano / NANO_FILE).items()}
    (file,) = (tmp_path / "out").glob("*.safetensors")
    after = load_file(file)
    other = {name for name, w in after.items() if not torch.equal(w, before[name])}
    assert other == {f"model.{module}.weight" for module in MODULES}
    assert any(name.startswith("mtp.") for name in after)


def test_experts_are_merged_one_by_one(tmp_path):
    base = moe(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    stack = f"{TRUNK}layers.1.mlp.experts"
    tensors = {}
    for e in (0, 3):
        for name, shape in (("gate_proj", (128, 128)), ("down_proj", (128, 128))):
            tensors |= of_matrix(f"{stack}.{e}.{name}", torch.empty(shape), seed=e)
    source = q.Merge(write_adapter(tmp_path / "in", tensors), base)
    done = q.convert(source, tmp_path / "out", "fp8-block", q.RunOptions(workers=2))
    assert done.report is not None
    assert done.report.passed, done.report.failures
    config = json.loads((base / "config.json").read_text())
    split = write_checkpoint(tmp_path / "split", config, split_experts(weights))
    q.convert(q.Merge(tmp_path / "in", split), tmp_path / "other", "fp8-block")
    assert held(tmp_path / "out") == held(tmp_path / "other")


def test_the_receipt_names_both_and_verification_wants_both(nano, adapter, tmp_path):
    out = tmp_path / "out"
    q.convert(q.Merge(adapter, nano), out, "fp8-block")
    receipt = json.loads((out / "qwen35-receipt.json").read_text())
    assert set(receipt["adapter"]["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert not {*receipt["adapter"]["files"]} & {*receipt["source"]["files"]}
    assert NANO_FILE in receipt["source"]["files"]
    assert q.verify(out, level="structure").passed
    with pytest.raises(q.RecipeError, match="--against ADAPTER --base SOURCE") as error:
        q.verify(out, nano)
    assert error.value.exit_code == 2


def test_another_adapter_is_named(nano, adapter, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    q.convert(q.Merge(adapter, nano), out, "bf16-split")
    adapter_of(other, load_file(nano / NANO_FILE), lora_alpha=9)
    report = q.verify(out, q.Merge(other, nano))
    assert not report.passed
    said = {(failure.tensor, failure.problem) for failure in report.failures}
    assert any("adapter_config.json" in problem for _, problem in said)
    names = {name for name, _ in said}
    assert names >= {f"model.{module}.weight" for module in MODULES}


def test_a_weight_without_its_change_is_named(nano, adapter, tmp_path):
    out = tmp_path / "out"
    q.convert(q.Merge(adapter, nano), out, "bf16-split")
    name = f"model.{MODULES[3]}.weight"
    before = load_file(nano / NANO_FILE)[f"{TRUNK}{MODULES[3]}.weight"]
    (file,) = out.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | {name: before}, file, metadata=metadata)
    report = q.verify(out, q.Merge(adapter, nano))
    assert name in {failure.tensor for failure in report.failures}


def test_a_journal_is_of_this_adapter(nano, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "in")
    source = q.Merge(folder, nano)

    def digest() -> str:
        return q.plan(source, "bf16-split").digest(open_source(source)[0])

    first = digest()
    assert digest() == first
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    assert digest() != first


def test_an_out_that_would_replace_the_adapter_is_refused(nano, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "run" / "adapter")
    with pytest.raises(q.OutputError, match="contain each other"):
        q.convert(
            q.Merge(folder, nano), tmp_path / "run", "bf16-split", q.RunOptions(overwrite=True)
        )
    assert (folder / "adapter_config.json").is_file()


def test_a_template_that_was_trained_with_is_not_taken_in_silence(nano, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "in")
    shutil.copy(nano / "chat_template.jinja", folder)
    (folder / "tokenizer.json").write_text("{}")
    notes = q.plan(q.Merge(folder, nano), "bf16-split").notes
    assert any("in/tokenizer.json is not used" in note for note in notes)
    assert not any("chat_template.jinja" in note for note in notes)


def test_a_quantised_base_is_refused_where_it_is_changed(nano, adapter, tmp_path):
    q.convert(nano, tmp_path / "base", "fp8-block-hub")
    with pytest.raises(q.FormatError, match="is stored as fp8-block, expected BF16") as error:
        q.convert(q.Merge(adapter, tmp_path / "base"), tmp_path / "out")
    assert error.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_gguf_is_no_base(nano, adapter, tmp_path):
    q.convert(nano, tmp_path / "base.gguf", "gguf-bf16")
    with pytest.raises(q.FormatError, match=r"is a GGUF file, expected a base model"):
        q.plan(q.Merge(adapter, tmp_path / "base.gguf"), "bf16-split")


def test_the_command_line(nano, adapter, tmp_path):
    out, base = str(tmp_path / "out"), ["--base", str(nano)]
    run = CliRunner().invoke
    done = run(app, ["convert", str(adapter), *base, "-o", out, "--recipe", "fp8-block"])
    assert done.exit_code == 0
    assert "an adapter (LoRA) is merged into 5 tensors" in done.stderr
    planned = run(app, ["convert", str(adapter), *base, "-o", out, "--plan", "--json"])
    assert any("merged into 5 tensors" in note for note in json.loads(planned.stdout)["notes"])
    assert run(app, ["verify", out, "--against", str(adapter), *base]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("convert", "{adapter}", "-o", "{out}"), "--base acme/Borealis-4B -o OUT merges it"),
        (("convert", "{nano}", "-o", "{out}", "--base", "{nano}"), "has no adapter_config.json"),
        (("convert", "{out}/no", "-o", "{out}", "--base", "{nano}"), "is not a folder"),
        (("convert", "{adapter}", "-o", "{out}", "--base", "{adapter}"), "is an adapter (LoRA)"),
        (("verify", "{nano}", "--base", "{nano}"), "--against ADAPTER --base SOURCE"),
    ],
)
def test_what_is_misused_is_said(nano, adapter, tmp_path, arguments, said):
    places = {"nano": nano, "adapter": adapter, "out": tmp_path / "out"}
    done = CliRunner().invoke(app, [argument.format(**places) for argument in arguments])
    assert isinstance(done.exception, q.Qwen35Error)
    assert said in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_broken_adapter_is_found_before_anything_is_kept(nano, tmp_path):
    weight = load_file(nano / NANO_FILE)[f"{TRUNK}{MODULES[0]}.weight"]
    tensors = of_matrix(f"{TRUNK}{MODULES[0]}", weight)
    tensors[f"{PREFIX}{TRUNK}{MODULES[0]}.lora_A.weight"][1, 1] = torch.nan
    adapter = write_adapter(tmp_path / "in", tensors)
    with pytest.raises(q.QuantError, match="NaN or infinite"):
        q.convert(q.Merge(adapter, nano), tmp_path / "out", "fp8-block")
    assert not (tmp_path / "out").exists()


def test_norms_and_heads_may_be_trained_whole(nano, tmp_path):
    weights = load_file(nano / NANO_FILE)
    norm = f"{TRUNK}layers.0.input_layernorm.weight"
    tensors = {PREFIX + norm: noise(*weights[norm].shape, scale=0.01)}
    adapter = write_adapter(tmp_path / "in", tensors, modules_to_save=["input_layernorm"])
    out = tmp_path / "out.gguf"
    done = q.convert(q.Merge(adapter, nano), out, "gguf-q8_0")
    assert done.report is not None
    assert done.report.passed, done.report.failures
