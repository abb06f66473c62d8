"""The one pass over the weights: read, cut out, encode, write; item by item, on threads.

Items are taken in the order of the source's bytes, so that a cold disk is read once and in order.
Encoders release the GIL; a worker holds one chunk of an item at a time. Finished items
reach the journal in groups, after their bytes are durable.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from formats.checkpoint import Checkpoint
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.run.encoded import convert_item
from qwen35_convert.run.threads import one_torch_thread
from qwen35_convert.run.worker import Effort, Preparation, make_worker
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import FolderSink

JOURNAL_SECONDS = 10.0


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
