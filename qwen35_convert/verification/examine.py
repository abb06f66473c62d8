"""What is wrong with one tensor: found by comparing it with its source, and with its source's kin.

    the same but for a factor, a sign, a shift of 1       its transpose
    rows or columns in another order                      the values of another tensor

Another tensor is found by fingerprints, a few values of every tensor of the same shape. What is
none of these is told by how far it is off, what its scheme says of its blocks, and where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.moves import Unstack
from formats.family.ops import Shape
from quant.opening import open_value
from qwen35_convert.verification.kept_types import recast
from qwen35_convert.verification.row_order import describe, find_order

if TYPE_CHECKING:
    from torch import Tensor

MAX_ELEMENTS = 1 << 27
PRINT_ROWS, PRINT_COLUMNS = 4, 64
# Relative distance up to which a tensor holds another's values: kept ones, and those in codes.
KEPT, CODED = 0.01, 0.5
# Cosine from which two tensors are the same but for a factor: two bits leave 0.95.
PARALLEL = 0.9
FACTOR = 0.003


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong with one atom.

    text   the end of a sentence whose subject is the stored tensor
    holds  the atom of the source whose values it has
    vague  nothing but the difference is known
    """

    text: str
    holds: str | None = None
    vague: bool = False


@dataclass(slots=True)
class Examiner:
    """Examines atoms; `prints` are the fingerprints of the source by shape."""

    artifact: Checkpoint
    source: Checkpoint
    prints: dict[Shape, tuple[list[str], Tensor]] = field(default_factory=dict)

    def examine(self, name: str, faults: Sequence[str]) -> Cause:
        """Return what is wrong with an atom whose values are not the source's."""
        mine, origin = self.artifact.layout.atoms[name], self.source.layout.atoms[name]
        cause = self._examine(mine, origin, [fault for fault in faults if fault])
        expert = next((op.index for op in mine.ops if isinstance(op, Unstack)), None)
        if expert is None:
            return cause
        return Cause(f"expert {expert} {cause.text}", cause.holds, cause.vague)

    def _examine(self, mine: Atom, origin: Atom, faults: list[str]) -> Cause:
        if mine.shape != origin.shape:
            return Cause(f"has shape {list(mine.shape)}, the source has {list(origin.shape)}")
        cast = recast(self.artifact, self.source, mine.name)
        if cast:
            return Cause(cast)
        if prod(mine.shape) > MAX_ELEMENTS:
            why = "; ".join([*faults, "it is too large to be held whole and examined"])
            return Cause(f"differs from the source: {why}", vague=True)
        ours = open_value(self.artifact, mine).all().float()
        theirs = open_value(self.source, origin).all().float()
        text = _as_scaled(ours, theirs) or _as_transposed(ours, theirs) or _as_shifted(ours, theirs)
        other = None if text else self._as_other(mine, ours, relative(ours, theirs))
        if other:
            return Cause(f"holds the values of {other}", holds=other)
        cause = text or self._as_reordered(mine.role, ours, theirs)
        return Cause(cause) if cause else Cause(_difference(ours, theirs, faults), vague=True)

    def _as_reordered(self, role: str, ours: Tensor, theirs: Tensor) -> str | None:
        sizes = self.source.config.sizes
        if _cosine(ours, theirs) > PARALLEL and ours.dim() > 1:
            return None
        order = find_order(ours, theirs)
        if order is not None and relative(ours, theirs[order]) > relative(ours, theirs) / 2:
            order = None
        text = None if order is None else describe(order, role, sizes)
        if text or ours.dim() != 2:
            return text
        order = find_order(ours.T, theirs.T)
        return None if order is None else describe(order, role, sizes, "columns")

    def _as_other(self, mine: Atom, ours: Tensor, own: float) -> str | None:
        """Return the name of another tensor of the source with these values."""
        names, prints = self._prints(mine.shape)
        sample = _sample(ours[_rows(len(ours))])
        gaps = (prints - sample).norm(dim=1) / prints.norm(dim=1).clamp(min=1e-30)
        limit = CODED if mine.quantized else KEPT
        for place in gaps.argsort()[:3].tolist():
            if names[place] == mine.name or float(gaps[place]) > 2 * limit:
                continue
            atom = self.source.layout.atoms[names[place]]
            distance = relative(ours, open_value(self.source, atom).all())
            if distance < min(limit, own / 2):
                return str(names[place])
        return None

    def _prints(self, shape: Shape) -> tuple[list[str], Tensor]:
        import torch

        if shape not in self.prints:
            atoms = [atom for atom in self.source.layout.atoms.values() if atom.shape == shape]
            prints = []
            for atom in atoms:
                value = open_value(self.source, atom)
                prints.append(_sample(value.pick(_rows(shape[0]))))
                value.release(0, min(PRINT_ROWS, shape[0]))
            self.prints[shape] = [atom.name for atom in atoms], torch.stack(prints)
        return self.prints[shape]


def _rows(count: int) -> Tensor:
    """Return which rows make a fingerprint: of a vector, as many as there are columns else."""
    import torch

    return torch.linspace(0, count - 1, min(count, PRINT_ROWS)).long()


def _sample(rows: Tensor) -> Tensor:
    """Return a few values of rows [n, ...]."""
    flat = rows.float().reshape(len(rows), -1)
    return flat[:, :: max(1, flat.shape[1] // PRINT_COLUMNS)].reshape(-1)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative RMS distance of two tensors of one shape."""
    theirs = theirs.float()
    norm = float(theirs.norm())
    return float((ours - theirs).norm()) / norm if norm else float(ours.norm())


def _cosine(ours: Tensor, theirs: Tensor) -> float:
    norms = float(ours.norm()) * float(theirs.norm())
    return float((ours.double() * theirs.double()).sum()) / norms if norms else 0.0


def _as_scaled(ours: Tensor, theirs: Tensor) -> str | None:
    """Name the factor of a tensor that is parallel to its source."""
    square = float(theirs.double().square().sum())
    if not square or abs(_cosine(ours, theirs)) < PARALLEL or ours.dim() < 2:
        return None
    factor = float((ours.double() * theirs.double()).sum()) / square
    if factor < 0:
        return f"is the source with its sign flipped{_times(-factor)}"
    left = relative(ours / factor, theirs)
    if abs(factor - 1) < max(FACTOR, left**2 * 3) or relative(ours, theirs) < 1.1 * left:
        return None
    return f"is the source times {factor:.4g}"


def _times(factor: float) -> str:
    return "" if abs(factor - 1) < 0.02 else f", times {factor:.4g}"


def _as_transposed(ours: Tensor, theirs: Tensor) -> str | None:
    square = ours.dim() == 2 and ours.shape[0] == ours.shape[1]
    same = square and _cosine(ours.T, theirs) > PARALLEL > _cosine(ours, theirs)
    return "holds the transpose of the source" if same else None


def _as_shifted(ours: Tensor, theirs: Tensor) -> str | None:
    if ours.dim() != 1:
        return None
    for shift in (1, -1):
        if relative(ours - shift, theirs) < 0.02:
            return f"is the source shifted by {shift:+d}: a norm's 1 + w counted twice or lost"
    return None


def _difference(ours: Tensor, theirs: Tensor, faults: Sequence[str]) -> str:
    """Say how far a tensor is off, what is wrong with its blocks, and where."""
    error = f"differs from the source by {relative(ours, theirs):.3g} (relative RMS)"
    return ": ".join([error, *filter(None, ["; ".join([*faults, *_places(ours, theirs)])])])


def _places(ours: Tensor, theirs: Tensor) -> Iterator[str]:
    """Yield which rows are all zero, and the row that is farthest off if it stands out."""
    if ours.dim() < 2:
        return
    left, right = ours.flatten(1), theirs.flatten(1)
    zero = ((left == 0).all(1) & (right != 0).any(1)).nonzero().flatten().tolist()
    if zero:
        yield f"{len(zero)} of {len(left)} rows are all zeros, the first is row {zero[0]}"
        return
    errors = (left - right).norm(dim=1) / right.norm(dim=1).clamp(min=1e-30)
    worst = int(errors.argmax())
    if float(errors[worst]) > 1.5 * float(errors.median()):
        yield f"row {worst} is farthest off, by {float(errors[worst]):.3g}"
