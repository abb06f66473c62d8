from __future__ import annotations

import json

import pytest

from qwen35_convert.text.tokens import DEFAULT_TEXT
from tests.runtime.models import NANO


def test_every_way_gives_a_line(capsys):
    pytest.importorskip("triton")
    from benchmarks.decode_loop import main

    arguments = ["--device", "cpu", "--models", "tiny-bf16", "--tokens", "12", "--batches", "1"]
    assert main([*arguments, "--commit", "none"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    ways = [(way, drafts) for way in ("greedy", "sampled") for drafts in (None, 1, 2, 3)]
    assert [(line["way"], line.get("drafts")) for line in lines] == ways
    assert [line.get("same") for line in lines] == [None, 12, 12, 12] * 2
    assert all(line["ms"] > 0 < line["step_ms"] for line in lines)


@pytest.mark.all
def test_a_trained_model_goes_on_from_a_text(tmp_path, capsys):
    pytest.importorskip("triton")
    from benchmarks.decode_loop import main

    (tmp_path / "text.txt").write_text(DEFAULT_TEXT.read_text(encoding="utf-8")[:4000])
    told = ["--trained", str(NANO), "--text", str(tmp_path / "text.txt"), "--prompts", "2"]
    where = ["--device", "cpu", "--results", str(tmp_path / "lines"), "--commit", "none"]
    assert main([*told, *where, "--tokens", "30"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["drafts"] for line in lines] == [0, 1, 2, 3] * 2
    drafted = [line for line in lines if line["drafts"]]
    assert all(line["same"] == 1 and line["faster"] > 0 for line in drafted)
    assert all(0 < line["accepted"] < 1 < line["per_step"] for line in drafted)
