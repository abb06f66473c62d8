"""The nodes of a Ray cluster at work: each has a process, which converts batches of items.

Nodes that join later get work; a node that lost its process gets another one, and what it had in
hand is put back.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qwen35_convert.errors import MissingError, OutputError
from qwen35_convert.options import MAX_DEFAULT_WORKERS
from qwen35_convert.run.ray_node import Node, Spec
from qwen35_convert.run.worker import Effort

if TYPE_CHECKING:
    from types import ModuleType

LOOK_SECONDS = 1.0  # between two searches for nodes
PATIENCE_SECONDS = 60.0  # without any node
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
