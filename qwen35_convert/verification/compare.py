"""An artifact against its source: by bytes where it is kept, by value where it is quantised.

Both sides are opened by their own headers and cut into atoms independently of any plan. An element
of a quantised weight must be what a right encoder may have made of it (each scheme's `compare` and
`judge` say what that is); what is kept must be equal bit for bit. `diagnose` examines what fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from quant.measure import Error
from quant.opening import open_value
from quant.stored import Value
from qwen35_convert.containers.registry import container_of
from qwen35_convert.failure import Failure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Compared:
    """One atom: how it is stored and how far it is from its source.

    faults    what is wrong with it; `verification.diagnose` looks for the cause
    unproven  nobody knows what a right encoder of its type may do
    by_bounds it could be made again, but was judged by what any right encoder may do
    """

    name: str
    stored: str
    role: str
    scheme: str
    error: Error
    faults: tuple[str, ...] = ()
    unproven: bool = False
    by_bounds: bool = False


def by_scheme(compared: Iterable[Compared]) -> dict[str, dict[str, Any]]:
    """Return how many tensors there are of each scheme, and their error as a report shows it."""
    sums: dict[str, Error] = {}
    counts: Counter[str] = Counter()
    for atom in compared:
        counts[atom.scheme] += 1
        total = sums.setdefault(atom.scheme, Error())
        if atom.error.count:
            total += atom.error
    return {
        scheme: {"tensors": counts[scheme]} | (sums[scheme].as_dict() if sums[scheme].count else {})
        for scheme in sorted(sums)
    }


def missing_atoms(artifact: Checkpoint, source: Checkpoint, only: str = "*") -> Iterator[Failure]:
    """Yield what one side has and the other lacks; vision and MTP may be dropped as a whole.

    only  a glob: of a slice nothing else is wanted
    """
    ours, theirs = artifact.layout.atoms, source.layout.atoms
    dropped = {"visual", "mtp"} - {name.split(".", 1)[0] for name in ours}
    for name, atom in theirs.items():
        whole = name.split(".", 1)[0] in dropped
        if name not in ours and not whole and fnmatchcase(name, only):
            stored = artifact.layout.spelling(atom.hub)
            yield Failure(stored, "is in the source, but not in the artifact")
    for name, atom in ours.items():
        if name not in theirs:
            yield Failure(atom.stored, "is in the artifact, but not in the source")


def compare_atom(
    artifact: Checkpoint,
    source: Checkpoint,
    name: str,
    importance: Tensor | None = None,
) -> Compared:
    """Compare one atom that both sides have; importance is what it was encoded with."""
    atom, origin = artifact.layout.atoms[name], source.layout.atoms[name]
    line = (name, atom.stored, atom.role, atom.scheme)
    if atom.shape != origin.shape:
        return Compared(*line, Error(), ("has another shape",))
    pair = _Pair(artifact, source, open_value(artifact, atom), open_value(source, origin))
    if not atom.quantized:
        return Compared(*line, Error(), () if pair.equal() else ("is not the source's",))
    error, faults = pair.judged(importance)
    return Compared(*line, error, faults, not pair.ours.scheme.bounded)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One atom on both sides."""

    artifact: Checkpoint
    source: Checkpoint
    ours: Value
    theirs: Value

    def judged(self, importance: Tensor | None) -> tuple[Error, tuple[str, ...]]:
        """Return the error of a quantised weight, and what is wrong with it.

        A source that is quantised has two readings: as its model computes with it, and in float32.
        """
        error = self._error(self.theirs.rows, importance)
        faults = tuple(self.ours.scheme.judge(error))
        if faults and self.theirs.atom.quantized:
            exact = self._error(self.theirs.exact, importance)
            if not self.ours.scheme.judge(exact):
                return exact, ()
        return error, faults

    def _error(self, read: Callable[[int, int], Tensor], importance: Tensor | None) -> Error:
        """Return the error in the order in which columns are stored."""
        total, scheme = Error(), self.ours.scheme
        weighed = container_of(self.artifact).weighed(self.artifact)
        for rows in self._chunks():
            w = self.ours.in_stored_order(read(*rows))
            total += scheme.compare(w, self.ours.stored(*rows), importance, weighed=weighed)
        return total

    def equal(self) -> bool:
        """Whether what is kept is the source's."""
        container, widened = container_of(self.artifact), container_of(self.source).widens
        equal = True
        for rows in self._chunks():
            equal = equal and container.same(self.ours, self.theirs, rows, widened=widened)
        return equal

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows, and give their pages back.

        They follow from the artifact alone, so the sums are the same whatever memory there is.
        """
        scheme, cost = self.ours.scheme, self.ours.scheme.cost(moved=True)
        multiple = max(scheme.row_multiple, 1)
        for rows in self.theirs.chunks(multiple, held=cost.read + cost.compare):
            yield rows
            self.ours.release(*rows)
            self.theirs.release(*rows)
