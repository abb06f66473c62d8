from __future__ import annotations

import json

import pytest


def test_every_way_gives_a_line(capsys):
    pytest.importorskip("triton")
    from benchmarks.decode_loop import main

    arguments = ["--device", "cpu", "--models", "tiny-bf16", "--tokens", "12", "--batches", "1"]
    assert main([*arguments, "--commit", "none"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    ways = ["greedy", "greedy drafted", "sampled", "sampled drafted"]
    assert [line["way"] for line in lines] == ways
    assert [line.get("same") for line in lines] == [None, 12, None, 12]
    assert all(line["ms"] > 0 < line["step_ms"] for line in lines)
