"""What a text says of the inputs of linears: sums of squares, or of all products of columns.

    sums = sum over tokens of x x^T [K, K], or of x^2 [K]        count = how many tokens there were

Sums are float32, added up in the order of the tokens, on the device of the pass. Weights with one
input share them. An input is handed on as soon as its last token has been seen, and then forgotten:
of a mixture, one expert's sums are in memory at a time.

Shape letters: T packed tokens, K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sums:
    """What is known of the input that the named weights share.

    values  float32 [K, K], or [K] if only squares were asked for
    """

    names: tuple[str, ...]
    values: Tensor
    count: int


@dataclass
class Hessians:
    """An observer that hands on each input of the wanted weights when it is complete.

    tokens   how many reach a weight that is no expert's
    experts  the weights of experts, whose tokens come in one call
    squares  only these are summed
    finished is called in the order in which inputs are complete
    """

    wanted: Collection[str]
    tokens: int
    experts: Collection[str]
    finished: Callable[[Sums], object]
    squares: bool = False
    _open: dict[str, Sums] = field(default_factory=dict)

    def observe(self, names: Sequence[str], x_TK: Tensor) -> None:
        """Add an input that the named weights share."""
        wanted = tuple(name for name in names if name in self.wanted)
        if not wanted:
            return
        before = self._open.pop(wanted[0], None)
        count = len(x_TK) + (before.count if before else 0)
        sums = Sums(wanted, self._added(before, x_TK), count)
        if count == self.tokens or wanted[0] in self.experts:
            self.finished(sums)
        else:
            self._open[wanted[0]] = sums

    def _added(self, before: Sums | None, x_TK: Tensor) -> Tensor:
        x = x_TK.float()
        columns = x.shape[1]
        if before is None:
            shape = (columns,) if self.squares else (columns, columns)
            values = torch.zeros(shape, device=x.device)
        else:
            values = before.values
        return values.add_(x.square().sum(0)) if self.squares else values.addmm_(x.T, x)
