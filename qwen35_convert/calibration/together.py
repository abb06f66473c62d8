"""Weights that a GPU encodes together: of experts as many as a batch holds, others one by one.

Factors of experts wait on the GPU until there are enough of one kind, or the layer ends. Weights
are read on threads, encoded in one go, and handed on as parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from quant.opening import open_value
from quant.part import Shape
from quant.scheme import Scheme
from qwen35_convert.calibration.memory import matrices_at_once
from qwen35_convert.planning.plan import Item
from qwen35_convert.run.encoded import naming
from qwen35_convert.run.threads import each
from qwen35_convert.run.worker import Preparation

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.batched import Factors
    from quant.fourbit.hessian import Factor

# The forms and shapes of the weights of one input, and whether their rows are independent.
Kind = tuple[tuple[tuple[Scheme, Shape], ...], bool]
Parts = Mapping[str, "Tensor"]


@dataclass
class Together:
    """Encodes the items of inputs on a GPU.

    encode  called on threads with the name of an item's atom, and its parts
    """

    source: Checkpoint
    prepared: Preparation
    device: str
    workers: int
    encode: Callable[[str, Parts], object]
    _waiting: dict[Kind, list[tuple[Sequence[Item], Factor]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, items: Sequence[Item], factor: Factor, *, last: bool) -> None:
        """Encode items that share an input, now or with others of their kind.

        last  there are no others
        """
        forms = tuple((item.scheme, tuple(item.atom.shape)) for item in items)
        kind = forms, factor.outputs is None
        waiting = self._waiting[kind]
        waiting.append((items, factor))
        most = min(matrices_at_once(*shape) for _, shape in forms)
        if last or len(waiting) >= most:
            self._encode(self._waiting.pop(kind))

    def close(self) -> None:
        """Encode what waits."""
        while self._waiting:
            self._encode(self._waiting.popitem()[1])

    def _encode(self, waiting: list[tuple[Sequence[Item], Factor]]) -> None:
        import torch

        from quant.fourbit.batched import Factors
        from runtime.kernels.gptq import BLOCKS

        alike = list(zip(*(items for items, _ in waiting), strict=True))
        factors = Factors.of([factor for _, factor in waiting], BLOCKS)
        waiting.clear()
        with torch.inference_mode():
            for items in alike:
                self._encode_alike(items, factors)

    def _encode_alike(self, items: Sequence[Item], factors: Factors) -> None:
        """Encode matrices of one form and shape, each with its factor."""
        import torch

        from quant.fourbit.batched import encode_together

        read = each(self._read, items, self.workers)
        w_ENK = torch.stack([w for w, _ in read])
        prepared = [known for _, known in read]
        del read
        encoded = encode_together(items[0].scheme, w_ENK, prepared, factors)
        parts = dict(zip((item.atom.name for item in items), encoded, strict=True))
        each(lambda name: self.encode(name, parts[name]), list(parts), self.workers)

    def _read(self, item: Item) -> tuple[Tensor, object]:
        """Return a weight on the device, and what its scheme must know of the whole matrix."""
        from quant.fp8.reference import check_finite

        with naming(item, self.source):
            value = open_value(self.source, item.atom, item.ops)
            w = value.exact(0, value.shape[0])
            check_finite(w)
            known, there = self.prepared.of(item), w.to(self.device)
            value.release(0, value.shape[0])
            return there, known
