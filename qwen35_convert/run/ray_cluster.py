"""Items on the nodes of a Ray cluster, which share the file system of source and output.

    driver   plan, lock, reserved files, journal; hands out batches of items
    node     one process with threads (`ray_node`): opens the source, makes the plan again,
             converts a batch into the reserved files, makes it durable, reports it

An item may be converted twice and gives the same bytes at the same place, so the batch of a lost
node simply goes to another. Only what a node has reported durable is journalled, by the driver
alone. Nodes that join later get work; a node that lost its process gets another one.

Before its first item a node must see the token that the driver put into the lock file (else the
file system is not shared) and arrive at the plan's digest, which holds sizes and times of the
source.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import MissingError, OutputError
from qwen35_convert.options import MAX_DEFAULT_WORKERS, Limit
from qwen35_convert.planning.plan import Plan
from qwen35_convert.run.items import in_file_order
from qwen35_convert.run.ray_node import Node, Spec
from qwen35_convert.run.worker import Effort
from qwen35_convert.versions import version
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import FolderSink

if TYPE_CHECKING:
    from types import ModuleType

BATCH_BYTES = 128 << 20
LOOK_SECONDS = 1.0  # between two searches for nodes
PATIENCE_SECONDS = 60.0  # without any node
CONNECT_SECONDS = 10.0
MAX_LOSSES = 3  # of a node's process, or of a batch


@dataclass(slots=True)
class Batch:
    """Items that are handed out together, and how often they were lost with their node."""

    items: list[int] = field(default_factory=list)
    losses: int = 0


@dataclass(slots=True)
class Member:
    """One node's process: its node, its name for people, the batch it has in hand."""

    node: str
    name: str
    actor: Any
    batch: Batch | None = None


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


@dataclass(slots=True)
class Crew:
    """The nodes that work: enlisted as they appear, replaced as they are lost.

    calls  each process by the call that it has not answered yet
    idle   processes that wait for a batch
    """

    ray: ModuleType
    spec: Spec
    workers: int | None
    effort: Effort
    left: str
    calls: dict[Any, Member] = field(default_factory=dict)
    idle: list[Member] = field(default_factory=list)
    losses: Counter[str] = field(default_factory=Counter)
    looked: float = float("-inf")
    seen: float = field(default_factory=time.monotonic)

    def busy(self) -> bool:
        """Whether a node is converting a batch."""
        return any(member.batch for member in self.calls.values())

    def enlist(self) -> None:
        """Start a process on every node that has none. OutputError if there is no node at all."""
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        here = {member.node for member in (*self.calls.values(), *self.idle)}
        for node in self.ray.nodes():
            cores = int(node["Resources"].get("CPU", 0))
            lost = self.losses[node["NodeID"]] >= MAX_LOSSES
            if node["Alive"] and cores and not lost and node["NodeID"] not in here:
                self._start(node, cores)
        if self.calls or self.idle:
            self.seen = now
        elif now - self.seen > PATIENCE_SECONDS:
            raise OutputError("no node of the Ray cluster is left to convert on", left=self.left)

    def _start(self, node: dict[str, Any], cores: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        threads = self.workers or min(cores, MAX_DEFAULT_WORKERS)
        name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        remote = self.ray.remote(Node).options(
            num_cpus=min(threads, cores),
            num_gpus=1 if self.spec.device == "cuda" else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        member = Member(node["NodeID"], name, remote.remote(self.spec, threads, name))
        self.calls[member.actor.prepare.remote()] = member

    def hand_out(self, batches: deque[Batch]) -> None:
        """Give a batch to every idle process."""
        while batches and self.idle:
            member, batch = self.idle.pop(), batches.popleft()
            member.batch = batch
            self.calls[member.actor.convert.remote(batch.items)] = member

    def collect(self, batches: deque[Batch]) -> Iterator[Batch]:
        """Yield what is finished; put back what is lost. Raises what an item raised."""
        if not self.calls:
            time.sleep(LOOK_SECONDS / 10)
            return
        from ray.exceptions import RayError, RayTaskError

        answered, _ = self.ray.wait(list(self.calls), timeout=LOOK_SECONDS)
        for call in answered:
            member = self.calls.pop(call)
            batch, member.batch = member.batch, None
            try:
                error = self.ray.get(call)
            except RayTaskError:  # a bug of ours
                raise
            except RayError as loss:  # its process, its node or its answer is gone
                self._lose(member, batch, batches, loss)
                continue
            if error is not None:
                raise self._as_ours(error)
            self.idle.append(member)
            if batch:
                yield batch

    def _lose(
        self, member: Member, batch: Batch | None, batches: deque[Batch], loss: Exception
    ) -> None:
        """Put a lost node's batch back. OutputError if it was lost too often."""
        if getattr(loss, "actor_init_failed", False):
            reason = str(loss).strip().rsplit("\n", 1)[-1]
            raise MissingError(f"node {member.name} cannot run qwen35: {reason}", left=self.left)
        self.losses[member.node] += 1
        self.ray.kill(member.actor)
        if batch is None:
            self.effort.say(f"node {member.name} was lost")
            return
        self.effort.say(
            f"node {member.name} was lost; {len(batch.items)} items are converted again"
        )
        batch.losses += 1
        if batch.losses >= MAX_LOSSES:
            raise OutputError(
                f"{batch.losses} nodes were lost while converting the same items", left=self.left
            )
        batches.appendleft(batch)

    def _as_ours(self, error: ValueError) -> ValueError:
        """Return a node's error as one of this machine: what is left on the disk is known here."""
        if isinstance(error, OutputError | MissingError):
            error.left = self.left
        return error

    def dismiss(self) -> None:
        """End every process."""
        for member in (*self.calls.values(), *self.idle):
            self.ray.kill(member.actor)
