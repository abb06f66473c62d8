"""What a receipt says of itself follows from recipe and source, or is measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.verification.claims import logits_claims, summary_claims
from qwen35_convert.verification.receipts import Receipt, _parse
from qwen35_convert.write.verdict import Verdict
from tests.checkpoints import dense, hub_config, make_weights, write_checkpoint

RECEIPT = "qwen35-receipt.json"
MEASURED = {
    "kl_mean": 0.01, "kl_p999": 0.2, "top1": 0.97, "ppl_source": 8.0, "ppl_artifact": 8.1,
    "tokens": 512,
}  # fmt: skip
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("claims")
    config = hub_config()
    source = write_checkpoint(folder / "in", config, make_weights(config))
    api.convert(source, folder / "out", read_recipe("fp8-block"))
    return source, folder / "out"


@pytest.fixture
def forged(converted, tmp_path) -> Callable[[Change], list[str]]:
    """Verify at level structure, or as told, what has a changed receipt."""
    source, out = converted

    def verify(change: Change, level: str = "structure") -> list[str]:
        receipt = json.loads((out / RECEIPT).read_text())
        change(receipt)
        copy = tmp_path / "out"
        copy.mkdir()
        for path in out.iterdir():
            (copy / path.name).hardlink_to(path)
        (copy / RECEIPT).unlink()
        (copy / RECEIPT).write_text(json.dumps(receipt))
        return [f"{f.tensor} {f.problem}" for f in api.verify(copy, source, level=level).failures]

    return verify


def read(converted: tuple[Path, Path]) -> Receipt:
    return _parse(converted[1] / RECEIPT)


@pytest.mark.parametrize("level", ["structure", "tensors"])
def test_a_receipt_as_it_is_passes(forged, level):
    assert forged(lambda _: None, level) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.update(dropped={}), "dropped.vision is absent, expected 21"),
        (lambda r: r["output"]["files"].pop("config.json"), "does not list config.json, which its"),
        (
            lambda r: r["output"]["files"].update({"x.json": {"size": 1, "sha256": "0"}}),
            "lists x.json, which its recipe does not make",
        ),
        (lambda r: r["source"]["files"].pop("config.json"), "does not list config.json, a file of"),
        (lambda r: r["verdict"].update(level="logits"), "verdict.level is logits, but its recipe"),
        (
            lambda r: r["verdict"].update(level=[]),
            "verdict.level is [], but its recipe is verified",
        ),
        (lambda r: r["verdict"].update(failures=[{}]), "verdict.passed is True, but verdict.fail"),
    ],
)
def test_what_the_recipe_does_not_make_is_named_by_its_field(forged, change, said):
    (found,) = forged(change)
    assert found.startswith(f"{RECEIPT} {said}")


def test_a_verdict_that_did_not_pass_is_named_though_it_lists_no_failures(forged):
    contradiction, failed = forged(lambda r: r["verdict"].update(passed=False))
    assert contradiction.startswith(f"{RECEIPT} verdict.passed is False, but verdict.failures are")
    assert "says that the artifact failed at level tensors" in failed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["errors"]["fp8-block"].update(relative_rms=0.02), "fp8-block.relative_rms is"),
        (lambda r: r["errors"]["fp8-block"].update(saturated=7), "errors.fp8-block.saturated is 7"),
        (lambda r: r["errors"].pop("keep"), "errors.keep is absent, expected"),
        (lambda r: r.update(errors=None), "errors is null, expected"),
        (lambda r: r.update(verdict=None), "expected null"),
    ],
)
def test_errors_that_were_not_measured_are_named(forged, change, said):
    (found,) = forged(change, "tensors")
    assert said in found


def test_the_last_of_six_digits_may_be_rounded_otherwise(converted):
    receipt = read(converted)
    schemes = json.loads(json.dumps(receipt.errors))
    schemes["fp8-block"]["relative_rms"] *= 1 + 1e-6
    assert list(summary_claims(receipt, schemes)) == []


def test_a_conversion_that_was_not_verified_claims_no_errors(tmp_path):
    source = dense(tmp_path / "in")
    options = api.RunOptions(verify=False)
    api.convert(source, tmp_path / "out", read_recipe("fp8-block"), options=options)
    assert api.verify(tmp_path / "out", source).failures == []


def test_a_source_without_weights_is_no_receipt(forged):
    def lose(receipt: dict[str, Any]) -> None:
        files = receipt["source"]["files"]
        for name in [name for name in files if name.endswith(".safetensors")]:
            del files[name]

    (found,) = forged(lose)
    assert "lists no file of the source that has weights" in found


def test_a_verdict_that_is_no_object_is_no_receipt(converted, tmp_path):
    raw = json.loads((converted[1] / RECEIPT).read_text()) | {"verdict": []}
    (tmp_path / RECEIPT).write_text(json.dumps(raw))
    with pytest.raises(FormatError, match="verdict is not an object"):
        _parse(tmp_path / RECEIPT)


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ({}, None),
        ({"text_sha256": "another"}, None),
        ({"kl_mean": 0.0103, "top1": 0.965}, None),
        ({"kl_mean": 0.02}, "verdict.measured.kl_mean is 0.01, expected 0.02"),
        ({"top1": 0.5}, "verdict.measured.top1 is 0.97, expected 0.5"),
        ({"tokens": 511}, "verdict.measured.tokens is 512, expected 511"),
    ],
)
def test_predictions_that_are_not_those_measured_again_are_named(converted, again, said):
    receipt = read(converted)
    verdict = {**receipt.verdict.values, "text_sha256": "text", "measured": MEASURED}
    claimed = replace(receipt, verdict=Verdict(verdict))
    found = list(logits_claims(claimed, MEASURED | {"text_sha256": "text"} | again))
    assert [failure.problem for failure in found] == ([said] if said else [])
