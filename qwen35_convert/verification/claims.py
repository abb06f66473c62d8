"""What a receipt says beyond the hashes of files, held against what is found.

It lists every file that its recipe makes, and every file of the source that was read; it counts
what was dropped, sums up the errors by scheme, and holds the verdict. Each follows from recipe and
source, or is measured again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from formats.checkpoint import Checkpoint
from formats.safetensors.folder import DOCUMENTS
from qwen35_convert.difference import differences, first, same
from qwen35_convert.failure import Failure
from qwen35_convert.levels import LEVELS
from qwen35_convert.planning.plan import Plan
from qwen35_convert.verification.levels import effective_level
from qwen35_convert.verification.logits import MEASURED, LogitsCheck
from qwen35_convert.verification.receipts import Receipt
from qwen35_convert.write.receipt import dump_json

# Sums of float32 lanes: six digits are written, and other machines may round the last.
SUMMED = 1e-5
# Predictions of another machine: sums in another order, a token that was nearly the other one.
PREDICTED, NEAR_ZERO = 0.1, 1e-4


def plan_claims(receipt: Receipt, plan: Plan, source: Checkpoint) -> Iterator[Failure]:
    """Yield what the receipt says that its recipe does not make of the source."""
    made = {*(shard.name for shard in plan.shards), *plan.files}
    for name in sorted(receipt.output.keys() - made - {*DOCUMENTS}):
        yield receipt.failure(f"lists {name}, which its recipe does not make")
    for name in sorted(made - receipt.output.keys() - {*DOCUMENTS}):
        yield receipt.failure(f"does not list {name}, which its recipe makes")
    read = {source.name_of(path) for path in plan.read_files(source)} - {*DOCUMENTS}
    for name in sorted(read - receipt.source.keys()):
        yield receipt.failure(f"does not list {name}, a file of the source")
    for sentence in first(differences(receipt.dropped, plan.dropped, "dropped")):
        yield receipt.failure(sentence)
    for sentence in _verdict(receipt):
        yield receipt.failure(sentence)


def _verdict(receipt: Receipt) -> Iterator[str]:
    """Yield in what a verdict contradicts itself or the recipe."""
    verdict = receipt.verdict
    if verdict is None:
        return
    gate, level = receipt.recipe.verify, verdict.level
    check = LogitsCheck(gate.text, gate.max_kl, gate.min_top1)
    expected = effective_level(gate.level, check).name
    if level != expected:
        yield f"verdict.level is {level}, but its recipe is verified at {expected}"
    if verdict.contradiction:
        yield verdict.contradiction


def failed_verdict(receipt: Receipt, level: str) -> Iterator[Failure]:
    """Yield a verdict that failed at a level which is not measured again at this one."""
    verdict, higher = receipt.verdict, LEVELS[LEVELS.index(level) + 1 :]
    if verdict is not None and verdict.failed and verdict.level in higher:
        why = f": {verdict.why}" if verdict.why else ""
        yield receipt.failure(
            f"says that the artifact failed at level {verdict.level}{why}; "
            f"--level {verdict.level} measures it again"
        )


def summary_claims(receipt: Receipt, schemes: Mapping[str, Any]) -> Iterator[Failure]:
    """Yield errors that are not those measured again; a conversion may have measured none."""
    expected = None if receipt.verdict is None else json.loads(dump_json(schemes))
    if receipt.verdict and receipt.verdict.level == "structure":
        expected = {}
    for sentence in first(differences(receipt.errors, expected, "errors", _summed)):
        yield receipt.failure(sentence)


def logits_claims(receipt: Receipt, logits: Mapping[str, Any]) -> Iterator[Failure]:
    """Yield measured predictions that are not those measured again, on the same text."""
    verdict = receipt.verdict.values if receipt.verdict else {}
    if verdict.get("text_sha256") != logits["text_sha256"]:
        return
    expected = {key: logits[key] for key in MEASURED}
    for sentence in differences(verdict.get("measured"), expected, "verdict.measured", _predicted):
        yield receipt.failure(sentence)


def _summed(got: Any, expected: Any) -> bool:
    reals = isinstance(got, float) and isinstance(expected, float)
    return isclose(got, expected, rel_tol=SUMMED) if reals else same(got, expected)


def _predicted(got: Any, expected: Any) -> bool:
    reals = isinstance(got, float) and isinstance(expected, float)
    near = reals and isclose(got, expected, rel_tol=PREDICTED, abs_tol=NEAR_ZERO)
    return near or same(got, expected)
