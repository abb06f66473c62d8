"""Measure what each form of each unit costs: errors under a text's inputs, times probed scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from qwen35_convert.fit.probes import Forms, Probes
from qwen35_convert.fit.rounded import Rounder
from qwen35_convert.fit.scales import Cell, Places, Scales, fit_scales
from qwen35_convert.fit.sizes import Sizes, Unit
from qwen35_convert.planning.plan import Item
from qwen35_convert.run.threads import each, one_torch_thread

if TYPE_CHECKING:
    from torch import Tensor

# Probes take the form nearest to this: large enough to be measured, small enough to add up.
PROBE_BITS = 4.5
Errors = Mapping[tuple[str, str], Mapping[Cell, float]]


@dataclass(frozen=True, slots=True)
class Probe:
    """All weights of one kind, or of one range of layers, rounded together.

    forms  of each kind; error: the sum of all; kl: what was measured
    """

    what: str
    forms: Mapping[str, str]
    error: float
    kl: float


@dataclass(frozen=True, slots=True)
class Means:
    """With what to measure.

    folder   where the source's pass over the text is kept meanwhile
    advance  called after each unit and each probe
    """

    device: str
    workers: int
    folder: Path
    advance: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors by unit and form, parted by kind and depth; what probes said; the scales of it."""

    errors: Errors
    probes: tuple[Probe, ...]
    scales: Scales

    def cost(self, unit: str, form: str) -> float | None:
        """Return the predicted KL in nats; None for a form that the unit may not have."""
        cells = self.errors.get((unit, form))
        return None if cells is None else sum(self.scales.of(c) * e for c, e in cells.items())


def measure(source: Checkpoint, sizes: Sizes, ids_NT: Tensor, means: Means) -> Measured:
    """Return what each form of each unit costs.

    ids_NT  token ids [N, T], each row a text of its own

    FormatError if the source cannot be run, QuantError for a weight that is not finite.
    """
    from runtime.imatrix import collect

    imatrix = collect(source, list(ids_NT), device=means.device)
    places = Places(len(source.config.layer_types))
    rounder = Rounder(source, sizes.recipe, imatrix)
    errors = _errors(sizes.units, rounder, places, means)
    probing = _Probing(sizes.units, errors, places)
    probes = Probes(source, rounder, ids_NT, means.device, means.folder)
    by_kind = {kind: _kl(probes, means, probing.of_kind(kind)) for kind in probing.forms}
    depths = sorted({d for _, d in probing.weights if d is not None})
    by_depth = {depth: _kl(probes, means, probing.of_depth(depth)) for depth in depths}
    scales = fit_scales(probing.errors, by_kind, by_depth)
    return Measured(errors, tuple(probing.told(by_kind, by_depth)), scales)


def num_steps(sizes: Sizes, layers: int) -> int:
    """Return how often `measure` advances."""
    places = Places(layers)
    cells = {places.cell(item.atom.name) for unit in sizes.units for item in unit.items}
    kinds, depths = {kind for kind, _ in cells}, {d for _, d in cells if d is not None}
    return len(sizes.units) + len(kinds) + len(depths)


def _kl(probes: Probes, means: Means, forms: Forms) -> float:
    """Return the KL of one probe."""
    kl = probes.kl(forms)
    means.advance()
    return kl


def _errors(units: Sequence[Unit], rounder: Rounder, places: Places, means: Means) -> Errors:
    """Return the error of each unit in each form that it may have."""

    def one(unit: Unit) -> Errors:
        forms = [f for f in unit.sizes if all(rounder.knows(item, f) for item in unit.items)]
        errors = {(unit.name, form): _parted(unit.items, form, rounder, places) for form in forms}
        means.advance()
        return errors

    with one_torch_thread():
        parts = each(one, units, means.workers)
    return {key: error for part in parts for key, error in part.items()}


def _parted(
    items: Iterable[Item], form: str, rounder: Rounder, places: Places
) -> Mapping[Cell, float]:
    cells: dict[Cell, float] = defaultdict(float)
    for item in items:
        cells[places.cell(item.atom.name)] += rounder.error(item, form)
    return dict(cells)


class _Probing:
    """Which weights each probe rounds, and to what.

    forms    of each kind that has one with an error
    weights  by kind and depth
    errors   of the weights of a kind at a depth in the kind's form
    """

    def __init__(self, units: Sequence[Unit], errors: Errors, places: Places) -> None:
        self.places = places
        self.weights: dict[Cell, list[Item]] = defaultdict(list)
        members: dict[str, list[Unit]] = defaultdict(list)
        for unit in units:
            for cell in dict.fromkeys(places.cell(item.atom.name) for item in unit.items):
                members[cell[0]].append(unit)
            for item in unit.items:
                self.weights[places.cell(item.atom.name)].append(item)
        picked = {kind: _probe_form(kind, its, errors) for kind, its in members.items()}
        self.forms = {kind: form for kind, form in picked.items() if form is not None}
        self.errors: dict[Cell, float] = defaultdict(float)
        for kind, form in self.forms.items():
            for unit in members[kind]:
                for cell, error in errors[unit.name, form].items():
                    self.errors[cell] += error if cell[0] == kind else 0.0

    def of_kind(self, kind: str) -> Forms:
        """Return the weights of a kind with their form."""
        return self._forms(cell for cell in self.weights if cell[0] == kind)

    def of_depth(self, depth: int) -> Forms:
        """Return the weights of a depth with their forms."""
        return self._forms(cell for cell in self.weights if cell[1] == depth)

    def _forms(self, cells: Iterable[Cell]) -> Forms:
        return {
            item.atom.name: (item, self.forms[cell[0]])
            for cell in cells
            if cell[0] in self.forms
            for item in self.weights[cell]
        }

    def told(self, by_kind: Mapping[str, float], by_depth: Mapping[int, float]) -> Iterator[Probe]:
        """Yield every probe with its KL."""
        for kind, kl in by_kind.items():
            error = sum(e for cell, e in self.errors.items() if cell[0] == kind)
            yield Probe(kind, {kind: self.forms[kind]}, error, kl)
        for depth, kl in by_depth.items():
            own = {cell[0]: e for cell, e in self.errors.items() if cell[1] == depth}
            first, last = self.places.range(depth)
            forms = {kind: self.forms[kind] for kind in own if kind in self.forms}
            yield Probe(f"layers {first} to {last}", forms, sum(own.values()), kl)


def _probe_form(kind: str, units: Sequence[Unit], errors: Errors) -> str | None:
    """Return the form nearest PROBE_BITS that all of these may have and that loses something."""
    elements = sum(unit.elements for unit in units)
    forms = {
        form: 8 * sum(unit.sizes[form] for unit in units) / elements
        for form in units[0].sizes
        if all((unit.name, form) in errors for unit in units)
        and any(
            error
            for unit in units
            for (k, _), error in errors[unit.name, form].items()
            if k == kind
        )
    }
    return min(forms, key=lambda form: abs(forms[form] - PROBE_BITS), default=None)
