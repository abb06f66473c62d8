"""Two processes with one cache are started, and what they say becomes lines."""

from __future__ import annotations

import importlib
import json
import os

import pytest


@pytest.mark.all
def test_what_each_process_had_done_and_when_is_in_a_line(nano, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script, results = importlib.import_module("benchmarks.cold_start"), tmp_path / "results.jsonl"
    options = ["--device", "cpu", "--prompt", "5", "--tokens", "2", "--results", str(results)]
    script.main([str(nano), *options, "--commit", "abc"])
    assert script.STARTED not in os.environ
    cold, warm = [json.loads(line) for line in results.read_text().splitlines()]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    for line in (cold, warm):
        times = [line[name] for name in ("imported", "opened", "loaded", "first", "all")]
        assert 0 < times[0] <= times[-1] == max(times)
        assert times == sorted(times)
        assert (line["model"], line["prompt"], line["kernels"]) == (nano.name, 5, 0)
