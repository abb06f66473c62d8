"""The one pass over the weights: read, cut out, encode, write; item by item, on threads.

Items are taken in the order of the source's bytes, so that a cold disk is read once and in order.
Encoders release the GIL; a worker holds one chunk of an item at a time. Finished items
reach the journal in groups, after their bytes are durable.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.safetensors.file import torch_dtype
from formats.tensor import DTYPE_BYTES
from quant.errors import QuantError
from quant.plain import PLAIN_TYPES
from quant.scheme import Factor, Part, Scheme
from quant.stored import CHUNK_BYTES, Value, open_value
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.run.finite import check_logarithms, describe_not_finite
from qwen35_convert.run.placed import Piece, Placed, shared_out
from qwen35_convert.run.scales import check_positive
from qwen35_convert.run.threads import one_torch_thread
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import FolderSink

if TYPE_CHECKING:
    from torch import Tensor

JOURNAL_SECONDS = 10.0
KERNELS = ("q4_k", "q6_k")  # that a GPU encodes itself; of the rest, ggml's types go to the CPU


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
        if self.device != "cpu" and scheme.name in KERNELS and importance is None:
            from quant.fp8.reference import check_finite
            from runtime.kernels.encode.k_quants import encode_k

            check_finite(w)
            return {item.outputs[0].key: encode_k(scheme.name.upper(), w)}
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


def run(plan: Plan, source: Checkpoint, sink: FolderSink, journal: Journal, effort: Effort) -> None:
    """Convert every item that is not in the journal."""
    run_items(plan, source, sink, journal, effort)


def run_items(
    plan: Plan,
    source: Checkpoint,
    sink: FolderSink,
    journal: Journal,
    effort: Effort,
    left_out: Collection[int] = (),
) -> None:
    """Convert every item that is neither in the journal nor left out.

    QuantError names the tensor that cannot be quantised; KeyboardInterrupt leaves a journal from
    which the same call resumes.
    """
    pending = [i for i in in_file_order(plan, source, journal) if i not in left_out]
    with closing(convert_items(plan, source, sink, pending, effort)) as done, _waking(source):
        _collect(done, _Ledger(plan, source, sink, journal), effort.advance)


def convert_items(
    plan: Plan, source: Checkpoint, sink: FolderSink, items: Sequence[int], effort: Effort
) -> Generator[int, None, None]:
    """Convert items on threads; yield the number of each when it is written, not yet durable.

    Raises what an item raised; closing the iterator stops the threads.
    """
    work = _Work(plan, source, sink, effort, pending=items)
    threads = [threading.Thread(target=work.loop, daemon=True) for _ in range(effort.workers)]
    try:
        with one_torch_thread(), _waking(source):
            for thread in threads:
                thread.start()
            for _ in range(work.count):
                result = work.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
    finally:
        work.stop.set()
        for thread in threads:
            if thread.ident is not None:  # interrupted before it was started
                thread.join()


@contextmanager
def _waking(source: Checkpoint) -> Iterator[None]:
    """Wake threads that wait for a source far away, when the work is abandoned."""
    try:
        yield
    except BaseException:
        if source.remote is not None:
            source.remote.interrupt()
        raise


def in_file_order(plan: Plan, source: Checkpoint, journal: Journal) -> list[int]:
    """Return the items that are not in the journal, in the order of the source's bytes."""

    def position(index: int) -> tuple[str, int, int]:
        return *source.position(plan.items[index].atom.stored), index

    return sorted((i for i in range(len(plan.items)) if i not in journal.done), key=position)


class _Work:
    """What the threads share: the items still to do, the results, and when to stop."""

    def __init__(
        self,
        plan: Plan,
        source: Checkpoint,
        sink: FolderSink,
        effort: Effort,
        *,
        pending: Sequence[int],
    ) -> None:
        self.count = len(pending)
        self.results: queue.Queue[int | BaseException] = queue.Queue(maxsize=1024)
        self.stop = threading.Event()
        self._plan, self._source, self._sink, self._effort = plan, source, sink, effort
        self._prepared = Preparation(source)
        self._pending: Iterator[int] = iter(pending)
        self._lock = threading.Lock()

    def loop(self) -> None:
        """Take items until none is left; a failure is handed over, not swallowed."""
        try:
            worker = make_worker(self._plan, self._effort, self._prepared)
            while not self.stop.is_set():
                with self._lock:
                    index = next(self._pending, None)
                if index is None:
                    return
                convert_item(self._plan.items[index], self._source, self._sink, worker)
                self._hand_over(index)
        except BaseException as failure:  # noqa: BLE001 - raised again by the main thread
            self._hand_over(failure)

    def _hand_over(self, result: int | BaseException) -> None:
        while not self.stop.is_set():
            try:
                return self.results.put(result, timeout=0.1)
            except queue.Full:
                continue
        return None


@dataclass(frozen=True, slots=True)
class _Ledger:
    """Adds items to the journal once their bytes are durable and their source is proven."""

    plan: Plan
    source: Checkpoint
    sink: FolderSink
    journal: Journal

    def record(self, finished: set[int]) -> None:
        """Make items durable, journal them, take them out of `finished`; unproven ones wait."""
        proven = {i for i in finished if self.source.proven([self.plan.items[i].atom])}
        if proven:
            self.sink.sync()
            self.journal.append(proven)
            finished -= proven

    def prove(self) -> None:
        """Hash the rest of a remote source, which proves the items made from it."""
        if self.source.remote is not None:
            self.source.remote.finish()


def _collect(done: Iterator[int], ledger: _Ledger, advance: Callable[[Item], object]) -> None:
    finished: set[int] = set()
    last = time.monotonic()
    try:
        for index in done:
            finished.add(index)
            advance(ledger.plan.items[index])
            if time.monotonic() - last > JOURNAL_SECONDS:
                ledger.record(finished)
                last = time.monotonic()
        ledger.prove()
    finally:
        ledger.record(finished)


def make_worker(plan: Plan, effort: Effort, prepared: Preparation) -> Worker:
    """Return what one thread encodes with."""
    return Worker(effort.device, plan.importance, plan.inputs, prepared, effort.chunk_bytes)


def convert_item(item: Item, source: Checkpoint, sink: FolderSink, worker: Worker) -> None:
    """Read, encode and write one item."""
    value = open_value(source, item.atom, item.ops)
    with naming(item, source):
        check_logarithms(source, item)
        check_positive(source, value)
        _encode(value, item, sink, worker)


@contextmanager
def naming(item: Item, source: Checkpoint) -> Iterator[None]:
    """Name the tensor in a QuantError."""
    try:
        yield
    except QuantError as failure:
        file = source.position(item.atom.stored)[0]
        why: object = failure
        with suppress(QuantError):  # it may be that the source cannot be decoded
            why = describe_not_finite(source, item.atom) or failure
        raise QuantError(f"{item.atom.stored} ({item.atom.name}) in {file}: {why}") from None


def _encode(value: Value, item: Item, sink: FolderSink, worker: Worker) -> None:
    held = item.scheme.cost(moved=True).write
    for rows in encoded_rows(value, item, worker, held):
        for output, start, data in rows.outputs:
            sink.write(output.name, output.offset + start, data)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some rows of a weight, what its scheme stores of them, and where that belongs.

    outputs  each output with the byte of it at which these bytes begin; where columns come first
             they may come with later rows
    """

    w: Tensor
    parts: Mapping[str, Tensor]
    outputs: Sequence[Piece]


def encoded_rows(value: Value, item: Item, worker: Worker, held: int) -> Iterator[Encoded]:
    """Encode an item's rows, as many at once as the worker has memory for.

    held  bytes that the caller holds of each element
    """
    scheme, form = item.scheme, value.scheme
    carried = scheme.carries(form, value.late)
    prepared = None if carried else worker.prepared.of(item)
    stored = scheme.parts("", value.shape)
    room, chunk_bytes = shared_out(stored, worker.chunk_bytes)
    placed, constant = Placed(item.outputs, stored, room), _constants(stored)
    if scheme.static_inputs:
        constant |= scheme.scale_inputs(worker.inputs[item.atom.name])
    for start, stop in value.chunks(scheme.row_multiple, held=held, chunk_bytes=chunk_bytes):
        w = value.exact(start, stop).to(worker.device)
        parts = constant | (
            scheme.carry(form, value.stored(start, stop), value.late)
            if carried
            else worker.encode(item, w, prepared)
        )
        yield Encoded(w, parts, placed.pieces(parts))
        value.release(start, stop)


def _constants(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Return the parts that follow from the shape."""
    import torch

    return {
        part.key: torch.tensor(part.constant, dtype=torch_dtype(part.info.dtype))
        for part in parts
        if part.constant is not None
    }
