"""One text for a method, scales of inputs and scales of a cache: read once, run once."""

from __future__ import annotations

import json
import shutil

import pytest

import qwen35_convert as q
from qwen35_convert.calibration import texts
from runtime import layerwise

SETTINGS = ("quantize.calibrate.tokens=512", "quantize.method=sweep", "quantize.kv_cache=fp8")
RECEIPT = "qwen35-receipt.json"
FAST = q.RunOptions(workers=1)


@pytest.fixture
def counted(monkeypatch):
    """Count calls of what reads a text, and of what runs it for scales."""
    calls: list[str] = []

    def count(module, name):
        whole = getattr(module, name)

        def counting(*arguments, **named):
            calls.append(name)
            return whole(*arguments, **named)

        monkeypatch.setattr(module, name, counting)

    count(texts, "text_ids")
    count(layerwise, "observe_all")
    return calls


@pytest.fixture(scope="module")
def made(tmp_path_factory, nano_path):
    out = tmp_path_factory.mktemp("one-text") / "out"
    done = q.convert(nano_path, out, "nvfp4", FAST, overrides=SETTINGS)
    assert done.report.passed, done.report.failures
    return out


def test_a_conversion_reads_and_runs_it_once(nano_path, tmp_path, counted):
    done = q.convert(nano_path, tmp_path / "out", "nvfp4", FAST, overrides=SETTINGS)
    assert done.report.passed, done.report.failures
    assert sorted(counted) == ["observe_all", "text_ids"]


def test_a_proof_reads_and_runs_it_once(made, nano_path, counted):
    report = q.verify(made, nano_path)
    assert report.failures == []
    assert (report.calibration["proof"], report.cache["proof"]) == ("again", "again")
    assert sorted(counted) == ["observe_all", "text_ids"]


def test_the_receipt_names_it_once(made):
    receipt = json.loads((made / RECEIPT).read_text())
    told = receipt["calibration"]
    assert (told["method"], told["text"], told["tokens"]) == ("sweep", "default", 512)
    block = json.loads((made / "config.json").read_text())["quantization_config"]
    assert block["kv_cache_scheme"]["num_bits"] == 8
    assert "default" not in receipt["source"]["files"]


def test_without_it_all_three_are_judged(made, nano_path, tmp_path):
    artifact = shutil.copytree(made, tmp_path / "out")
    receipt = json.loads((artifact / RECEIPT).read_text())
    receipt["recipe"]["quantize"]["calibrate"]["text"] = "gone"
    (artifact / RECEIPT).write_text(json.dumps(receipt))
    report = q.verify(artifact, nano_path)
    assert report.failures == []
    assert (report.calibration["proof"], report.cache["proof"]) == ("bounds", "bounds")
    assert "gone" in report.cache["why"]
    (artifact / RECEIPT).unlink()
    assert q.verify(artifact, nano_path).failures == []
