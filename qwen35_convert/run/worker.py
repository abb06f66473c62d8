"""What a thread encodes with, and what schemes must know of whole weights."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.safetensors.file import torch_dtype
from formats.tensor import DTYPE_BYTES
from quant.opening import open_value
from quant.plain import PLAIN_TYPES
from quant.scheme import Factor, Scheme
from quant.stored import CHUNK_BYTES
from qwen35_convert.planning.plan import Item, Plan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to work, and whom to tell.

    workers      threads
    device       where to quantise
    advance      called with each item when it is converted
    chunk_bytes  memory of a worker for the chunk it converts
    say          called with a line on what happened, such as the loss of a node
    """

    workers: int
    device: str
    advance: Callable[[Item], object]
    chunk_bytes: int = CHUNK_BYTES
    say: Callable[[str], object] = lambda _: None


@dataclass(slots=True)
class Worker:
    """What one thread encodes with: where, and in how much memory, reused.

    importance  of the columns, by atom
    inputs      the largest, by atom
    prepared    what is known of whole weights, shared by all threads
    factor      of the Hessian of the inputs, where one is known
    parts       what was encoded before: of the one item that it encodes, and of all its rows
    """

    device: str
    importance: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    prepared: Preparation
    chunk_bytes: int = CHUNK_BYTES
    factor: Factor | None = None
    parts: Mapping[str, Tensor] | None = None
    _codes: Tensor | None = None

    def encode(self, item: Item, w: Tensor, prepared: object) -> dict[str, Tensor]:
        """Return what a scheme stores of some rows of an atom."""
        if self.parts is not None:
            return dict(self.parts)
        importance, scheme = self.importance.get(item.atom.name), item.scheme
        if self.device != "cpu":
            from runtime.kernels.encode import ggml

            kind = scheme.name.upper()
            if ggml.encodes(kind, importance):
                return {item.outputs[0].key: ggml.encode(kind, w, importance)}
        memory = self._memory(scheme, w.shape)
        if self.factor is not None:
            return scheme.encode(w, prepared, None, memory, self.factor)
        return scheme.encode(w, prepared, importance, memory)

    def _memory(self, scheme: Scheme, shape: Sequence[int]) -> Tensor | None:
        """Return memory for the first part: pages touched before beat fresh ones."""
        import torch

        first = scheme.parts("", tuple(shape))[0].info
        if self.device != "cpu" or first.dtype in PLAIN_TYPES:
            return None
        if self._codes is None or self._codes.numel() < first.nbytes:
            self._codes = torch.empty(first.nbytes, dtype=torch.uint8)
        known = first.dtype in DTYPE_BYTES
        dtype = torch_dtype(first.dtype) if known else torch.uint8
        return self._codes[: first.nbytes].view(dtype).view(*first.shape[:-1], -1)


class Preparation:
    """What schemes must know of whole weights, found out once for each fused matrix."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._known: dict[tuple[str, str], object] = {}
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def of(self, item: Item) -> object:
        """Return what the item's scheme must know; the first item of a matrix reads all of it.

        Items of the same matrix wait for it, others do not.
        """
        key = item.scheme.name, item.atom.matrix
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        with own:
            if key in self._known:
                return self._known[key]
            known = item.scheme.prepare(self._values(item))
            if known is not None:
                self._known[key] = known
            else:  # most schemes must know nothing, and there are many matrices
                self._locks.pop(key, None)
            return known

    def _values(self, item: Item) -> Iterator[Tensor]:
        """Yield the rows of every weight of an item's matrix."""
        for atom in self._matrices[item.atom.matrix]:
            value = open_value(self._source, atom)
            for start, stop in value.chunks(1):
                yield value.exact(start, stop)
                value.release(start, stop)

    @cached_property
    def _matrices(self) -> Mapping[str, list[Atom]]:
        members = defaultdict(list)
        for atom in self._source.layout.atoms.values():
            members[atom.matrix].append(atom)
        return members


def make_worker(plan: Plan, effort: Effort, prepared: Preparation) -> Worker:
    """Return what one thread encodes with."""
    return Worker(effort.device, plan.importance, plan.inputs, prepared, effort.chunk_bytes)
