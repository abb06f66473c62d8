"""An artifact against its source: by bytes where it is kept, by value where it is quantised.

Both sides are opened by their own headers and cut into atoms independently of any plan. An element
of a quantised weight must lie within half a step of its code (`quant.measure` derives the bound);
what is kept must be equal bit for bit. A tensor that fails is examined for the usual faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from quant.measure import Error
from quant.stored import Value, open_value
from qwen35_convert.containers.registry import container_of
from qwen35_convert.failure import Failure

if TYPE_CHECKING:
    from torch import Tensor

MAX_DIAGNOSED = 1 << 27
UNPROVEN = "no bound is known of its type: it is unproven"
SAME = 0.1  # relative RMS below which two weights are the same one, whatever its scheme


@dataclass(frozen=True, slots=True)
class Compared:
    """One atom: how it is stored and how far it is from its source."""

    name: str
    stored: str
    role: str
    scheme: str
    error: Error
    failures: tuple[Failure, ...]


def missing_atoms(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield what one side has and the other lacks; vision and MTP may be dropped as a whole."""
    ours, theirs = artifact.layout.atoms, source.layout.atoms
    for name, atom in theirs.items():
        head = name.split(".", 1)[0]
        whole = head in ("visual", "mtp") and not any(n.split(".", 1)[0] == head for n in ours)
        if name not in ours and not whole:
            yield Failure(atom.stored, "is in the source, but not in the artifact")
    for name, atom in ours.items():
        if name not in theirs:
            yield Failure(atom.stored, "is in the artifact, but not in the source")


def compare_atom(
    artifact: Checkpoint, source: Checkpoint, name: str, importance: Tensor | None = None
) -> Compared:
    """Compare one atom that both sides have; `importance` is what it was encoded with."""
    atom, origin = artifact.layout.atoms[name], source.layout.atoms[name]
    line = (name, atom.stored, atom.role, atom.scheme)
    if atom.shape != origin.shape:
        problem = f"has shape {list(atom.shape)}, the source has {list(origin.shape)}"
        return Compared(*line, Error(), (Failure(atom.stored, problem),))
    pair = _Pair(artifact, source, open_value(artifact, atom), open_value(source, origin))
    if not atom.quantized:
        faults = [] if pair.equal() else [""]
        error = Error()
    else:
        error = pair.error(importance)
        scheme = pair.ours.scheme
        faults = scheme.judge(error) if scheme.bounded else [UNPROVEN, *scheme.judge(error)]
    failures: tuple[Failure, ...] = ()
    if faults:
        failures = (Failure(atom.stored, diagnose(artifact, source, name, faults)),)
    return Compared(*line, error, failures)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One atom on both sides."""

    artifact: Checkpoint
    source: Checkpoint
    ours: Value
    theirs: Value

    def error(self, importance: Tensor | None) -> Error:
        """Return the error of a quantised weight, in the order in which its columns are stored."""
        total, scheme = Error(), self.ours.scheme
        weighed = container_of(self.artifact).weighed(self.artifact)
        for rows in self._chunks():
            w = self.ours.in_stored_order(self.theirs.rows(*rows))
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
        cost = self.ours.scheme.cost(moved=True)
        for rows in self.theirs.chunks(self._multiple(), held=cost.read + cost.compare):
            yield rows
            self.ours.release(*rows)
            self.theirs.release(*rows)

    def _multiple(self) -> int:
        return max(self.ours.scheme.row_multiple, 1)


def diagnose(artifact: Checkpoint, source: Checkpoint, name: str, faults: list[str]) -> str:
    """Say what is wrong with an atom whose values are not the source's."""
    mine, origin = artifact.layout.atoms[name], source.layout.atoms[name]
    recast = container_of(artifact).widens or container_of(source).widens
    if not recast and mine.dtype != origin.dtype:
        return f"is {mine.dtype}, but the source has {origin.dtype}"
    if prod(mine.shape) > MAX_DIAGNOSED:
        return "differs from the source; it is too large to be held whole and examined"
    ours, theirs = open_value(artifact, mine).all().float(), open_value(source, origin).all()
    found = _as_transposed(ours, theirs) or _as_shifted(ours, theirs)
    found = found or _as_sibling(ours, source, name) or _as_reordered(ours, theirs)
    said = f"differs from the source by {relative(ours, theirs):.3g} (relative RMS)"
    return found or ": ".join([said, *filter(None, ["; ".join(faults)])])


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative RMS distance of two tensors of one shape."""
    theirs = theirs.float()
    norm = float(theirs.norm())
    return float((ours - theirs).norm()) / norm if norm else float(ours.norm())


def _as_transposed(ours: Tensor, theirs: Tensor) -> str | None:
    square = ours.dim() == 2 and ours.shape[0] == ours.shape[1]
    same = square and relative(ours.T, theirs) < SAME
    return "holds the transpose of the source" if same else None


def _as_shifted(ours: Tensor, theirs: Tensor) -> str | None:
    if ours.dim() != 1:
        return None
    for shift in (1, -1):
        if relative(ours - shift, theirs) < 0.02:
            return f"is the source shifted by {shift:+d}: a norm's 1 + w counted twice or lost"
    return None


def _as_sibling(ours: Tensor, source: Checkpoint, name: str) -> str | None:
    """Look for another tensor of the same layer with these values: a swap."""
    layer = name.rsplit(".", 2)[0] if ".experts." in name else ".".join(name.split(".")[:2])
    shape = tuple(ours.shape)
    for other, atom in source.layout.atoms.items():
        near = other != name and other.startswith(layer + ".") and atom.shape == shape
        if near and relative(ours, open_value(source, atom).all()) < SAME:
            return f"holds the values of {other}"
    return None


def _as_reordered(ours: Tensor, theirs: Tensor) -> str | None:
    """Rows of the same lengths in another order: heads tiled, or a wrong split."""
    if ours.dim() < 2 or relative(ours, theirs) < SAME:
        return None
    left, right = (t.float().flatten(1).norm(dim=1).sort().values for t in (ours, theirs))
    same = relative(left, right) < 0.01
    return "holds the source's rows in another order (heads?)" if same else None
