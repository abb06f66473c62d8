"""GGUF files whose codes a text chooses: bytes, resume, proof with and without the receipt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import qwen35_convert as q
from formats.family.moves import Tile
from formats.gguf.checkpoint import first_file
from qwen35_convert.calibration.encoder import columns_of
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.text.tokens import text_ids
from runtime.compare import compare_logits
from runtime.load import load_model
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.llama_cpp import LlamaCpp
from tests.qwen35_convert.killed import killed_at
from tests.runtime.models import full
from tests.variants import half

SETTINGS = ("quantize.calibrate.tokens=512", "quantize.method=gptq")
LONG = ("quantize.calibrate.tokens=2048", "quantize.method=gptq")
DOWN = "blk.1.ffn_down.weight"


def convert(nano, out, recipe="gguf-q4_k_m", workers=1, settings=SETTINGS, **options):
    chosen = q.RunOptions(workers=workers, **options)
    return q.convert(nano, out, recipe, chosen, overrides=settings)


def receipt_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.receipt.json")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The bundled model without its first two layers."""
    return half(tmp_path_factory.mktemp("half") / "source")


@pytest.fixture(scope="module")
def made(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("calibrated") / "out.gguf"
    done = convert(source, out)
    assert done.report.passed, done.report.failures
    assert done.report.calibration["proof"] == "again"
    return out


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the file, and of its receipt."""
    shutil.copy(receipt_of(made), receipt_of(tmp_path / "out.gguf"))
    return Path(shutil.copy(made, tmp_path / "out.gguf"))


def test_workers_change_no_byte(made, source, tmp_path):
    convert(source, tmp_path / "out.gguf", workers=2, verify=False)
    assert (tmp_path / "out.gguf").read_bytes() == made.read_bytes()


@pytest.mark.all
def test_a_killed_conversion_goes_on_at_its_layer(made, source, tmp_path, monkeypatch):
    with killed_at("layers.1", monkeypatch):
        convert(source, tmp_path / "out.gguf", verify=False)
    done = convert(source, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == made.read_bytes()
    assert done.receipt == receipt_of(made).read_bytes()


def test_file_and_receipt_say_what_calibrated(made):
    kv = first_file(open_checkpoint(made)).kv
    told = {key: kv[f"quantize.calibrate.{key}"].value for key in ("method", "text", "tokens")}
    assert told == {"method": "gptq", "text": "default", "tokens": 512}
    claimed = json.loads(receipt_of(made).read_text())["calibration"]
    assert claimed["method"] == "gptq"
    assert all(len(layer["sums_sha256"]) == 64 for layer in claimed["layers"].values())


def test_it_is_proven_by_running_again_or_by_bounds(copy, source):
    again = q.verify(copy, source)
    assert again.passed, again.failures
    assert again.calibration["proof"] == "again"
    judged = q.verify(copy, source, by_bounds=True)
    assert judged.passed, judged.failures
    assert judged.calibration["proof"] == "bounds"
    receipt_of(copy).unlink()
    alone = q.verify(copy, source)
    assert alone.passed, alone.failures


def place_of(path: Path, name: str) -> int:
    start, _ = first_file(open_checkpoint(path)).ranges[name]
    return start


@pytest.mark.parametrize("by_bounds", [False, True])
@pytest.mark.parametrize(("what", "at"), [("scale", 1), ("codes", 6)])
def test_a_tampered_weight_is_named(copy, source, by_bounds, what, at):
    """By bounds: what no encoder does, such as a scale of another size, or codes of no meaning."""
    data = bytearray(copy.read_bytes())
    start, size = place_of(copy, DOWN), 22
    for block in range(256 if by_bounds else 1):
        place = start + block * size + at
        data[place : place + 1 if what == "scale" else place + 16] = (
            bytes([data[place] ^ 4]) if what == "scale" else bytes(16)
        )
    copy.write_bytes(data)
    report = q.verify(copy, source, by_bounds=by_bounds)
    assert {f.tensor for f in report.failures if f.tensor.startswith("blk")} == {DOWN}


@pytest.mark.all
def test_predictions_are_nearer_than_by_importance(nano_path, tmp_path):
    """Of linears of layers: the embedding has tests of its own."""
    source, imatrix = open_checkpoint(nano_path), tmp_path / "imatrix.gguf"
    q.imatrix(nano_path, imatrix, chunks=4)
    rows = torch.tensor(text_ids(source, "default")[-1024:]).view(-1, 256)
    kept = ("mtp=drop", "quantize.rules=[{match: embed_tokens, scheme: bf16}]")
    losses = []
    for settings in (LONG, (f"quantize.imatrix={imatrix}",)):
        out = tmp_path / f"{len(settings)}.gguf"
        convert(nano_path, out, settings=(*settings, *kept), verify=False)
        report = compare_logits(source, open_checkpoint(out), rows, device="cpu")
        losses.append(report.kl_mean)
    assert losses[0] < 0.92 * losses[1]


@pytest.mark.filterwarnings("ignore")
def test_llama_cpp_predicts_what_we_predict(made, source):
    ids = text_ids(open_checkpoint(source), "default")[:64]
    ours = full(load_model(open_checkpoint(made), "cpu", torch.float32), ids)
    with LlamaCpp(made, len(ids)) as theirs:
        found = torch.from_numpy(theirs.logits(ids))
    assert (found - ours).norm() < 0.2 * ours.norm()  # it rounds activations to eight bits


@pytest.fixture
def tiled(nano_path, tmp_path):
    """A model with three value heads to a key head, which GGUF files have in another order."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "vocab_size": 2048}
    config = hub_config(sizes="blocky", linear_value_head_dim=64, **sizes)
    write_checkpoint(tmp_path / "tiled", config, make_weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(nano_path / name, tmp_path / "tiled" / name)
    return tmp_path / "tiled"


def test_columns_of_value_heads_are_those_of_the_file(tiled):
    for item in q.plan(tiled, "gguf-q8_0", "out.gguf").items:
        moved = columns_of(item)
        if item.atom.role == "out_proj":
            assert torch.equal(moved, Tile(2, 3, 64).order())
        else:
            assert moved is None, item.atom.name


@pytest.mark.all
def test_bounds_measure_the_error_that_the_calibration_leaves(tiled, tmp_path):
    settings = ("quantize.calibrate.tokens=128", "quantize.method=gptq")
    done = convert(tiled, tmp_path / "out.gguf", settings=settings)
    assert done.report.passed, done.report.failures
    judged = q.verify(tmp_path / "out.gguf", tiled, by_bounds=True)
    assert judged.passed, judged.failures
    for scheme, told in judged.schemes.items():
        ours = done.report.schemes[scheme]
        assert told.get("relative_rms") == pytest.approx(ours.get("relative_rms")), scheme


def test_types_of_grids_are_refused_or_named(nano_path, tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(RecipeError, match=r"linears of layers have no scheme, .*q4_k"):
        q.plan(nano_path, "gguf-bf16", out, overrides=SETTINGS)
    settings = (*SETTINGS, 'quantize.rules=[{match: "layers.*.mlp.down_proj", scheme: mxfp4}]')
    notes = q.plan(nano_path, "gguf-q4_k_m", out, overrides=settings).notes
    assert any("mxfp4 (layers.0.mlp.down_proj ...)" in note for note in notes), notes
