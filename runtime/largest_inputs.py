"""The largest input of every linear over a text: what static scales of inputs are made of.

The forward pass is float32, layer by layer (`layerwise`). Linears with one input have one number.
An expert that no token reached gets the largest of its kind in its layer.

Shape letters: T packed tokens, K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from torch import Tensor

from quant.errors import QuantError


@dataclass
class LargestInputs:
    """Largest absolute inputs by our names; `unseen` are the linears that no token reached."""

    values: dict[str, float] = field(default_factory=dict)
    unseen: dict[str, None] = field(default_factory=dict)

    def observe(self, names: Sequence[str], x_TK: Tensor) -> None:
        """Take an input that the named weights share. QuantError if it is NaN or infinite."""
        if not len(x_TK):
            self.unseen |= dict.fromkeys(names)
            return
        largest = float(x_TK.abs().max())
        if not isfinite(largest):
            raise QuantError(names[0], "has inputs that are NaN or infinite", "numbers")
        for name in names:
            self.values[name] = max(self.values.get(name, 0.0), largest)

    def fill(self) -> None:
        """Give what no token reached the largest of its kind in its layer."""
        by_kind: dict[tuple[str, str], float] = {}
        for name, value in self.values.items():
            by_kind[_kind(name)] = max(by_kind.get(_kind(name), 0.0), value)
        self.values |= {name: by_kind[_kind(name)] for name in self.unseen}


def _kind(name: str) -> tuple[str, str]:
    """Return what experts of a layer have in common: `layers.3.mlp.experts`, `gate_proj`."""
    module, _, last = name.rpartition(".")
    return module.rpartition(".")[0], last
