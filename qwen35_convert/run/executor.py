"""Executors convert the items of a plan: threads of this process, or the nodes of a Ray cluster.

An executor is called once all files are reserved and locked. It converts every item that is not in
the journal, adds items to the journal when their bytes are durable, and raises what an item raised.
The rest (plan, lock, hashes, verification, receipt, final name) is the same for every executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from formats.checkpoint import Checkpoint
from qwen35_convert.options import THREADS, RunOptions
from qwen35_convert.planning.plan import Plan
from qwen35_convert.run.items import run
from qwen35_convert.run.worker import Effort
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import FolderSink


class Executor(Protocol):
    """Converts items."""

    def __call__(
        self, plan: Plan, source: Checkpoint, sink: FolderSink, journal: Journal, effort: Effort
    ) -> None:
        """Convert every item that is not in the journal."""
        ...


@contextmanager
def open_executor(options: RunOptions, source: Path) -> Iterator[Executor]:
    """Yield the executor that the options name, connected; MissingError if that fails.

    source  what the checkpoint was opened from: other nodes open it again
    """
    if options.executor == THREADS:
        yield run
        return
    from qwen35_convert.run.ray_cluster import ray_executor

    with ray_executor(source, options.workers, options.memory_limit) as executor:
        yield executor
