"""The benchmark of four bits scores what it says: weights put back score nothing."""

import json

import pytest
import torch

from benchmarks import fourbit, fourbit_table

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def judge():
    from benchmarks.fourbit_score import Judge

    return Judge(fourbit.NANO, list(range(512)))


def test_a_model_is_no_distance_from_itself(judge):
    figures = judge.score(judge.kept)
    assert (figures["kl"], figures["top1"], figures["tokens"]) == (0, 1, 512)


def test_other_weights_count_and_are_forgotten(judge):
    name = "model.layers.3.mlp.up_proj"
    twice = {name: judge.kept[name] * 1.5}
    figures = judge.score(twice)
    assert figures["kl"] > 1e-5
    assert figures["weight_rms"] == pytest.approx(0.5)
    assert judge.score(judge.kept)["kl"] == 0


def test_experts_are_views_of_their_stack():
    from benchmarks.fourbit_score import linears

    stack = torch.nn.Module()
    stack.gate_up_proj = torch.nn.Parameter(torch.arange(24.0).view(2, 4, 3))
    stack.down_proj = torch.nn.Parameter(torch.zeros(2, 3, 2))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Module()])})
    model.layers[0].experts = stack
    found = linears(torch.nn.ModuleDict({"model": model}))
    up = found["model.layers.0.experts.1.up_proj"]
    assert torch.equal(up, stack.gate_up_proj[1, 2:])
    up.zero_()
    assert not stack.gate_up_proj[1, 2:].any()


def test_the_parts_share_no_calibration(tmp_path):
    first = fourbit.prepare(fourbit.NANO, [fourbit.BUNDLED], "first", tmp_path, "python")
    assert len(first.evaluated) == fourbit.EVALUATED
    assert fourbit.BUNDLED.read_text()[14000:].startswith(first.text.read_text())
    with pytest.raises(ValueError, match="part second has 0 tokens"):
        fourbit.prepare(fourbit.NANO, [fourbit.BUNDLED], "second", tmp_path, "python")


def test_the_table_has_the_last_figures_and_names_what_failed(tmp_path, capsys):
    same = {"part": "first", "scheme": "int4", "method": "nearest", "model": "m"}
    figures = {"kl": 0.01, "kl_se": 0.001, "kl_p999": 0.2, "top1": 0.9, "weight_rms": 0.1}
    found = [
        same | {"tool": "qwen35"} | figures | {"kl": 0.5},
        same | {"tool": "qwen35"} | figures,
        same | {"tool": "auto-round", "failed": "auto-round is not installed"},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    fourbit_table.print_table(path)
    table = capsys.readouterr().out
    assert "| int4 | 4.125 | qwen35, nearest | 0.0100 ± 0.0010 / 0.200 / 90.0 | 10.00 |" in table
    assert "auto-round is not installed" in table
    assert "0.5000" not in table
