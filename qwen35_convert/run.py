"""The one pass over the weights: read, cut out, encode, write; row by row, on threads.

Rows are taken in the order of the source's bytes, so that a cold disk is read once and in order.
Encoders release the GIL; a worker holds no more of a row than the room it is given. Finished rows
reach the journal in groups, after their bytes are durable.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.safetensors_file import torch_dtype
from formats.tensor import TensorInfo
from quant.scheme import FP8_SCHEMES, KEEP, QuantError, Scheme
from qwen35_convert.journal import Journal
from qwen35_convert.plan import Plan, Row
from qwen35_convert.sink import FolderSink
from runtime.values import ROOM, Value, open_value

if TYPE_CHECKING:
    from torch import Tensor

JOURNAL_SECONDS = 10.0
KERNELS = ("q4_k", "q6_k")  # that a GPU encodes itself; of the rest, ggml's types go to the CPU


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to work, and whom to tell.

    workers  threads
    device   where to quantise
    advance  called after each row
    room     bytes of a row that a worker holds at once
    say      called with what happened on the way, such as the loss of a node
    """

    workers: int
    device: str
    advance: Callable[[], object]
    room: int = ROOM
    say: Callable[[str], object] = lambda _: None


@dataclass(slots=True)
class Worker:
    """What one thread encodes with: where, by which schemes, in how much memory, reused."""

    device: str
    schemes: Mapping[str, Scheme]
    weights: Mapping[str, Tensor]
    room: int = ROOM
    _codes: Tensor | None = None

    def encode(self, scheme: Scheme, w: Tensor, name: str) -> dict[str, Tensor]:
        """Return what a scheme stores of some rows of an atom."""
        weights = self.weights.get(name)
        if self.device != "cpu" and scheme.name in KERNELS and weights is None:
            from quant.fp8 import check_finite
            from runtime.kernels.encode.k_quants import encode_k

            check_finite(w)
            return {"": encode_k(scheme.name.upper(), w)}
        return scheme.encode(w, out=self.codes(scheme, w.shape), weights=weights)

    def codes(self, scheme: Scheme, shape: Sequence[int]) -> Tensor | None:
        """Return memory for what a weight becomes: pages touched before beat fresh ones."""
        import torch

        if self.device != "cpu":
            return None
        stored = scheme.stored(tuple(shape))[0]
        count = TensorInfo("", stored.dtype, stored.shape).nbytes
        if self._codes is None or self._codes.numel() < count:
            self._codes = torch.empty(count, dtype=torch.uint8)
        dtype = torch_dtype(stored.dtype) if stored.dtype == "F8_E4M3" else torch.uint8
        return self._codes[:count].view(dtype).view(*shape[:-1], -1)


def run(plan: Plan, source: Checkpoint, sink: FolderSink, journal: Journal, effort: Effort) -> None:
    """Convert every row the journal has not.

    QuantError names the tensor that cannot be quantised; KeyboardInterrupt leaves a journal from
    which the same call goes on.
    """
    pending = in_file_order(plan, source, journal)
    with closing(convert_rows(plan, source, sink, pending, effort)) as done, _waking(source):
        _collect(done, _Ledger(plan, source, sink, journal), effort.advance)


def convert_rows(
    plan: Plan, source: Checkpoint, sink: FolderSink, rows: Sequence[int], effort: Effort
) -> Generator[int, None, None]:
    """Convert rows on threads; yield the number of each when it is written, not yet durable.

    Raises what a row raised; closing the iterator stops the threads.
    """
    _one_torch_thread()
    work = _Work(plan, source, sink, effort, pending=rows)
    threads = [threading.Thread(target=work.loop, daemon=True) for _ in range(effort.workers)]
    try:
        with _waking(source):
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


def _one_torch_thread() -> None:
    """Our workers are the parallelism; torch's own threads would only fight them."""
    import torch

    torch.set_num_threads(1)


def in_file_order(plan: Plan, source: Checkpoint, journal: Journal) -> list[int]:
    """Return the rows that the journal has not, in the order of the source's bytes."""

    def position(index: int) -> tuple[str, int, int]:
        return *source.position(plan.rows[index].atom.stored), index

    return sorted((i for i in range(len(plan.rows)) if i not in journal.done), key=position)


class _Work:
    """What the threads share: the rows still to do, the results, and when to stop."""

    def __init__(
        self, plan: Plan, source: Checkpoint, sink: FolderSink, effort: Effort,
        *, pending: Sequence[int],
    ) -> None:  # fmt: skip
        self.count = len(pending)
        self.results: queue.Queue[int | BaseException] = queue.Queue(maxsize=1024)
        self.stop = threading.Event()
        self._plan, self._source, self._sink, self._effort = plan, source, sink, effort
        self._pending: Iterator[int] = iter(pending)
        self._lock = threading.Lock()

    def loop(self) -> None:
        """Take rows until none is left; a failure is handed over, not swallowed."""
        try:
            worker = make_worker(self._plan, self._effort.device, self._effort.room)
            while not self.stop.is_set():
                with self._lock:
                    index = next(self._pending, None)
                if index is None:
                    return
                convert_row(self._plan.rows[index], self._source, self._sink, worker)
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
    """Puts rows into the journal once their bytes are durable, and known to be right."""

    plan: Plan
    source: Checkpoint
    sink: FolderSink
    journal: Journal

    def record(self, finished: set[int]) -> None:
        """Make rows durable, journal them, take them out of `finished`; unproven ones wait."""
        proven = {i for i in finished if self.source.proven([self.plan.rows[i].atom])}
        if proven:
            self.sink.sync()
            self.journal.append(proven)
            finished -= proven

    def prove(self) -> None:
        """Prove what the rows were made from, where that is still open."""
        if self.source.remote is not None:
            self.source.remote.finish()


def _collect(done: Iterator[int], ledger: _Ledger, advance: Callable[[], object]) -> None:
    finished: set[int] = set()
    last = time.monotonic()
    try:
        for index in done:
            finished.add(index)
            advance()
            if time.monotonic() - last > JOURNAL_SECONDS:
                ledger.record(finished)
                last = time.monotonic()
        ledger.prove()
    finally:
        ledger.record(finished)


def make_worker(plan: Plan, device: str, room: int) -> Worker:
    """Return what one thread encodes with."""
    return Worker(device, plan.schemes(), plan.weights, room)


def convert_row(row: Row, source: Checkpoint, sink: FolderSink, worker: Worker) -> None:
    """Read, encode and write one row."""
    value = open_value(source, row.atom, row.ops)
    if row.scheme == KEEP:
        _keep(value, row, sink, worker)
    else:
        try:
            _encode(value, row, sink, worker)
        except QuantError as failure:
            raise QuantError(f"{row.atom.stored} ({row.atom.name}): {failure}") from None


def _keep(value: Value, row: Row, sink: FolderSink, worker: Worker) -> None:
    (output,) = row.outputs
    offset, dtype = output.offset, torch_dtype(row.dtype)
    for start, stop in value.chunks(1, held=held_to_write(row.scheme), room=worker.room):
        data = as_bytes(value.rows(start, stop).to(dtype))
        sink.write(output.name, offset, data)
        value.release(start, stop)
        offset += data.nbytes


def _encode(value: Value, row: Row, sink: FolderSink, worker: Worker) -> None:
    scheme = worker.schemes[row.scheme]
    offsets = {output.suffix: output.offset for output in row.outputs}
    names = {output.suffix: output.name for output in row.outputs}
    held = held_to_write(row.scheme)
    for start, stop in value.chunks(scheme.row_multiple, held=held, room=worker.room):
        w = value.rows(start, stop).to(worker.device)
        for suffix, tensor in worker.encode(scheme, w, row.atom.name).items():
            data = as_bytes(tensor)
            sink.write(names[suffix], offsets[suffix], data)
            offsets[suffix] += data.nbytes
        value.release(start, stop)


def held_to_write(scheme: str) -> int:
    """Return the bytes of an element beside what was read: of a cast, or of codes; FP8's are 1."""
    return 2 if scheme in FP8_SCHEMES else 8


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in order, without a copy where it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
