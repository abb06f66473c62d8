"""The tensors of an artifact, made again from its source and compared byte for byte.

The one pass of a conversion, whose sink compares instead of writing: read -> ops -> encode ->
compare. There is no slack: a gain, a row of zeros, a revision nearby or a code one step off are
other bytes. What differs is then measured, to say what it is.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from formats.checkpoint import Checkpoint
from quant.measure import Error
from quant.stored import CHUNK_BYTES, each_row, open_value
from qwen35_convert.containers.registry import container_of
from qwen35_convert.planning.plan import Item, Output, Plan
from qwen35_convert.run.items import Effort, Preparation, Worker, as_bytes, make_worker
from qwen35_convert.run.threads import each
from qwen35_convert.verification.compare import Compared, compare_atom

PAGE = mmap.PAGESIZE


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

    def release(self, output: Output, start: int, nbytes: int) -> None:
        """Give back the pages of bytes that have been compared."""
        path, first, _ = self._ranges[output.name]
        page = (first + output.offset + start) // PAGE * PAGE
        self._map(path).madvise(mmap.MADV_DONTNEED, page, nbytes)

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


@dataclass(frozen=True, slots=True)
class Again:
    """What is needed to make an artifact again."""

    plan: Plan
    source: Checkpoint
    artifact: Checkpoint
    workers: int
    progress: Callable[[str], None]

    def run(self) -> list[Compared]:
        """Return every atom with its error; a fault says what differs.

        A tensor that is missing or short is left to the comparison of headers.
        """
        import torch

        torch.set_num_threads(1)
        files, prepared = Files(self.artifact), Preparation(self.source)
        local = threading.local()

        def one(item: Item) -> Compared:
            if not hasattr(local, "worker"):
                effort = Effort(1, "cpu", lambda: None)
                local.worker = make_worker(self.plan, effort, prepared)
            result = _Result()
            for outputs in _chunks(item, self.source, local.worker, result):
                _compare(files, outputs, result)
            self.progress(item.atom.name)
            return self._judged(item, result)

        there = [item for item in self._in_file_order() if files.holds(item.outputs)]
        return each(one, there, self.workers)

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


def _chunks(
    item: Item, source: Checkpoint, worker: Worker, result: _Result
) -> Iterator[list[tuple[Output, int, memoryview]]]:
    """Encode an item; yield what each range of rows comes to, and add to its error."""
    value, scheme = open_value(source, item.atom, item.ops), item.scheme
    prepared, cost = worker.prepared.of(item), scheme.cost(moved=True)
    outputs = {output.key: output for output in item.outputs}
    at = dict.fromkeys(outputs, 0)
    whole = {part.key for part in scheme.parts("", value.shape) if part.rows is None}
    held = cost.write + cost.compare
    for start, stop in value.chunks(scheme.row_multiple, held=held, chunk_bytes=CHUNK_BYTES):
        w = value.rows(start, stop)
        parts = worker.encode(item, w, prepared)
        if scheme.label is not None:
            rows = each_row(scheme, parts, tuple(w.shape))
            result.error += scheme.measure(w, rows)
        encoded = [(outputs[key], at[key], as_bytes(part)) for key, part in parts.items()]
        yield encoded
        for output, _, data in encoded:
            at[output.key] += 0 if output.key in whole else data.nbytes
        value.release(start, stop)


def _compare(
    files: Files, encoded: Sequence[tuple[Output, int, memoryview]], result: _Result
) -> None:
    for output, start, data in encoded:
        got = files.view(output, start, data.nbytes)
        if got != data:
            mismatch = result.wrong.setdefault(output.name, Mismatch())
            mismatch.add(data, got, start)
        got.release()
        files.release(output, start, data.nbytes)
