"""Which weights the probes round together, and to what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qwen35_convert.fit.probes import Forms
from qwen35_convert.fit.scales import Cell, Place, Places
from qwen35_convert.fit.sizes import Unit
from qwen35_convert.planning.plan import Item

# Probes take the form nearest to this: large enough to be measured, small enough to add up.
PROBE_BITS = 4.5
Errors = Mapping[tuple[str, str], Mapping[Place, float]]


@dataclass(frozen=True, slots=True)
class Probe:
    """All weights of one kind, or of one range of layers, rounded together.

    forms  of each kind; error: the sum of all; kl: what was measured
    """

    what: str
    forms: Mapping[str, str]
    error: float
    kl: float


class Probing:
    """Which weights each probe rounds, and to what.

    forms    of each kind that has one with an error
    weights  by kind and layer
    errors   of the weights of a kind in a layer in the kind's form
    """

    def __init__(self, units: Sequence[Unit], errors: Errors, places: Places) -> None:
        self.places = places
        self.weights: dict[Place, list[Item]] = defaultdict(list)
        members: dict[str, list[Unit]] = defaultdict(list)
        for unit in units:
            for place in dict.fromkeys(places.place(item.atom.name) for item in unit.items):
                members[place[0]].append(unit)
            for item in unit.items:
                self.weights[places.place(item.atom.name)].append(item)
        picked = {kind: _probe_form(kind, its, errors) for kind, its in members.items()}
        self.forms = {kind: form for kind, form in picked.items() if form is not None}
        self.errors: dict[Place, float] = defaultdict(float)
        for kind, form in self.forms.items():
            for unit in members[kind]:
                for place, error in errors[unit.name, form].items():
                    self.errors[place] += error if place[0] == kind else 0.0

    @property
    def depths(self) -> list[int]:
        """Return the ranges of layers that have weights."""
        return sorted({self.places.depth(layer) for _, layer in self.weights if layer is not None})

    def of_kind(self, kind: str) -> Forms:
        """Return the weights of a kind with their form."""
        return self._forms(place for place in self.weights if place[0] == kind)

    def of_depth(self, depth: int) -> Forms:
        """Return the weights of a depth with their forms."""
        return self._forms(p for p in self.weights if self.places.cell(p)[1] == depth)

    def of_layer(self, layer: int) -> dict[Place, Forms]:
        """Return the weights of each kind in a layer with their form."""
        places = (p for p in self.weights if p[1] == layer and self.errors[p] > 0)
        return {place: self._forms([place]) for place in places}

    def _forms(self, places: Iterable[Place]) -> Forms:
        return {
            item.atom.name: (item, self.forms[place[0]])
            for place in places
            if place[0] in self.forms
            for item in self.weights[place]
        }

    def told(
        self,
        errors: Mapping[Cell, float],
        by_kind: Mapping[str, float],
        by_depth: Mapping[int, float],
    ) -> Iterator[Probe]:
        """Yield every probe with its KL.

        errors  of all weights of a kind at a depth
        """
        for kind, kl in by_kind.items():
            error = sum(e for cell, e in errors.items() if cell[0] == kind)
            yield Probe(kind, {kind: self.forms[kind]}, error, kl)
        for depth, kl in by_depth.items():
            own = {cell[0]: e for cell, e in errors.items() if cell[1] == depth}
            first, last = self.places.range(depth)
            forms = {kind: self.forms[kind] for kind in own if kind in self.forms}
            place = f"layer {first}" if first == last else f"layers {first} to {last}"
            yield Probe(place, forms, sum(own.values()), kl)


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
