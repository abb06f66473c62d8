"""What a comparison says: order, frontier, figures, and the same ones in JSON, CSV and text."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pytest

from qwen35_convert.comparison.result import COLUMNS
from qwen35_convert.comparison.table import comparison_text
from qwen35_convert.verification.verify import Report
from qwen35_convert.write.receipt import dump_json
from tests.qwen35_convert.comparison.entries import compared, entry, failed, several


def names(comparison, *, frontier=False):
    return [one.name for one in comparison.entries if one.frontier or not frontier]


def test_artifacts_are_in_order_of_size_and_the_frontier_is_what_nothing_as_small_beats():
    found = several()
    assert names(found) == ["int4", "gguf-q4_k_m", "gguf-q8_0", "fp8-block", "bf16-split"]
    assert names(found, frontier=True) == ["int4", "gguf-q4_k_m", "gguf-q8_0", "bf16-split"]


def test_of_two_of_one_size_the_nearer_is_on_the_frontier():
    found = compared(entry("a", 500, 0.2), entry("b", 500, 0.1), entry("c", 600, 0.1))
    assert names(found) == ["b", "a", "c"]
    assert names(found, frontier=True) == ["b"]


def test_what_failed_is_on_no_frontier_and_in_nobodys_way():
    found = compared(failed(entry("a", 500, 0.01)), entry("b", 600, 0.1))
    assert names(found, frontier=True) == ["b"]


@pytest.mark.parametrize("kl", [None, math.nan, math.inf])
def test_what_was_not_measured_is_on_no_frontier(kl):
    found = compared(entry("a", 500, kl), entry("b", 600, 0.1))
    assert names(found, frontier=True) == ["b"]


def test_the_worst_tensors_are_the_quantised_ones_that_lost_most():
    one = entry("a", 500, 0.1)
    kept = {"name": "norm", "role": "norm", "scheme": "keep", "identical": True}
    one = replace(one, report=replace(one.report, tensors=[kept, *one.report.tensors]))
    errors = [line["relative_rms"] for line in one.worst(4)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == max(line.relative_rms or 0 for line in one.report.by_role)


def test_csv_and_json_hold_the_same_figures():
    found = several()
    told = json.loads(dump_json(found.as_dict()))
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert len(rows) == len(told["artifacts"])
    for row, artifact in zip(rows, told["artifacts"], strict=True):
        assert tuple(row) == COLUMNS
        for key, text in row.items():
            value = artifact[key]
            assert text == ("" if value is None else str(value))
    assert told["source"] == {
        "name": "Qwen3.5-nano", "bytes": 2200, "model_bytes": 2000, "weights": 1000,
        "bits_per_weight": 16.0,
    }  # fmt: skip
    assert told["text"] == {"name": "the bundled text", "sha256": "ab" * 32}
    first = told["artifacts"][0]
    assert first["bits_per_weight"] == 4.8
    assert first["ppl_ratio"] == pytest.approx(1.016)
    assert len(first["layers"]) == 4
    assert len(first["worst"]) == 10


def test_a_figure_that_is_no_number_is_null_in_json():
    told = json.loads(dump_json(compared(entry("a", 500, math.nan)).as_dict()))
    assert told["artifacts"][0]["kl_mean"] is None


def test_one_that_failed_fails_the_comparison():
    found = compared(entry("a", 500, 0.1), failed(entry("b", 600, 0.01)))
    assert not found.passed
    assert several().passed
    text = comparison_text(found)
    assert "FAILED: b: layers.0.up: differs" in text


def test_the_text_marks_the_frontier_and_says_what_was_measured():
    lines = comparison_text(several()).splitlines()
    marks = {line[2:].split()[0]: line[0] for line in lines[1:6]}
    assert marks == {
        "int4": "*", "gguf-q4_k_m": "*", "gguf-q8_0": "*", "fp8-block": " ", "bf16-split": "*",
    }  # fmt: skip
    assert lines[0].split()[:4] == ["artifact", "size", "bits", "mean"]
    assert "4096 tokens of the bundled text" in lines[7]
    assert max(map(len, lines)) <= 100


def test_an_artifact_calibrated_on_the_text_is_named():
    one = replace(entry("a", 500, 0.1), calibrated=True)
    assert "note: a was calibrated on this same text" in comparison_text(compared(one))


def test_nothing_measured_is_told_by_dashes():
    empty = replace(entry("a", 500, 0.1), report=Report("structure", {}, [], {}, [], None))
    line = comparison_text(compared(empty)).splitlines()[1]
    assert line.split()[3:] == ["0.00", *["-"] * 6]
