"""A receipt that somebody made to do harm: a failure in the report, never an error of ours."""

from __future__ import annotations

import json

import pytest

from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.hostile.case import write_good

DIGEST = {"size": 1, "sha256": "0" * 64}
RECEIPTS = {
    "empty": b"",
    "cut": b'{"output": {"files":',
    "list": b"[]",
    "deep": b"[" * 100_000,
    "nan": b'{"output": NaN}',
    "no-output": b"{}",
    "output-text": b'{"output": "x"}',
    "files-list": b'{"output": {"files": []}}',
    "a-path": json.dumps({"output": {"files": {"../../../etc/passwd": DIGEST}}}).encode(),
    "absolute": json.dumps({"output": {"files": {"/etc/passwd": DIGEST}}}).encode(),
    "long": json.dumps({"output": {"files": {"x" * 5000: DIGEST}}}).encode(),
    "hash-number": b'{"output": {"files": {"config.json": {"sha256": 5}}}}',
    "entry-text": b'{"output": {"files": {"config.json": "x"}}}',
    "wrong": json.dumps({"output": {"files": {"config.json": DIGEST}}}).encode(),
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("receipt")
    write_good(folder / "in")
    api.convert(
        folder / "in",
        folder / "out",
        read_recipe("bf16-split"),
        options=api.RunOptions(verify=False),
    )
    return folder / "out"


@pytest.mark.parametrize("name", RECEIPTS)
def test_a_hostile_receipt_fails_verification(artifact, name):
    (artifact / "qwen35-receipt.json").write_bytes(RECEIPTS[name])
    report = api.verify(artifact)
    assert not report.passed
    assert {failure.tensor for failure in report.failures} <= {"qwen35-receipt.json", "config.json"}
