"""The script is run whole, in a process of its own: the interpreter must be asked for at start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/kernels.py", "--device", "cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.all
def test_kernels_are_checked_and_timed_and_nothing_is_recorded():
    pytest.importorskip("triton")
    results = ROOT / "benchmarks" / "results" / "kernels.jsonl"
    before = results.read_bytes() if results.exists() else None
    done = run("--only", "rmsnorm", "conv1d_step", "route", "dequant", "gated_delta_step")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert lines[-1] == "all passed"
    assert all(" us " in line for line in lines[1:-1])
    assert before == (results.read_bytes() if results.exists() else None)
