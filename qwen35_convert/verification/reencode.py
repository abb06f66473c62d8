"""The tensors of an artifact, made again from its source and compared byte for byte.

The one pass of a conversion, whose sink compares instead of writing: read -> ops -> encode ->
compare. There is no slack: a gain, a row of zeros, a revision nearby or a code one step off are
other bytes. What differs is then measured, to say what it is.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from formats.checkpoint import FOLIO, MAX_MAPPED, Checkpoint
from quant.measure import Error
from quant.opening import open_value
from quant.scheme import Scheme
from quant.stored import each_row
from qwen35_convert.containers.registry import container_of
from qwen35_convert.planning.plan import Item, Output, Plan
from qwen35_convert.run.encoded import Encoded, encoded_rows
from qwen35_convert.run.threads import each, one_torch_thread
from qwen35_convert.run.worker import Effort, Preparation, Worker, make_worker
from qwen35_convert.verification.compare import Compared, compare_atom

# The largest of some inputs, after all layers before it: relative.
MEASURED = 0.01


@dataclass(slots=True)
class Mismatch:
    """Bytes of one output that are not as expected."""

    count: int = 0
    first: int | None = None

    def add(self, expected: memoryview, got: memoryview, at: int) -> None:
        """Count the bytes that differ, of a part that begins at byte `at` of the output."""
        import numpy as np

        wrong = np.flatnonzero(np.frombuffer(expected, np.uint8) != np.frombuffer(got, np.uint8))
        if len(wrong):
            self.count += len(wrong)
            self.first = at + int(wrong[0]) if self.first is None else self.first


class Files:
    """The tensors of an artifact as they lie in its files, by bytes."""

    def __init__(self, artifact: Checkpoint) -> None:
        files = container_of(artifact).files_of(artifact)
        self._ranges = {n: (f.path, *f.ranges[n]) for f in files.values() for n in f.infos}
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._touched = 0

    def holds(self, outputs: Iterable[Output]) -> bool:
        """Whether every tensor of these outputs is there and long enough."""
        ends = {output.name: output.offset + output.nbytes for output in outputs}
        ranges = ((self._ranges.get(name), end) for name, end in ends.items())
        return all(r is not None and r[2] - r[1] >= end for r, end in ranges)

    def view(self, output: Output, start: int, nbytes: int) -> memoryview:
        """Return bytes from `start` of an output."""
        path, first, _ = self._ranges[output.name]
        first += output.offset + start
        with memoryview(self._map(path)) as whole:
            return whole[first : first + nbytes]

    def release(self, nbytes: int) -> None:
        """Say that so many bytes have been compared; pages are given back as a checkpoint's are."""
        self._touched += max(nbytes, FOLIO)
        if self._touched >= MAX_MAPPED:
            self._touched = 0
            for mapped in tuple(self._maps.values()):
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            if path not in self._maps:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[path]


@dataclass(slots=True)
class _Result:
    """What one item came to."""

    error: Error = field(default_factory=Error)
    wrong: dict[str, Mismatch] = field(default_factory=dict)

    def measure(self, scheme: Scheme, rows: Encoded) -> None:
        """Add the error of some rows."""
        if scheme.label is not None:
            stored = each_row(scheme, rows.parts, tuple(rows.w.shape))
            self.error += scheme.measure(rows.w, stored)


@dataclass(frozen=True, slots=True)
class Again:
    """What is needed to make an artifact again."""

    plan: Plan
    source: Checkpoint
    artifact: Checkpoint
    workers: int
    progress: Callable[[str], None]

    def run(self, left_out: Collection[str] = ()) -> list[Compared]:
        """Return every atom with its error, but those left out; a fault says what differs.

        A tensor that is missing or short is left to the comparison of headers.
        """
        files, prepared = Files(self.artifact), Preparation(self.source)
        local = threading.local()

        def one(item: Item) -> Compared:
            if not hasattr(local, "worker"):
                effort = Effort(1, "cpu", lambda _: None)
                local.worker = make_worker(self.plan, effort, prepared)
            cost = item.scheme.cost(moved=True)
            measured = cost.measure if item.scheme.label is not None else 0
            return self.one(item, files, local.worker, cost.write + measured)

        order = (item for item in self._in_file_order() if item.atom.name not in left_out)
        there = [item for item in order if files.holds(item.outputs)]
        with one_torch_thread():
            return each(one, there, self.workers)

    def one(self, item: Item, files: Files, worker: Worker, held: int) -> Compared:
        """Return one atom with its error.

        held  bytes that are held of each element: ranges of rows follow from it
        """
        result = _Result()
        measured = {p.key for p in item.scheme.parts("", (1, 1)) if p.measured}
        value = open_value(self.source, item.atom, item.ops)
        for rows in encoded_rows(value, item, worker, held):
            result.measure(item.scheme, rows)
            _compare(files, rows.outputs, result, measured)
        self.progress(item.atom.name)
        return self._judged(item, result)

    def _in_file_order(self) -> list[Item]:
        return sorted(self.plan.items, key=lambda i: self.source.position(i.atom.stored))

    def _judged(self, item: Item, result: _Result) -> Compared:
        atom = self.artifact.layout.atoms.get(item.atom.name)
        stored = atom.stored if atom else item.outputs[0].name
        faults = tuple(self._faults(item, result)) if result.wrong else ()
        line = item.atom.name, stored, item.atom.role, item.scheme.name
        return Compared(*line, result.error, faults)

    def _faults(self, item: Item, result: _Result) -> Iterator[str]:
        """Say what is wrong with the values; if they could be right, where the bytes differ."""
        name = item.atom.name
        if name in self.artifact.layout.atoms and name in self.source.layout.atoms:
            importance = self.plan.importance.get(name)
            faults = compare_atom(self.artifact, self.source, name, importance).faults
            if faults:
                yield from faults
                return
        sizes = {output.name: output.nbytes for output in item.outputs}
        for output, mismatch in result.wrong.items():
            yield (
                f"is not what the recipe makes of the source: {mismatch.count} of {sizes[output]} "
                f"bytes of {output} differ, the first at byte {mismatch.first}"
            )


def _compare(
    files: Files,
    encoded: Sequence[tuple[Output, int, memoryview]],
    result: _Result,
    measured: Collection[str],
) -> None:
    """Compare parts; those that are `measured` may differ by what float32 sums lose."""
    touched: Counter[str] = Counter()
    for output, start, data in encoded:
        got = files.view(output, start, data.nbytes)
        near = output.key in measured and _near(got, data)
        if not near and not _same(got, data):
            mismatch = result.wrong.setdefault(output.name, Mismatch())
            mismatch.add(data, got, start)
        got.release()
        touched[output.name] += max(data.nbytes, FOLIO)
    sizes = {output.name: output.nbytes for output, _, _ in encoded}
    for name, nbytes in touched.items():
        files.release(min(nbytes, sizes[name]))


def _near(one: memoryview, other: memoryview) -> bool:
    """Whether float32 numbers are those that another machine measures of the same text."""
    import numpy as np

    left, right = (np.frombuffer(x, np.float32) for x in (one, other))
    return np.allclose(left, right, rtol=MEASURED, atol=0)


def _same(one: memoryview, other: memoryview) -> bool:
    """Whether bytes are equal. memoryview's own test takes them one by one, 20 times as long."""
    import numpy as np

    word = np.uint8 if len(one) % 8 else np.uint64
    return np.array_equal(np.frombuffer(one, word), np.frombuffer(other, word))
