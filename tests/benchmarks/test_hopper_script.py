"""The script is run whole, in a process of its own: the interpreter must be asked for at start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_tiny_model_is_checked_and_nothing_is_recorded():
    pytest.importorskip("triton")
    results = ROOT / "benchmarks" / "results" / "hopper.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "benchmarks/hopper.py", "--device", "cpu", "--check-only"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--models", "tiny-bf16"], cwd=ROOT, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["passed"]
    assert line["error"] < 1e-5
    assert (results.read_bytes() if results.exists() else None) == before
