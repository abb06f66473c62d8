"""Who converts the rows of a plan: threads of this process, or the nodes of a Ray cluster.

An engine is called once all files are reserved and locked. It converts every row the journal has
not, adds rows to the journal when their bytes are durable, and raises what a row raised. The rest
(plan, lock, hashes, verification, receipt, final name) is the same for every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.planning.plan import Plan
from qwen35_convert.run.items import Effort, run
from qwen35_convert.run.memory import Limit, Share
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import FolderSink

ENGINES = ("threads", "ray")


class Engine(Protocol):
    """Converts rows."""

    def __call__(
        self, plan: Plan, source: Checkpoint, sink: FolderSink, journal: Journal, effort: Effort
    ) -> None:
        """Convert every row the journal has not."""
        ...


@dataclass(frozen=True, slots=True)
class Means:
    """What a conversion works with.

    engine    who converts rows, with this share of the machine
    device    where rows are quantised
    progress  show a bar
    say       told what happens on the way
    """

    engine: Engine
    share: Share
    device: str
    progress: bool
    say: Callable[[str], object]

    def effort(self, advance: Callable[[], object]) -> Effort:
        """Return what the engine is told."""
        return Effort(self.share.workers, self.device, advance, self.share.room, self.say)


@contextmanager
def open_engine(
    name: str, source: Path, *, workers: int | None = None, limit: Limit | None = None
) -> Iterator[Engine]:
    """Yield the engine of that name, connected.

    source   what the checkpoint was opened from
    workers  threads of each node, where there are several (default: its cores, at most 8)
    limit    memory of each node

    RecipeError for an unknown name, MissingError if what the engine needs is not there.
    """
    if name not in ENGINES:
        raise RecipeError(f"engine is {name!r}, expected {' or '.join(ENGINES)}")
    if name == "threads":
        yield run
        return
    from qwen35_convert.run.ray_cluster import ray_engine

    with ray_engine(source, workers, limit) as engine:
        yield engine
