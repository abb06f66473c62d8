"""The one pass over the weights: read, cut out, encode, write; row by row, on threads.

Rows are taken in the order of the source's bytes, so that a cold disk is read once and in order.
Encoders release the GIL; a worker holds a few megabytes. Finished rows reach the journal in groups,
after their bytes are durable. What is measured on a row is summed in the plan's order, so the
number of workers changes nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from quant.measure import Error
from quant.scheme import KEEP, QuantError, Scheme
from qwen35_convert.journal import Journal
from qwen35_convert.plan import Plan, Row
from qwen35_convert.sink import FolderSink
from runtime.values import Value, open_value

if TYPE_CHECKING:
    from torch import Tensor

JOURNAL_SECONDS = 10.0
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Done:
    row: int
    error: Error | None
    failure: BaseException | None = None


def run(
    plan: Plan, source: Checkpoint, sink: FolderSink, journal: Journal,
    *, workers: int, device: str, progress: Progress,
) -> dict[str, Error]:  # fmt: skip
    """Convert every row the journal has not; return the summed error of each scheme.

    QuantError names the tensor that cannot be quantised; KeyboardInterrupt leaves a journal from
    which the same call goes on.
    """
    _one_torch_thread()
    work = _Work(plan, source, sink, device, pending=_in_file_order(plan, source, journal))
    threads = [threading.Thread(target=work.loop, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        _collect(work, journal, sink, progress)
    finally:
        work.stop.set()
        for thread in threads:
            thread.join()
    return _sum_errors(plan, journal.done)


def _one_torch_thread() -> None:
    """Our workers are the parallelism; torch's own threads would only fight them."""
    import torch

    torch.set_num_threads(1)


def _in_file_order(plan: Plan, source: Checkpoint, journal: Journal) -> list[int]:
    def position(index: int) -> tuple[str, int, int]:
        stored = plan.rows[index].atom.stored
        file = source.where[stored]
        return file, source.files[file].header.ranges[stored][0], index

    return sorted((i for i in range(len(plan.rows)) if i not in journal.done), key=position)


class _Work:
    """What the threads share: the rows still to do, the results, and when to stop."""

    def __init__(
        self, plan: Plan, source: Checkpoint, sink: FolderSink, device: str,
        *, pending: Sequence[int],
    ) -> None:  # fmt: skip
        self.count = len(pending)
        self.results: queue.Queue[_Done] = queue.Queue(maxsize=1024)
        self.stop = threading.Event()
        self._plan, self._source, self._sink, self._device = plan, source, sink, device
        self._schemes = plan.schemes()
        self._pending: Iterator[int] = iter(pending)
        self._lock = threading.Lock()

    def loop(self) -> None:
        """Take rows until none is left; a failure is handed over, not swallowed."""
        while not self.stop.is_set():
            with self._lock:
                index = next(self._pending, None)
            if index is None:
                return
            try:
                error = self._convert(index)
            except BaseException as failure:  # noqa: BLE001 - raised again by the main thread
                self._hand_over(_Done(index, None, failure))
                return
            self._hand_over(_Done(index, error))

    def _convert(self, index: int) -> Error | None:
        row = self._plan.rows[index]
        return convert_row(row, self._source, self._sink, self._schemes, self._device)

    def _hand_over(self, done: _Done) -> None:
        while not self.stop.is_set():
            try:
                return self.results.put(done, timeout=0.1)
            except queue.Full:
                continue
        return None


def _collect(work: _Work, journal: Journal, sink: FolderSink, progress: Progress) -> None:
    finished: dict[int, Error | None] = {}
    last = time.monotonic()
    try:
        for _ in range(work.count):
            done = work.results.get()
            if done.failure is not None:
                raise done.failure
            finished[done.row] = done.error
            progress(done.row)
            if time.monotonic() - last > JOURNAL_SECONDS:
                _record(finished, journal, sink)
                finished, last = {}, time.monotonic()
    finally:
        _record(finished, journal, sink)


def _record(finished: dict[int, Error | None], journal: Journal, sink: FolderSink) -> None:
    if finished:
        sink.sync()
        journal.append(finished)


def _sum_errors(plan: Plan, done: Mapping[int, Error | None]) -> dict[str, Error]:
    sums: dict[str, Error] = {}
    for index, row in enumerate(plan.rows):
        error = done[index]
        if error is not None:
            sums[row.scheme] = sums.get(row.scheme, Error()) + error
    return sums


def convert_row(
    row: Row, source: Checkpoint, sink: FolderSink, schemes: Mapping[str, Scheme], device: str
) -> Error | None:
    """Read, encode and write one row; return its error, or None if it is kept byte for byte."""
    value = open_value(source, row.atom)
    if row.scheme == KEEP:
        _keep(value, row, sink)
        value.close()
        return None
    try:
        error = _encode(value, row, sink, schemes[row.scheme], device)
    except QuantError as failure:
        raise QuantError(f"{row.atom.stored} ({row.atom.name}) {failure}") from None
    value.close()
    return error


def _keep(value: Value, row: Row, sink: FolderSink) -> None:
    (output,) = row.outputs
    offset = output.offset
    for start, stop in value.chunks(multiple=1):
        data = as_bytes(value.rows(start, stop))
        sink.write(output.name, offset, data)
        value.release(start, stop)
        offset += data.nbytes


def _encode(value: Value, row: Row, sink: FolderSink, scheme: Scheme, device: str) -> Error:
    total = Error()
    offsets = {output.suffix: output.offset for output in row.outputs}
    names = {output.suffix: output.name for output in row.outputs}
    for start, stop in value.chunks(scheme.row_multiple):
        parts = scheme.encode(value.rows(start, stop).to(device), total)
        for suffix, tensor in parts.items():
            data = as_bytes(tensor)
            sink.write(names[suffix], offsets[suffix], data)
            offsets[suffix] += data.nbytes
        value.release(start, stop)
    return total


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in order, without a copy where it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
