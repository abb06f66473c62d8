"""Measure what each form of each unit costs: errors under a text's inputs, times probed scales.

    error = error of the linear's outputs in this form
            * what its layer makes of it:  moved(kind, layer) / error of the outputs, as probed

What a layer makes of an error is measured: the weights of one kind are rounded, and the residual
stream after the layer moves (see runtime.moved). Behind a gate, a softmax or the delta rule the
same error of a linear's outputs is worth very different amounts, in one layer and from layer to
layer. What has left the layer costs nearly the same nats whichever weight it came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from qwen35_convert.fit.probes import Forms, Probes
from qwen35_convert.fit.probing import Errors, Probe, Probing
from qwen35_convert.fit.rounded import Rounder
from qwen35_convert.fit.scales import Cell, Place, Places, Scales, fit_scales
from qwen35_convert.fit.sizes import Sizes, Unit
from qwen35_convert.planning.plan import Item
from qwen35_convert.run.threads import each, one_torch_thread

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Means:
    """With what to measure.

    folder   where the source's pass over the text is kept meanwhile
    advance  called after each unit, each layer and each probe
    """

    device: str
    workers: int
    folder: Path
    advance: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors by unit and form, parted by kind and depth; what probes said; the scales of it."""

    errors: Mapping[tuple[str, str], Mapping[Cell, float]]
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
    outputs = _errors(sizes.units, rounder, places, means)
    probing = Probing(sizes.units, outputs, places)
    probes = Probes(source, rounder, ids_NT, means.device, means.folder)
    passed = _passed(probes, probing, means)
    errors = {key: _by_cell(parts, passed, places) for key, parts in outputs.items()}
    probed = _by_cell(probing.errors, passed, places)
    by_kind = {kind: _kl(probes, means, probing.of_kind(kind)) for kind in probing.forms}
    by_depth = {depth: _kl(probes, means, probing.of_depth(depth)) for depth in probing.depths}
    scales = fit_scales(probed, by_kind, by_depth)
    return Measured(errors, tuple(probing.told(probed, by_kind, by_depth)), scales)


def num_steps(sizes: Sizes, layers: int) -> int:
    """Return how often `measure` advances."""
    places = Places(layers)
    found = {places.place(item.atom.name) for unit in sizes.units for item in unit.items}
    kinds, depths = {kind for kind, _ in found}, {places.cell(place)[1] for place in found}
    return len(sizes.units) + layers + len(kinds) + len(depths - {None})


def _kl(probes: Probes, means: Means, forms: Forms) -> float:
    """Return the KL of one probe."""
    kl = probes.kl(forms)
    means.advance()
    return kl


def _errors(units: Sequence[Unit], rounder: Rounder, places: Places, means: Means) -> Errors:
    """Return the error of each unit's outputs in each form that it may have."""

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
) -> Mapping[Place, float]:
    parts: dict[Place, float] = defaultdict(float)
    for item in items:
        parts[places.place(item.atom.name)] += rounder.error(item, form)
    return dict(parts)


def _passed(probes: Probes, probing: Probing, means: Means) -> dict[Place, float]:
    """Return what the layer makes of an error of a kind's outputs."""
    passed: dict[Place, float] = {}
    for layer, moved in enumerate(probes.moved(probing.of_layer)):
        for place in probing.of_layer(layer):
            passed[place] = moved[place] / probing.errors[place]
        means.advance()
    return passed


def _by_cell(
    parts: Mapping[Place, float], passed: Mapping[Place, float], places: Places
) -> Mapping[Cell, float]:
    """Return errors by kind and depth, as layers pass them on."""
    cells: dict[Cell, float] = defaultdict(float)
    for place, error in parts.items():
        cells[places.cell(place)] += error * passed.get(place, 1.0)
    return dict(cells)
