"""The weights of one layer, encoded input by input.

A Hessian rests on as many directions as there were tokens, the rest is damping. So with fewer
tokens than a quarter of its columns a weight gets `sweep`, which needs their mean squares alone;
with none it gets `nearest`.

What is added to the residual stream is encoded by what reads it next, too, see `runtime.stream` and
`quant.fourbit.outputs`: of such a weight all rows are encoded in one go.

On a GPU experts' weights are encoded together, see `together`; what needs no Hessian goes to the
CPU there too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.moves import Tile
from formats.family.ops import apply_all
from formats.family.roles import EXPERT
from qwen35_convert.calibration.digest import Digest
from qwen35_convert.calibration.memory import CHUNK_BYTES
from qwen35_convert.calibration.seen import Fallback, Seen
from qwen35_convert.calibration.streams import Streams
from qwen35_convert.calibration.together import Parts, Together
from qwen35_convert.planning.calibrated import ENDS
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.recipe.parts import GPTQ, NEAREST, SWEEP
from qwen35_convert.run.threads import each
from qwen35_convert.run.worker import Preparation, Worker

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.hessian import Factor
    from runtime.hessian import Sums

# Tokens that a Hessian needs, as a part of its columns.
LEAST_TOKENS = 0.25
# Receipts of codes that were chosen one by one alone have other digests: they are judged by bounds.
PAIRS = "pairs"
Encode = Callable[[int, Worker], object]


@dataclass
class Encoder:
    """Encodes a layer's items by the sums of their inputs, as these are complete.

    encode   called on threads with the number of an item, and what it is to be encoded with
    streams  how rows make up for one another that are added to the residual stream
    """

    plan: Plan
    source: Checkpoint
    encode: Encode
    workers: int
    device: str
    prepared: Preparation
    stage: str
    items: Sequence[int]
    streams: Streams
    numbers: dict[str, int] = field(init=False)
    experts: set[str] = field(init=False)

    def __post_init__(self) -> None:
        atoms = {index: self.plan.items[index].atom for index in self.items}
        self.numbers = {atom.name: index for index, atom in atoms.items()}
        self.experts = {atom.name for atom in atoms.values() if atom.role == EXPERT}
        self._seen, self._digest = Seen(self.stage), Digest()
        for share in self.streams.shares():
            self._digest.add(share)
        self._together = Together(
            self.source, self.prepared, self.device, self.workers, self._encode_parts
        )

    def finished(self, sums: Sums) -> None:
        """Encode the weights of an input."""
        method = self._method(sums)
        if sums.names[0] in self.experts:
            self._seen.count(sums.count)
        if method != self.plan.recipe.quantize.method:
            self._seen.fallback |= dict.fromkeys(sums.names, Fallback(sums.count, method))
        self._digest.add(sums.values)
        importance, factor = self._known(sums, method)
        items = [self.plan.items[self.numbers[name]] for name in sums.names]
        if factor is not None and any(map(_in_pairs, items)):
            self._digest.say(PAIRS)
        if factor is not None and self._go_together(items):
            self._together.add(items, factor, last=sums.names[0] not in self.experts)
            return
        factor = factor and factor.on_cpu()

        def one(name: str) -> None:
            index = self.numbers[name]
            moved = columns_of(self.plan.items[index])
            known = {} if importance is None else {name: _at(importance, moved)}
            own = factor if factor is None or moved is None else factor.moved(moved)
            coupled = factor is not None and factor.outputs is not None
            memory = sys.maxsize if coupled else CHUNK_BYTES
            worker = Worker("cpu", known, self.plan.inputs, self.prepared, memory, own)
            self.encode(index, worker)

        each(one, sums.names, self.workers)

    def close(self) -> Seen:
        """Encode what waits, and return what was seen."""
        self._together.close()
        self._seen.sha256 = self._digest.hexdigest()
        return self._seen

    def _encode_parts(self, name: str, parts: Parts) -> None:
        whole = sys.maxsize
        worker = Worker("cpu", {}, self.plan.inputs, self.prepared, whole, parts=parts)
        self.encode(self.numbers[name], worker)

    def _go_together(self, items: Sequence[Item]) -> bool:
        """Whether weights are encoded on a GPU: of tokens there are too many for its memory."""
        able = all(item.scheme.together for item in items)
        return able and self.stage not in ENDS and encodes_together(self.device)

    def _together_in(self, names: Sequence[str]) -> int:
        """Return how many columns the weights of an input need side by side."""
        return max(self.plan.items[self.numbers[name]].scheme.column_multiple for name in names)

    def _method(self, sums: Sums) -> str:
        method = self.plan.recipe.quantize.method
        if not sums.count:
            return NEAREST
        few = sums.count < LEAST_TOKENS * len(sums.values)
        return SWEEP if method == GPTQ and few else method

    def _known(self, sums: Sums, method: str) -> tuple[Tensor | None, Factor | None]:
        """Return importance and factor of an input, as far as the method takes them."""
        from quant.fourbit.hessian import factor

        if method == NEAREST:
            return None, None
        if method == GPTQ:
            made = factor(sums.values.div_(sums.count), group=self._together_in(sums.names))
            self._digest.add(made.upper)
            return None, replace(made, outputs=self.streams.outputs(sums.names[0]))
        squares = sums.values if sums.values.dim() == 1 else sums.values.diagonal()
        return (squares / sums.count).cpu(), None


def _in_pairs(item: Item) -> bool:
    from quant.fourbit.integer import goes_in_pairs

    return goes_in_pairs(item.scheme, item.atom.shape[-1])


def encodes_together(device: str) -> bool:
    """Return whether a device encodes whole matrices, many at once."""
    return device != "cpu"


def columns_of(item: Item) -> Tensor | None:
    """Return which column of its input comes to each place of an item; None: they stay."""
    import torch

    moves = [op for op in item.ops if isinstance(op, Tile) and op.axis == 1]
    return apply_all(tuple(moves), torch.arange(item.atom.shape[-1])[None])[0] if moves else None


def _at(values: Tensor, columns: Tensor | None) -> Tensor:
    return values if columns is None else values[columns]
