"""Points of two engines become lines; an engine that fails does not stop the others."""

from __future__ import annotations

import importlib
import json

import pytest


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_both_times_are_in_a_line(nano, tmp_path, capsys):
    script, results = importlib.import_module("benchmarks.beside"), tmp_path / "results.jsonl"
    options = ["--peer", "transformers", "--device", "cpu", "--results", str(results)]
    options += ["--batch", "2", "--prefill", "16", "--context", "12", "--commit", "abc"]
    assert script.main([str(nano), *options]) == 0
    decode, prefill = [json.loads(line) for line in results.read_text().splitlines()]
    assert (decode["what"], decode["batch"], decode["context"]) == ("decode", 2, 12)
    assert (prefill["what"], prefill["tokens"], prefill["model"]) == ("prefill", 16, nano.name)
    assert decode["ms"] > 0 < decode["peer_ms"]
    assert "transformers" in decode["versions"]


def test_an_engine_that_fails_is_told(nano, tmp_path, capsys, monkeypatch):
    script, results = importlib.import_module("benchmarks.beside"), tmp_path / "results.jsonl"
    monkeypatch.setattr("qwen35_convert.benchmarking.peers.find_spec", lambda _: None)
    assert script.main([str(nano), "--device", "cpu", "--results", str(results)]) == 1
    assert "is not installed" in capsys.readouterr().err
    assert not results.exists()
