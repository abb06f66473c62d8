"""A planted fault, and what `verify` has to say of it.

Every fault is tried in two ways: without the receipt, as if another tool had made the artifact, and
with a receipt whose hashes were forged to match. What only the receipt can show (a right artifact,
but not the one that the recipe makes) is tried with the forged one alone; what an artifact says
against itself, alone: without the receipt and without a source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from formats.errors import Qwen35Error
from qwen35_convert import api
from tests.planted.artifact import Artifact, Base, Workshop

REMOVED, FORGED, AS_IT_IS, ALONE = "removed", "forged", "as it is", "alone"
BOTH = (REMOVED, FORGED)
STRUCTURE, TENSORS = "structure", "tensors"
NAMED, UNOPENED = (1,), (1, 3)
CRASHED = -1
CRASHES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
)
ONE_WORKER = api.RunOptions(workers=1)
Names = str | tuple[str, ...]
Where = Callable[[Base], bool]


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of an artifact.

    plant   changes it; returns what a failure must name: every string, or of "a|b" one
    where   the bases it applies to
    level   the lowest at which it is visible
    codes   exit codes that are right; 3 where the artifact cannot even be opened
    """

    kind: str
    name: str
    plant: Callable[[Artifact], Names]
    where: Where
    level: str = TENSORS
    codes: tuple[int, ...] = NAMED
    receipts: tuple[str, ...] = BOTH


@dataclass(frozen=True, slots=True)
class Case:
    """A fault in one base, with one kind of receipt."""

    fault: Fault
    base: Base
    receipt: str

    @property
    def id(self) -> str:
        """How tests and tables name it."""
        return f"{self.fault.kind}-{self.fault.name}-{self.base.id}-{self.receipt}".replace(
            " ", "-"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the command would exit with (-1: a traceback), and what it would print."""

    code: int
    text: str

    def names(self, wanted: tuple[str, ...]) -> bool:
        """Whether every string, or one of its alternatives, is in the text."""
        return all(any(part in self.text for part in name.split("|")) for name in wanted)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case; `wanted` is what had to be named."""

    case: Case
    outcome: Outcome
    wanted: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Return "named", or what is wrong instead."""
        if self.outcome.code == 0:
            return "passes"
        if self.outcome.code == CRASHED:
            return "crashes"
        if self.outcome.code not in self.case.fault.codes:
            return f"exit code {self.outcome.code}"
        return "named" if self.outcome.names(self.wanted) else "not named"


def verify(path: Path, source: Path | None, level: str = TENSORS) -> Outcome:
    """Verify in this process; return the exit code of the command and its messages."""
    try:
        report = api.verify(path, source, level=level, options=ONE_WORKER)
    except Qwen35Error as error:
        return Outcome(error.exit_code, str(error))
    except CRASHES as error:
        return Outcome(CRASHED, f"{type(error).__name__}: {error}")
    text = "\n".join(f"{failure.tensor} {failure.problem}" for failure in report.failures)
    return Outcome(0 if report.passed else 1, text)


def try_case(workshop: Workshop, case: Case, level: str | None = None) -> Result:
    """Plant a fault into a copy of its base and verify that at the fault's level."""
    with workshop.room() as folder:
        artifact = workshop.place(case.base, folder)
        names = case.fault.plant(artifact)
        assert changed(artifact), f"{case.id} changes nothing"
        if case.receipt in (REMOVED, ALONE):
            artifact.strip()
        elif case.receipt == FORGED:
            artifact.forge()
        source = None if case.receipt == ALONE else artifact.source
        outcome = verify(artifact.path, source, level or case.fault.level)
    return Result(case, outcome, (names,) if isinstance(names, str) else names)


def changed(artifact: Artifact) -> bool:
    """Whether any file of an artifact differs from its base's."""
    base = artifact.workshop.open(artifact.base)
    files = [
        {path.relative_to(home): path for path in home.rglob("*") if path.is_file()}
        for home in (artifact.receipt.parent, base.receipt.parent)
    ]
    return files[0].keys() != files[1].keys() or any(
        not path.samefile(files[1][name]) and path.read_bytes() != files[1][name].read_bytes()
        for name, path in files[0].items()
    )


def in_outputs(*outputs: str) -> Where:
    """Return whether a base is one of these outputs."""
    return lambda base: base.output in outputs


def in_bases(*names: str) -> Where:
    """Return whether a base is one of these."""
    return lambda base: base.id in names
