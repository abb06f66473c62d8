"""Proof of an artifact: reopen what lies there, and hold it against what it should be.

structure   headers, config and side files
tensors     also every byte: made again from the source, or judged by its scheme; hashes
logits      also the predictions on real text against the source's

A level includes those above it; a stated threshold raises it to logits (`levels`). With a receipt
of our own and its source at hand the artifact is made again and compared to the byte. Without, each
container and scheme says what a right one may be. What is checked is a table (`table`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from formats.checkpoint import Checkpoint
from quant.stored import scheme_of
from qwen35_convert.failure import Failure
from qwen35_convert.levels import LEVELS
from qwen35_convert.verification.compare import Compared, by_scheme
from qwen35_convert.verification.figures import NOTHING, RoleError, Size, by_role
from qwen35_convert.verification.levels import need_source
from qwen35_convert.verification.proof import Checks, Proof
from qwen35_convert.verification.table import CHECKS
from qwen35_convert.write.digests import Digests

OPENING = "opening"  # what is wrong before the first check, such as a receipt that is not JSON


@dataclass(frozen=True, slots=True)
class Report:
    """What verification found. `passed` is false if anything at all is wrong.

    raised       why the level is not the one asked for
    checks       what each check that ran found, by its id
    calibration  how calibrated weights were proven; None: there are none
    cache        how the scales of an FP8 cache were proven; None: there are none
    notes        what is right, but not as an engine takes it
    size         how large the artifact is, source_size its source; None: there is none
    by_role      the error by layer and role
    """

    level: str
    structure: dict[str, Any]
    tensors: list[dict[str, Any]]
    schemes: dict[str, dict[str, Any]]
    failures: list[Failure]
    against: str | None
    logits: dict[str, Any] | None = None
    raised: str | None = None
    calibration: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    checks: dict[str, list[Failure]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    size: Size = NOTHING
    source_size: Size | None = None
    by_role: list[RoleError] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `verify --json` prints it."""
        return {
            "passed": self.passed,
            "level": self.level,
            "raised": self.raised,
            "against": self.against,
            "checks": {check: len(failures) for check, failures in self.checks.items()},
            "structure": self.structure,
            "size": self.size.as_dict(),
            "source_size": self.source_size.as_dict() if self.source_size else None,
            "schemes": self.schemes,
            "calibration": self.calibration,
            "cache": self.cache,
            "tensors": self.tensors,
            "by_role": [one.as_dict() for one in self.by_role],
            "logits": self.logits,
            "failures": [failure.as_dict() for failure in self.failures],
            "notes": self.notes,
        }


def verify(opened: Checkpoint, source: Checkpoint | None, checks: Checks) -> Report:
    """Verify an opened artifact, against its source if that is given.

    RecipeError if the level needs a source and none is given.
    """
    level = checks.effective
    need_source(level, given=source is not None)
    with Digests(checks.workers, checks.hashes) as digests:
        proof = Proof.of(opened, source, checks, digests)
        by_check = {OPENING: list(proof.failures)} | _run_checks(proof)
    proof.failures = [failure for failures in by_check.values() for failure in failures]
    return Report(
        level=level.name,
        structure=_structure(opened),
        tensors=[_line(c) for c in proof.compared],
        schemes=by_scheme(proof.compared),
        failures=list(dict.fromkeys(proof.failures)),
        against=str(source.folder) if source else None,
        size=Size.of(opened),
        source_size=Size.of(source) if source else None,
        by_role=by_role(proof.compared),
        logits=proof.logits,
        raised=level.raised,
        calibration=proof.calibration,
        cache=proof.cache,
        checks=by_check,
        notes=proof.notes,
    )


def _run_checks(proof: Proof) -> dict[str, list[Failure]]:
    """Return what each check of the level found, in the order of the table."""
    reached, by_check = LEVELS.index(proof.checks.effective.name), {}
    for check in sorted(CHECKS, key=lambda check: check.waits):
        if LEVELS.index(check.level) <= reached and check.applies(proof):
            by_check[check.id] = list(dict.fromkeys(check.run(proof)))
    return {check.id: by_check[check.id] for check in CHECKS if check.id in by_check}


def _structure(artifact: Checkpoint) -> dict[str, Any]:
    atoms = artifact.layout.atoms.values()
    return {
        "layout": artifact.layout.kind,
        "tensors": len(artifact.where),
        "bytes": sum(info.nbytes for info in artifact.infos().values()),
        "dtypes": dict(Counter(info.dtype for info in artifact.infos().values())),
        "schemes": dict(Counter(atom.scheme for atom in atoms)),
        "weights": _weights(artifact),
        "unproven": sorted({atom.scheme for atom in atoms if not scheme_of(atom).bounded}),
        "mtp_layers": artifact.layout.form.mtp_layers,
        "tied": artifact.layout.tied,
        "notes": artifact.layout.notes,
    }


def _weights(artifact: Checkpoint) -> dict[str, int]:
    """Return how many weights are stored in each scheme."""
    counts: Counter[str] = Counter()
    for atom in artifact.layout.atoms.values():
        counts[atom.scheme] += prod(atom.shape)
    return dict(counts)


def _line(compared: Compared) -> dict[str, Any]:
    line: dict[str, Any] = {
        "name": compared.name,
        "stored": compared.stored,
        "role": compared.role,
        "scheme": compared.scheme,
    }
    if compared.unproven:
        line["unproven"] = True
    if not compared.error.count:
        return line | {"identical": not compared.faults}
    return line | compared.error.as_dict()
