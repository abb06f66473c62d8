"""The weights of one layer, encoded input by input.

A Hessian rests on as many directions as there were tokens, the rest is damping. So with fewer
tokens than a quarter of its columns a weight gets `sweep`, which needs their mean squares alone;
with none it gets `nearest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from formats.family.roles import EXPERT
from qwen35_convert.calibration.seen import Fallback, Seen
from qwen35_convert.planning.plan import Plan
from qwen35_convert.recipe import NEAREST
from qwen35_convert.run.items import Preparation, Worker
from qwen35_convert.run.threads import each

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.hessian import Factor
    from runtime.hessian import Sums

GPTQ, SWEEP = "gptq", "sweep"
# Tokens that a Hessian needs, as a part of its columns.
LEAST_TOKENS = 0.25
# Rows are encoded in ranges of this memory, whatever there is: the same ranges, the same bytes.
CHUNK_BYTES = 64 << 20
Encode = Callable[[int, Worker], object]


@dataclass
class Encoder:
    """Encodes a layer's items by the sums of their inputs, as these are complete.

    encode  called on threads with the number of an item, and what it is to be encoded with
    """

    plan: Plan
    encode: Encode
    workers: int
    device: str
    prepared: Preparation
    stage: str
    items: Sequence[int]
    numbers: dict[str, int] = field(init=False)
    experts: set[str] = field(init=False)

    def __post_init__(self) -> None:
        atoms = {index: self.plan.items[index].atom for index in self.items}
        self.numbers = {atom.name: index for index, atom in atoms.items()}
        self.experts = {atom.name for atom in atoms.values() if atom.role == EXPERT}
        self._seen, self._digest = Seen(self.stage), hashlib.sha256()

    def finished(self, sums: Sums) -> None:
        """Encode the weights of an input."""
        method = self._method(sums)
        if sums.names[0] in self.experts:
            self._seen.count(sums.count)
        if method != self.plan.recipe.quantize.method:
            self._seen.fallback |= dict.fromkeys(sums.names, Fallback(sums.count, method))
        self._add(sums.values)
        importance, factor = self._known(sums, method)
        known, factors = dict.fromkeys(sums.names, importance), dict.fromkeys(sums.names, factor)

        def one(name: str) -> None:
            weights = {n: x for n, x in known.items() if x is not None}
            shared = weights, self.plan.inputs, self.prepared
            worker = Worker(self.device, *shared, CHUNK_BYTES, factors[name])
            self.encode(self.numbers[name], worker)

        each(one, sums.names, self.workers)

    def close(self) -> Seen:
        """Return what was seen."""
        self._seen.sha256 = self._digest.hexdigest()
        return self._seen

    def _method(self, sums: Sums) -> str:
        asked = self.plan.recipe.quantize.method
        if not sums.count:
            return NEAREST
        few = sums.count < LEAST_TOKENS * len(sums.values)
        return SWEEP if asked == GPTQ and few else asked

    def _known(self, sums: Sums, method: str) -> tuple[Tensor | None, Factor | None]:
        """Return importance and factor of an input, as far as the method takes them."""
        from quant.fourbit.hessian import factor

        if method == NEAREST:
            return None, None
        if method == GPTQ:
            made = factor(sums.values.div_(sums.count))
            self._add(made.upper)
            return None, made
        squares = sums.values if sums.values.dim() == 1 else sums.values.diagonal()
        return (squares / sums.count).cpu(), None

    def _add(self, values: Tensor) -> None:
        """Add numbers to the digest."""
        self._digest.update(values.contiguous().cpu().numpy().data)
