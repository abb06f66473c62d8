"""Small scales of groups that an engine takes for zero, and with them the weights.

Marlin keeps the scales of one kernel (the linears of a fused matrix; of all experts of a layer)
from 2^-6 on, times a power of two where their largest leaves room. A group below that is 28,672
times smaller than the largest weight, so its loss is rarely seen: it is a note, unless the groups
that are lost hold more than a ten-thousandth of the weight's energy, a hundredth of what rounding
to four bits loses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from quant.opening import open_value
from quant.stored import scheme_of
from qwen35_convert.failure import Failure

SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Flushed:
    """What an engine loses of one weight: groups, and their share of its energy."""

    stored: str
    groups: int
    share: float

    @property
    def text(self) -> str:
        """Return the end of a sentence whose subject is the stored tensor."""
        return (
            f"has {self.groups:,} scales below what Marlin keeps: it takes those groups for 0, "
            f"{self.share:.2g} of the weight's energy"
        )


def find_flushed(artifact: Checkpoint, names: Iterable[str]) -> tuple[list[Failure], list[str]]:
    """Return what is lost of these atoms: too much of one, or so little that it is a note."""
    atoms = [artifact.layout.atoms[name] for name in names]
    small = [atom for atom in atoms if scheme_of(atom).flushes and _flushed(artifact, atom, None)]
    peaks = _peaks(artifact, {_kernel(atom) for atom in small})
    lost = [one for atom in small if (one := _flushed(artifact, atom, peaks[_kernel(atom)]))]
    failures = [Failure(one.stored, one.text) for one in lost if one.share > SHARE]
    return failures, [f"{one.stored} {one.text}" for one in lost if one.share <= SHARE]


def _kernel(atom: Atom) -> tuple[str | None, str]:
    """Return the key of the weights that one kernel multiplies: their scales have one factor."""
    return atom.group, atom.matrix.rpartition(".")[2] if atom.group else atom.matrix


def _peaks(
    artifact: Checkpoint, kernels: set[tuple[str | None, str]]
) -> dict[tuple[str | None, str], float]:
    """Return the largest scale of these kernels."""
    peaks = dict.fromkeys(kernels, 0.0)
    for atom in artifact.layout.atoms.values():
        key = _kernel(atom)
        if key in kernels and scheme_of(atom).flushes:
            value = open_value(artifact, atom)
            for start, stop in value.chunks(1):
                peak = value.scheme.peak(value.stored(start, stop))
                peaks[key] = max(peaks[key], peak)
                value.release(start, stop)
    return peaks


def _flushed(artifact: Checkpoint, atom: Atom, peak: float | None) -> Flushed | None:
    """Return what is lost of a weight; peak: the kernel's largest scale, None: not known yet."""
    value, groups, lost, whole = open_value(artifact, atom), 0, 0.0, 0.0
    for start, stop in value.chunks(1):
        rows = value.stored(start, stop)
        kept, count = value.scheme.flush(rows, peak)
        energy = value.scheme.decode(rows).double().square().sum()
        whole += float(energy)
        if count:
            groups += count
            lost += float(energy - value.scheme.decode(kept).double().square().sum())
        value.release(start, stop)
    return Flushed(atom.parts[1], groups, lost / whole if whole else 0.0) if groups else None
