"""Weights encoded by what a text makes of their inputs: bytes, resume, proof, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import qwen35_convert as q
from qwen35_convert.calibration import executor
from qwen35_convert.calibration.memory import check_memory
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.run.memory import resident
from tests.qwen35_convert.killed import killed_at
from tests.variants import half

SETTINGS = ("quantize.calibrate.tokens=512", "quantize.method=gptq")
ROOT = Path(__file__).parents[2]
RECEIPT = "qwen35-receipt.json"
WEIGHTS = "model.safetensors"
DOWN = "model.language_model.layers.1.mlp.down_proj.weight"


def convert(nano, out, recipe="int4", workers=1, settings=SETTINGS, **options):
    chosen = q.RunOptions(workers=workers, **options)
    return q.convert(nano, out, recipe, chosen, overrides=settings)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The bundled model without its first two layers."""
    return half(tmp_path_factory.mktemp("half") / "source")


@pytest.fixture(scope="module")
def made(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("calibrated") / "out"
    done = convert(source, out)
    assert done.report.passed, done.report.failures
    assert done.report.calibration["proof"] == "again"
    return out


def test_workers_change_no_byte(made, source, tmp_path):
    convert(source, tmp_path / "out", workers=2, verify=False)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes()


def test_the_receipt_says_what_calibrated(made):
    told = json.loads((made / RECEIPT).read_text())["calibration"]
    assert (told["method"], told["tokens"], told["text"]) == ("gptq", 512, "default")
    assert list(told["layers"]) == [f"layers.{i}" for i in range(len(told["layers"]))]
    assert all(len(layer["sums_sha256"]) == 64 for layer in told["layers"].values())


def test_a_killed_conversion_goes_on_at_its_layer(made, source, tmp_path, monkeypatch):
    with killed_at("layers.1", monkeypatch):
        convert(source, tmp_path / "out", verify=False)
    began = []
    say = executor.append_seen
    monkeypatch.setattr(
        executor,
        "append_seen",
        lambda path, seen, left: (began.append(seen.stage), say(path, seen, left)),
    )
    done = convert(source, tmp_path / "out")
    assert began[0] == "layers.1"
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes()
    assert done.receipt == (made / RECEIPT).read_bytes()


KILLED_AT = """
import os, signal, sys
from qwen35_convert import cli
from qwen35_convert.calibration import executor
def convert_item(item, *rest, convert=executor.convert_item):
    if item.atom.name == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    convert(item, *rest)
executor.convert_item = convert_item
cli.app(sys.argv[2:])
"""


@pytest.mark.all
def test_one_that_sigkill_ends_within_a_layer_goes_on_with_it(made, source, tmp_path):
    """Killed twice in a layer, then left alone: the bytes of a whole run."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["convert", source, "-o", tmp_path / "out", "--recipe", "int4", *settings]
    where = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "cwd": ROOT, "check": False}
    for name in ("layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"):
        code = [sys.executable, "-c", KILLED_AT, name, *map(str, command), "--workers", "1"]
        assert subprocess.run(code, capture_output=True, **where).returncode == -signal.SIGKILL
        seen = (tmp_path / ".out.qwen35-partial" / executor.SEEN).read_text()
        lines = filter(None, seen.splitlines())
        assert [json.loads(line)["stage"] for line in lines] == ["layers.0"]
    done = convert(source, tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes()
    assert done.receipt == (made / RECEIPT).read_bytes()


def test_it_is_proven_by_running_again_or_by_bounds(made, source):
    again = q.verify(made, source)
    assert again.passed, again.failures
    assert again.calibration["proof"] == "again"
    judged = q.verify(made, source, by_bounds=True)
    assert judged.passed, judged.failures
    assert judged.calibration["proof"] == "bounds"


def test_sums_of_another_machine_are_judged_by_bounds(made, source, tmp_path):
    out = shutil.copytree(made, tmp_path / "out")
    receipt = json.loads((out / RECEIPT).read_text())
    receipt["calibration"]["layers"]["layers.1"]["sums_sha256"] = "0" * 64
    (out / RECEIPT).write_text(json.dumps(receipt))
    report = q.verify(out, source)
    assert report.passed, report.failures
    assert report.calibration["layers_again"] == 1
    assert "layers.1" in report.calibration["why"]


@pytest.mark.parametrize("by_bounds", [False, True])
def test_a_tampered_weight_is_named(made, source, tmp_path, by_bounds):
    out = shutil.copytree(made, tmp_path / "out")
    tensors = load_file(out / WEIGHTS)
    tensors[DOWN + "_packed"][5] = -2004318072
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    report = q.verify(out, source, by_bounds=by_bounds)
    named = {f.tensor for f in report.failures if f.tensor.startswith("model.language")}
    assert len(named) == 1, report.failures
    assert named.pop().startswith(DOWN)


def test_a_missing_text_is_said(source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 200)
    settings = (*SETTINGS, f"quantize.calibrate.text={text}")
    convert(source, tmp_path / "out", settings=settings, verify=False)
    text.unlink()
    report = q.verify(tmp_path / "out", source)
    assert report.passed, report.failures
    assert "not available" in report.calibration["why"]


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("int4", ("only=layers.0.*",), "inputs come from all the layers"),
        ("fp8-block", (), "nearest, or a scheme that is calibrated: nvfp4a16"),
        ("int4", ("quantize.calibrate.text=/nowhere/x.txt",), "quantize.calibrate.text /nowhere"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(source, tmp_path, recipe, settings, message):
    with pytest.raises(RecipeError, match=message):
        q.plan(source, recipe, tmp_path / "out", overrides=(*SETTINGS, *settings))


@pytest.mark.parametrize("content", ["", "too short"])
def test_a_text_that_is_too_short_is_refused(source, tmp_path, content):
    (tmp_path / "x.txt").write_text(content)
    settings = (*SETTINGS, f"quantize.calibrate.text={tmp_path / 'x.txt'}")
    with pytest.raises(RecipeError, match=r"x.txt has \d tokens, expected at least"):
        q.plan(source, "int4", tmp_path / "out", overrides=settings)


def test_a_limit_that_is_too_small_is_refused_with_numbers(source, tmp_path):
    plan = q.plan(source, "int4", tmp_path / "out", overrides=SETTINGS)
    opened = open_checkpoint(source)
    with pytest.raises(RecipeError, match="MB or more, as one layer and the sums"):
        check_memory(plan, opened, q.Limit(resident() + (32 << 20)), 512, 1)
    check_memory(plan, opened, q.Limit(resident() + (512 << 20)), 512, 1)


def test_scales_alone_need_the_streams_and_a_layer(source, tmp_path):
    plan = q.plan(source, "fp8-block", tmp_path / "out", overrides=["quantize.kv_cache=fp8"])
    opened = open_checkpoint(source)
    with pytest.raises(RecipeError, match="MB or more, as one layer and the text need"):
        check_memory(plan, opened, q.Limit(resident() + (16 << 20)), 32768, 1)
    check_memory(plan, opened, q.Limit(resident() + (256 << 20)), 32768, 1)


def test_many_machines_are_refused(source, tmp_path):
    with pytest.raises(RecipeError, match="goes layer by layer"):
        convert(source, tmp_path / "out", executor="ray")
