"""The checks of a proof, one row each, in the order in which they run.

A check belongs to the lowest level at which what it catches is visible. It looks at a proof and
yields failures; `needs` says without what it has nothing to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qwen35_convert.containers.registry import container_of
from qwen35_convert.failure import Failure
from qwen35_convert.planning.calibrated import calibrated_names
from qwen35_convert.run.threads import each, one_torch_thread
from qwen35_convert.verification.cache_scales import cache_failures
from qwen35_convert.verification.claims import (
    failed_verdict,
    logits_claims,
    plan_claims,
    summary_claims,
)
from qwen35_convert.verification.compare import (
    Compared,
    by_scheme,
    compare_atom,
    missing_atoms,
)
from qwen35_convert.verification.defects import defects, not_made_again
from qwen35_convert.verification.diagnose import explain
from qwen35_convert.verification.files import file_failures
from qwen35_convert.verification.flushed import find_flushed
from qwen35_convert.verification.kept_types import type_failures
from qwen35_convert.verification.logits import check_logits
from qwen35_convert.verification.odd_ones import with_odd_ones
from qwen35_convert.verification.proof import Proof
from qwen35_convert.verification.recalibrate import Recalibration
from qwen35_convert.verification.receipts import output_failures, source_failures
from qwen35_convert.verification.reencode import Again


@dataclass(frozen=True, slots=True)
class Check:
    """One row.

    planted  the test that plants what this check catches
    needs    attributes of the proof that must be there
    lacks    attributes that must not: another check knows better
    waits    for what is computed beside the other checks: it runs after them
    """

    id: str
    level: str
    catches: str
    run: Callable[[Proof], Iterator[Failure]]
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    waits: bool = False
    planted: str = "tests/planted/test_planted.py"

    def applies(self, proof: Proof) -> bool:
        """Whether there is anything to look at."""
        there = all(getattr(proof, name) is not None for name in self.needs)
        return there and all(getattr(proof, name) is None for name in self.lacks)

    def as_dict(self) -> dict[str, str]:
        """Return what `verify --list-checks --json` prints of it."""
        return {
            "id": self.id, "level": self.level, "catches": self.catches, "planted": self.planted,
        }  # fmt: skip


def _census(proof: Proof) -> Iterator[Failure]:
    if proof.only is not None:
        return
    for problem in proof.artifact.layout.problems:
        yield Failure(problem.tensor, problem.problem)
    yield from container_of(proof.artifact).census(proof.artifact)


def _files(proof: Proof) -> Iterator[Failure]:
    assert proof.expected is not None, "it is needed"
    yield from file_failures(proof.expected, proof.artifact)


def _config(proof: Proof) -> Iterator[Failure]:
    assert proof.source is not None, "it is needed"
    yield from container_of(proof.artifact).config_differences(proof.artifact, proof.source)


def _coverage(proof: Proof) -> Iterator[Failure]:
    assert proof.source is not None, "it is needed"
    yield from missing_atoms(proof.artifact, proof.source, proof.only or "*")
    yield from type_failures(proof.artifact, proof.source)


def _claims(proof: Proof) -> Iterator[Failure]:
    assert proof.receipt is not None, "it is needed"
    assert proof.expected is not None, "it is needed"
    assert proof.source is not None, "it is needed"
    yield from plan_claims(proof.receipt, proof.expected, proof.source)


def _failed_before(proof: Proof) -> Iterator[Failure]:
    assert proof.receipt is not None, "it is needed"
    yield from failed_verdict(proof.receipt, proof.checks.effective.name)


def _outputs(proof: Proof) -> Iterator[Failure]:
    assert proof.receipt is not None, "it is needed"
    yield from output_failures(proof.receipt, proof.artifact, proof.digests)


def _sources(proof: Proof) -> Iterator[Failure]:
    assert proof.receipt is not None, "it is needed"
    assert proof.source is not None, "it is needed"
    if proof.receipt.names(proof.source):
        yield from source_failures(proof.receipt, proof.source, proof.digests)


def _small_scales(proof: Proof) -> Iterator[Failure]:
    """Name what Marlin loses."""
    failures, proof.notes = find_flushed(proof.artifact, not_made_again(proof))
    yield from failures


def _beside(proof: Proof) -> Iterator[Failure]:
    yield from container_of(proof.artifact).beside(proof.artifact, proof.source)


def _values_beside(proof: Proof) -> Iterator[Failure]:
    yield from container_of(proof.artifact).values_beside(proof.artifact, proof.source)


def _again(proof: Proof) -> Iterator[Failure]:
    assert proof.expected is not None, "it is needed"
    assert proof.source is not None, "it is needed"
    checks = proof.checks
    again = Again(proof.expected, proof.source, proof.artifact, checks.workers, checks.progress)
    calibrated = calibrated_names(proof.expected.items, proof.expected.recipe)
    proof.compared = again.run(calibrated)
    if calibrated:
        claimed = proof.receipt.calibration if proof.receipt else checks.calibration
        trial = Recalibration(again, claimed or {}, proof.texts, checks.by_bounds, proof.no_text)
        proof.compared += trial.run()
        proof.calibration = trial.told()
    yield from explain(proof.artifact, proof.source, proof.compared)


def _summary(proof: Proof) -> Iterator[Failure]:
    assert proof.receipt is not None, "it is needed"
    assert proof.expected is not None, "it is needed"
    if len(proof.compared) == len(proof.expected.items):
        yield from summary_claims(proof.receipt, by_scheme(proof.compared))


def _values(proof: Proof) -> Iterator[Failure]:
    artifact, source, checks = proof.artifact, proof.source, proof.checks
    assert source is not None, "it is needed"
    names = [name for name in artifact.layout.atoms if name in source.layout.atoms]

    def one(name: str) -> Compared:
        result = compare_atom(artifact, source, name, proof.importance.get(name))
        checks.progress(name)
        return result

    # in the order of the source
    order = sorted(names, key=lambda name: source.position(source.layout.atoms[name].stored))
    with one_torch_thread():
        by_name = dict(zip(order, each(one, order, checks.workers), strict=True))
    proof.compared = with_odd_ones([by_name[name] for name in names])
    yield from explain(artifact, source, proof.compared)


def _logits(proof: Proof) -> Iterator[Failure]:
    source, checks = proof.source, proof.checks
    assert source is not None, "it is needed"
    if proof.artifact.layout.problems:
        yield Failure("logits", "were not measured: the artifact has problems")
        return
    proof.logits, shortfalls = check_logits(proof.artifact, source, checks.logits, checks.progress)
    yield from shortfalls
    if proof.receipt is not None and proof.expected is not None:
        yield from logits_claims(proof.receipt, proof.logits)


CHECKS = (
    Check("census", "structure", "headers and config that contradict each other or an engine's "
          "rules: lists, parts, roles, groups, classes", _census),
    Check("files", "structure", "a file, header, key or field that differs from what the recipe "
          "makes of the source", _files, needs=("expected", "source")),
    Check("config", "structure", "fields and keys that engines obey and that differ from those of "
          "the source", _config, needs=("source",), lacks=("expected",)),
    Check("beside", "structure", "a vision file whose keys or tensors contradict each other, or "
          "differ from the source's; without a source, side files that no engine loads, and fields "
          "of config.json that disagree", _beside, lacks=("expected",)),
    Check("coverage", "structure", "tensors that only one side has", _coverage,
          needs=("source",)),
    Check("claims", "structure", "files, dropped tensors or a verdict in the receipt that differ "
          "from what its recipe gives", _claims, needs=("receipt", "expected", "source")),
    Check("verdict", "structure", "an artifact that failed the verification of its conversion at a "
          "level that is not measured now", _failed_before, needs=("receipt",),
          planted="tests/qwen35_convert/write/test_failed.py"),
    Check("receipt", "tensors", "files that differ from the receipt, files it does not list",
          _outputs, needs=("receipt",), waits=True),
    Check("source", "tensors", "a source that is not the one the artifact was made from",
          _sources, needs=("receipt", "source"), waits=True),
    Check("bytes", "tensors", "a byte of a tensor that differs from what the recipe makes of it",
          _again, needs=("expected", "source")),
    Check("summary", "tensors", "errors in the receipt that differ from those measured now",
          _summary, needs=("receipt", "expected", "source")),
    Check("values", "tensors", "values that no correct encoder of the scheme makes of the source",
          _values, needs=("source",), lacks=("expected",)),
    Check("defects", "tensors", "values, scales and codes that are not finite, shapes that are not "
          "the weight's", defects),
    Check("cache", "tensors", "scales of an FP8 cache that differ from the recipe's text, or "
          "at which keys or values saturate or vanish", cache_failures),
    Check("flushed", "tensors", "scales of groups so small that Marlin computes with weights of 0",
          _small_scales, planted="tests/qwen35_convert/verification/test_flushed.py"),
    Check("vision", "tensors", "values of a vision file that are not finite, or not the source's",
          _values_beside, lacks=("expected",)),
    Check("logits", "logits", "predictions that differ from the source's", _logits,
          needs=("source",)),
)  # fmt: skip
