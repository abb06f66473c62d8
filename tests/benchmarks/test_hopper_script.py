"""The script is run whole, in a process of its own: the interpreter must be asked for at start."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime.kernels import dispatch
from runtime.kernels.cases import (
    FLOAT,
    FP8_BLOCK,
    NVFP4,
    ChosenExperts,
    CodesProduct,
    Gated,
    Prompt,
)
from runtime.kernels.delta_rule import halves

ROOT = Path(__file__).parents[2]


@pytest.mark.all
def test_a_tiny_model_is_checked_and_nothing_is_recorded():
    pytest.importorskip("triton")
    results = ROOT / "benchmarks" / "results" / "hopper.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "benchmarks/hopper.py", "--device", "cpu", "--check-only"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--models", "tiny-bf16"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["passed"]
    assert line["error"] < 1e-5
    assert (results.read_bytes() if results.exists() else None) == before


def cases(rows, each):
    """Yield operations and cases of a prompt, in sizes of 0.8B, 27B and 35B-A3B, on a Hopper."""
    bf16, gpu = torch.bfloat16, True
    compiled, gluon, dynamic = gpu, gpu, gpu
    yield dispatch.PROMPTS, Prompt(gpu, compiled, bf16, gluon, 256, 8, each)
    codes = CodesProduct((9, 0), rows, bf16, FP8_BLOCK, torch.float32, 5120, 6144, gluon)
    yield dispatch.CODES_PRODUCT, codes
    yield dispatch.GATED, Gated(gpu, rows, 1024, bf16, FLOAT, 7168, gluon)
    yield dispatch.EXPERTS, ChosenExperts(gpu, rows, FP8_BLOCK, dynamic, 2048, 512, gluon)
    yield dispatch.EXPERTS, ChosenExperts(gpu, rows, NVFP4, not dynamic, 2048, 512, gluon)


def test_the_check_reaches_the_kernels_of_long_prompts():
    check, chosen = importlib.import_module("benchmarks.hopper_check"), set()
    for sequences, tokens in check.PROMPTS:
        found = cases(sequences * tokens, tokens)
        chosen |= {operation.choose(case).kernel for operation, case in found}
    assert chosen == {
        "attention.prefill.launch_prefill",
        "attention.roles.roles_prefill",
        "linear.rows.coded_rows",
        "linear.roles.roles_linear",
        "linear.product.scaled_mm",
        "linear.rows_gated.rows_gated",
        "linear.roles_gated.roles_gated",
        "moe.w8a8.w8a8_pairs",
        "moe.roles.roles_pairs",
        "moe.packed.packed_tiles",
        "moe.packed.unpacked_pairs",
    }
    sequences, tokens = check.PROMPTS[-1]
    heads = torch.empty(tokens, 16, 128, device="meta")
    assert halves.fits(heads, heads, torch.empty(sequences, device="meta"), 64)


def test_the_rule_is_timed_while_others_wait(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    rule = importlib.import_module("benchmarks.hopper_rule")
    lock = tmp_path / "lock"

    def held(*_):
        with lock.open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return {"ms": 1.0}

    for name, stand_in in (
        ("prefill_error", lambda heads: 0.0),
        ("step_error", lambda heads: 0.0),
        ("prefill", held),
        ("step", held),
    ):
        monkeypatch.setattr(rule, name, stand_in)
    options = SimpleNamespace(only=["gdn_prefill", "gdn_decode"], check_only=False, lock=lock)
    check, *lines = rule.measure_rule("27B-fp8", None, options)
    assert check["passed"]
    assert [line["ms"] for line in lines] == [1.0] * (len(rule.PROMPTS) + len(rule.BATCHES))
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
