"""Scales that turn an error after a layer into nats: one for each kind of weight and each depth.

    KL = sum over weights of   kind(weight) * depth(layer) * error(weight, form)

Depths are ranges of layers. A probe rounds all weights of one kind, or all of one depth, and its KL
is measured: the row sums and column sums of a table of which the errors are known. Scales that have
these sums are found by fitting rows and columns in turn (Deming and Stephan, 1940). What the sums
of all kinds and of all depths differ by, because errors do not quite add up, is left to the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DEPTHS = 16
ROUNDS = 200
LAYER = re.compile(r"layers\.(\d+)\.")
NUMBER = re.compile(r"\.\d+\.")
Cell = tuple[str, int | None]
Place = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Places:
    """Where weights are: `layers` is the number of decoder layers."""

    layers: int

    @property
    def depths(self) -> int:
        """Return how many ranges of layers there are."""
        return min(self.layers, MAX_DEPTHS)

    def place(self, name: str) -> Place:
        """Return kind and layer of a weight by our name; None: it is in no layer."""
        layer = LAYER.match(name)
        if layer is None:
            return name, None
        return NUMBER.sub(".", name[layer.end() :]), int(layer[1])

    def depth(self, layer: int) -> int:
        """Return the depth of a layer."""
        return layer * self.depths // self.layers

    def cell(self, place: Place) -> Cell:
        """Return kind and depth of a place."""
        kind, layer = place
        return kind, None if layer is None else self.depth(layer)

    def range(self, depth: int) -> tuple[int, int]:
        """Return the first and the last layer of a depth."""
        inside = [i for i in range(self.layers) if self.depth(i) == depth]
        return inside[0], inside[-1]


@dataclass(frozen=True, slots=True)
class Scales:
    """Nats by error: of each kind, and what that is multiplied by at each depth."""

    kinds: Mapping[str, float]
    depths: Mapping[int, float]

    def of(self, cell: Cell) -> float:
        """Return the scale of a kind at a depth; 0 for a kind that was not probed."""
        kind, depth = cell
        return self.kinds.get(kind, 0.0) * (1.0 if depth is None else self.depths.get(depth, 1.0))


def fit_scales(
    errors: Mapping[Cell, float], by_kind: Mapping[str, float], by_depth: Mapping[int, float]
) -> Scales:
    """Return the scales under which errors have the KL that was measured.

    errors    of all weights of a kind at a depth, as the probes rounded them
    by_kind   KL of the probe of each kind
    by_depth  KL of the probe of each depth
    """
    layered = {kind for kind, depth in errors if depth is not None}
    shares = sum(by_kind[kind] for kind in layered), sum(by_depth.values())
    depths = dict.fromkeys(by_depth, 1.0)
    kinds = _rows(errors, by_kind, depths)
    for _ in range(ROUNDS if min(shares) > 0 else 0):
        depths = {
            depth: _ratio(
                kl * shares[0] / shares[1],
                sum(kinds[k] * error for (k, d), error in errors.items() if d == depth),
            )
            for depth, kl in by_depth.items()
        }
        kinds = _rows(errors, by_kind, depths)
    return Scales(kinds, depths)


def _rows(
    errors: Mapping[Cell, float], by_kind: Mapping[str, float], depths: Mapping[int, float]
) -> dict[str, float]:
    """Return the scale of each kind under those of the depths."""
    return {
        kind: _ratio(
            kl,
            sum(e * (1.0 if d is None else depths[d]) for (k, d), e in errors.items() if k == kind),
        )
        for kind, kl in by_kind.items()
    }


def _ratio(kl: float, error: float) -> float:
    return kl / error if error > 0 else 0.0
