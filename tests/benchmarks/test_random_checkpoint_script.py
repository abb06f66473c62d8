"""Artifacts of random weights are whole: engines load them, and compute with numbers."""

from __future__ import annotations

import importlib

import pytest
import torch

import qwen35_convert as q
from qwen35_convert.containers.registry import open_checkpoint
from runtime.load import load_model
from runtime.serve.engine import generate


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("tiny", "keep"),
        ("tiny-moe", "fp8-block"),
        pytest.param("tiny", "fp8-block", marks=pytest.mark.all),
        pytest.param("tiny-moe", "keep", marks=pytest.mark.all),
    ],
)
def test_random_weights_are_an_artifact(name, scheme, tmp_path):
    plan = importlib.import_module("benchmarks.random_checkpoint").write_random(
        tmp_path / "out", name, scheme
    )
    inspection = q.inspect(tmp_path / "out")
    assert inspection.problems == []
    (vllm,) = (one for one in inspection.serving["engines"] if one["engine"] == "vllm")
    assert vllm["loads"]
    files = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert files == [shard.nbytes for shard in plan.shards]
    model = load_model(open_checkpoint(tmp_path / "out"), "cpu", torch.float32)
    tokens = list(generate(model, [1, 2, 3], 8))
    assert len(set(tokens)) > 1


def test_no_expert_equals_another(tmp_path):
    importlib.import_module("benchmarks.random_checkpoint").write_random(
        tmp_path / "out", "tiny-moe", "keep"
    )
    source = open_checkpoint(tmp_path / "out")
    names = [name for name in source.infos() if "experts." in name and "down_proj" in name]
    stored = {
        source.read(name).flatten()[:64].view(torch.int16).numpy().tobytes() for name in names
    }
    assert len(stored) == len(names) > 4
