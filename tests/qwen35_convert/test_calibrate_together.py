"""Weights encoded together, as on a GPU: here by the references, and marked gpu by the kernels."""

from __future__ import annotations

import pytest
import torch

import qwen35_convert as q
from qwen35_convert.calibration import encoder
from qwen35_convert.calibration.digest import Digest

SETTINGS = ("quantize.calibrate.tokens=512", "quantize.method=gptq", "verify.level=tensors")
recipes = pytest.mark.parametrize("recipe", ["int4", "nvfp4a16"])


@recipes
def test_an_artifact_is_proven_by_running_again(recipe, nano, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "encodes_together", lambda _: True)
    done = q.convert(nano, tmp_path / "out", recipe, q.RunOptions(workers=2), overrides=SETTINGS)
    assert done.report.passed, done.report.failures
    assert done.report.calibration["proof"] == "again"


def test_an_artifact_is_right_for_whoever_encodes_otherwise(nano, tmp_path, monkeypatch):
    """Its codes are not the CPU's to the last unit: then bounds judge them."""
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "encodes_together", lambda _: True)
        q.convert(nano, tmp_path / "out", "int4", q.RunOptions(verify=False), overrides=SETTINGS)
    report = q.verify(tmp_path / "out", nano, by_bounds=True)
    assert report.passed, report.failures


@pytest.mark.gpu
@recipes
def test_a_gpu_calibrates(recipe, nano, tmp_path):
    options = q.RunOptions(device="cuda")
    done = q.convert(nano, tmp_path / "out", recipe, options, overrides=SETTINGS)
    assert done.report.passed, done.report.failures
    made = (tmp_path / "out" / "model.safetensors").read_bytes()
    q.convert(nano, tmp_path / "again", recipe, options, overrides=SETTINGS)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == made


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_digest_is_that_of_the_numbers_when_they_were_added(where):
    values = [torch.arange(5.0, device=where) + i for i in range(9)]
    digest, expected = Digest(), Digest()
    for x in values:
        expected.add(x.cpu().clone())
        digest.add(x)
        x.zero_()
    assert digest.close() == expected.close()
