"""Items on the nodes of a Ray cluster, which share the file system of source and output.

    driver   plan, lock, reserved files, journal; hands out batches of items (`ray_crew`)
    node     one process with threads (`ray_node`): opens the source, makes the plan again,
             converts a batch into the reserved files, makes it durable, reports it

An item may be converted twice and gives the same bytes at the same place, so the batch of a lost
node simply goes to another. Only what a node has reported durable is journalled, by the driver
alone.

Before its first item a node must see the token that the driver put into the lock file (else the
file system is not shared) and arrive at the plan's digest, which holds sizes and times of the
source.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import MissingError
from qwen35_convert.options import Limit
from qwen35_convert.planning.plan import Plan
from qwen35_convert.run.items import in_file_order
from qwen35_convert.run.ray_crew import Batch, Crew
from qwen35_convert.run.ray_node import Spec
from qwen35_convert.run.worker import Effort
from qwen35_convert.versions import version
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import FolderSink

if TYPE_CHECKING:
    from types import ModuleType

BATCH_BYTES = 128 << 20
CONNECT_SECONDS = 10.0


@contextmanager
def ray_executor(source: Path, workers: int | None, limit: Limit | None) -> Iterator[RayExecutor]:
    """Yield an executor on the cluster at RAY_ADDRESS, or on a local one.

    source   what the checkpoint was opened from, at the same path on every node
    workers  threads of each node; None: its cores, at most 8
    limit    memory of each node

    MissingError if ray is not installed, or the cluster cannot be reached.
    """
    if find_spec("ray") is None:
        raise MissingError(
            "executor ray:",
            "the package ray is not installed",
            "the extra [ray]",
            "pip install 'qwen35[ray]', here and on every node",
        )
    with _cluster() as ray:
        yield RayExecutor(ray, source, workers, limit)


class RayExecutor:
    """Converts on the cluster that `ray` is connected to."""

    def __init__(
        self, ray: ModuleType, source: Path, workers: int | None, limit: Limit | None
    ) -> None:
        self._ray, self._source, self._workers, self._limit = ray, source, workers, limit

    def __call__(
        self, plan: Plan, source: Checkpoint, sink: FolderSink, journal: Journal, effort: Effort
    ) -> None:
        """Convert every item that is not in the journal. OutputError if no node is left."""
        token = secrets.token_hex(16)
        sink.mark(token)
        spec = Spec(
            source=self._source.absolute(),
            name=source.name,
            recipe=plan.recipe,
            out=sink.out.absolute(),
            token=token,
            digest=plan.digest(source),
            version=version(),
            device=effort.device,
            limit=self._limit,
            adapter=source.overlay.folder.absolute() if source.overlay is not None else None,
        )
        batches = deque(_batches(plan, source, journal))
        crew = Crew(self._ray, spec, self._workers, effort, sink.left)
        try:
            while batches or crew.busy():
                crew.enlist()
                crew.hand_out(batches)
                for batch in crew.collect(batches):
                    journal.append(batch.items)
                    for index in batch.items:
                        effort.advance(plan.items[index])
        finally:
            crew.dismiss()


def _batches(plan: Plan, source: Checkpoint, journal: Journal) -> Iterator[Batch]:
    """Yield the items still to do in batches, in the order of the source's bytes."""
    batch, size = Batch(), 0
    for index in in_file_order(plan, source, journal):
        batch.items.append(index)
        size += sum(output.nbytes for output in plan.items[index].outputs)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = Batch(), 0
    if batch.items:
        yield batch


@contextmanager
def _cluster() -> Iterator[ModuleType]:
    """Connect to the cluster at RAY_ADDRESS, or start one here; MissingError if that fails.

    An existing connection of the caller is used, and stays.
    """
    import ray

    if ray.is_initialized():
        yield ray
        return
    _check_reachable(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise MissingError(f"executor ray: the cluster cannot be reached: {reason}") from None
    # ray prints the log of a node that died to stdout, where only results belong
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():  # none, or a word such as auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise MissingError(f"executor ray: no cluster answers at {address}: {error}") from None
