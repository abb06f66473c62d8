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
