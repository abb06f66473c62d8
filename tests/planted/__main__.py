"""Plant every fault, verify every right artifact, and print the matrix.

    python -m tests.planted [PART ...]

tries what has one of the PARTs in its id; without one, everything. PYTHONPATH decides whose
verification is measured.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.planted.artifact import OUTPUTS, Workshop
from tests.planted.fault import Result, try_case, verify
from tests.planted.right import artifacts
from tests.planted.table import cases

MAX_SHOWN = 160


def main(parts: Sequence[str]) -> None:
    """Print the matrix, the faults that are not named, the false alarms, and the time."""
    warnings.simplefilter("ignore")
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        results = [try_case(workshop, case) for case in cases() if chosen(case.id, parts)]
        alarms = list(false_alarms(workshop, parts))
    lines = [*matrix(results), "", *summary(results), "", *missed(results), "", *alarms]
    lines.append(f"{time.process_time() - started:.0f} s of core time")
    print("\n".join(lines))  # noqa: T201


def chosen(name: str, parts: Sequence[str]) -> bool:
    """Whether an id has one of the parts."""
    return not parts or any(part in name for part in parts)


def matrix(results: Sequence[Result]) -> Iterable[str]:
    """Yield a table of kinds and outputs: how many were planted, or named of planted."""
    outputs = [o for o in OUTPUTS if any(r.case.base.output == o for r in results)]
    planted, named = _count(results, every=True), _count(results, every=False)
    yield f"| kind | {' | '.join(outputs)} | all |"
    yield f"| --- |{' --: |' * (len(outputs) + 1)}"
    for kind in [*dict.fromkeys(result.case.fault.kind for result in results), "all"]:
        cells = [_cell(named[kind, o], planted[kind, o]) for o in (*outputs, "all")]
        yield f"| {kind} | {' | '.join(cells)} |"


def _count(results: Sequence[Result], *, every: bool) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for result in results:
        if every or result.verdict == "named":
            kind, output = result.case.fault.kind, result.case.base.output
            found.update([(kind, output), (kind, "all"), ("all", output), ("all", "all")])
    return found


def _cell(named: int, planted: int) -> str:
    return "" if not planted else str(planted) if named == planted else f"{named}/{planted}"


def summary(results: Sequence[Result]) -> Iterable[str]:
    """Yield how many faults there are, and how many results of each kind."""
    faults = {(result.case.fault.kind, result.case.fault.name) for result in results}
    placed = {
        (result.case.fault.kind, result.case.fault.name, result.case.base) for result in results
    }
    yield f"{len(faults)} faults, {len(placed)} places, {len(results)} cases with their receipts"
    for verdict, count in Counter(result.verdict for result in results).most_common():
        yield f"  {count:5} {verdict}"


def missed(results: Sequence[Result]) -> Iterable[str]:
    """Yield a line for each fault that is not named as it should be."""
    for result in results:
        if result.verdict != "named":
            said = result.outcome.text.replace("\n", "; ")[:MAX_SHOWN]
            wanted = " and ".join(result.wanted)[:MAX_SHOWN]
            yield f"{result.verdict}: {result.case.id}: expected {wanted}: {said or 'nothing'}"


def false_alarms(workshop: Workshop, parts: Sequence[str]) -> Iterable[str]:
    """Yield a line for each right artifact that fails, and how many there are."""
    count = failed = 0
    for right in artifacts():
        if chosen(right.id, parts):
            count += 1
            with workshop.room() as folder:
                outcome = verify(*right.make(workshop, folder))
            if outcome.code:
                failed += 1
                said = outcome.text.replace("\n", "; ")[:MAX_SHOWN]
                yield f"false alarm: {right.id}: exit code {outcome.code}: {said}"
    yield f"{count} right artifacts, {failed} false alarms"


if __name__ == "__main__":
    main(sys.argv[1:])
