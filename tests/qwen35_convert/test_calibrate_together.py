"""Weights encoded together, as on a GPU: here with the CPU's loops, and marked gpu by the kernels.

`tests/runtime/kernels/gptq` holds these loops, the kernels and their references to each other.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qwen35_convert as q
from qwen35_convert.calibration import encoder, executor
from qwen35_convert.calibration.digest import folded
from qwen35_convert.calibration.layers import Layers
from qwen35_convert.errors import MissingError
from qwen35_convert.run.worker import Effort
from runtime.kernels import gptq
from tests.runtime.kernels.gptq import on_the_cpu
from tests.variants import half

SETTINGS = ("quantize.calibrate.tokens=512", "quantize.method=gptq", "verify.level=tensors")


def together(source, out, recipe):
    """Convert as a GPU does: weights of a layer are encoded together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "encodes_together", lambda _: True)
        patch.setattr(gptq, "BLOCKS", on_the_cpu.BLOCKS)
        return q.convert(source, out, recipe, q.RunOptions(workers=2), overrides=SETTINGS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The bundled model without its first two layers."""
    return half(tmp_path_factory.mktemp("half") / "source")


@pytest.fixture(scope="module")
def made(tmp_path_factory, source):
    return together(source, tmp_path_factory.mktemp("together") / "out", "int4")


def proven_again(done):
    assert done.report.passed, done.report.failures
    assert done.report.calibration["proof"] == "again"


def test_an_artifact_is_proven_by_running_again(made):
    proven_again(made)


@pytest.mark.all
def test_one_of_nvfp4_is_proven_by_running_again(nano, tmp_path):
    proven_again(together(nano, tmp_path / "out", "nvfp4a16"))


def test_an_artifact_is_right_for_whoever_encodes_otherwise(made, source):
    """Its codes are not the CPU's to the last unit: then bounds judge them."""
    report = q.verify(made.out, source, by_bounds=True)
    assert report.passed, report.failures


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["int4", "nvfp4a16"])
def test_a_gpu_calibrates(recipe, nano, tmp_path):
    options = q.RunOptions(device="cuda")
    done = q.convert(nano, tmp_path / "out", recipe, options, overrides=SETTINGS)
    proven_again(done)
    made = (tmp_path / "out" / "model.safetensors").read_bytes()
    q.convert(nano, tmp_path / "again", recipe, options, overrides=SETTINGS)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == made


@given(row=st.integers(0, 2), column=st.integers(0, 29), bit=st.integers(0, 31))
def test_a_folded_row_changes_with_each_of_its_bits(row, column, bit):
    values = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    other.view(torch.int32)[row, column] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    changed = folded(values) != folded(other)
    assert changed.tolist() == [i == row for i in range(3)]


def test_a_gpu_whose_memory_is_too_small_is_told_what_it_needs():
    said = []
    effort = Effort(1, "cuda", lambda: None, say=said.append)
    with (
        pytest.raises(MissingError, match=r"up to 3\.0 GB of its memory, which it does not have"),
        executor._device_memory(effort, 3 * 10**9),
    ):
        raise torch.OutOfMemoryError
    assert said == ["device cuda: calibration takes up to 3.0 GB of its memory"]


@pytest.mark.gpu
def test_a_gpu_folds_as_the_cpu_does():
    values = torch.randn(3000, 100)
    assert torch.equal(folded(values.cuda()).cpu(), folded(values))


def test_a_gpu_that_is_not_here_is_said_and_nothing_is_run(made, source, tmp_path, monkeypatch):
    path = shutil.copytree(made.out, tmp_path / "out") / "qwen35-receipt.json"
    receipt = json.loads(path.read_text())
    assert receipt["calibration"]["device"] == "cpu"
    receipt["calibration"]["device"] = "NVIDIA H1000"
    path.write_text(json.dumps(receipt))
    monkeypatch.setattr(Layers, "run", None)
    report = q.verify(tmp_path / "out", source)
    assert report.passed, report.failures
    assert report.calibration["why"] == "it was calibrated on NVIDIA H1000, which is not here"
    assert report.calibration["proof"] == "bounds"
