"""How a conversion or a verification runs: defaults, checks and limits in one place.

No option changes a tensor of the artifact; the receipt shows whether it was verified. What is
written is decided by the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.nearest import guess, one_of
from qwen35_convert.errors import MissingError, RecipeError

if TYPE_CHECKING:
    from qwen35_convert.planning.plan import Plan

DEVICES = ("cpu", "cuda")
THREADS = "threads"
EXECUTORS = (THREADS, "ray")
MAX_DEFAULT_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory of the process in bytes. A limit that is not firm grows to what the plan needs."""

    nbytes: int
    firm: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """What the items may use: workers with chunks of `chunk_bytes` each; workers that verify."""

    workers: int
    chunk_bytes: int
    verifiers: int


def _ignore(_: Plan) -> None:
    """Do nothing with a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run.

    workers       threads; None: one per core, at most 8, and one for a stream
    memory_limit  memory of the process, within which workers become fewer; None: 3/4 of what is
                  free
    device        cpu or cuda: where to quantise
    executor      threads of this process, or ray: the nodes of a cluster on a shared file system
    stream        read a source on the hub by ranges, without a copy on the disk
    overwrite     replace the model at `out`
    verify        compare the artifact with its source after writing it
    progress      show bars and notes on stderr
    on_plan       called with the plan before anything is read

    Raises RecipeError for a value that does not exist, or two that exclude each other.
    """

    workers: int | None = None
    memory_limit: Limit | None = None
    device: str = "cpu"
    executor: str = THREADS
    stream: bool = False
    overwrite: bool = False
    verify: bool = True
    progress: bool = False
    on_plan: Callable[[Plan], object] = _ignore

    def __post_init__(self) -> None:
        check_choice("device", self.device, DEVICES)
        check_choice("executor", self.executor, EXECUTORS)
        if self.workers is not None and self.workers < 1:
            raise RecipeError("workers", f"is {self.workers}", "1 or more")
        if self.stream and self.executor != THREADS:
            raise RecipeError(
                "executor",
                f"is {self.executor}, whose nodes cannot read a stream",
                THREADS,
                "leave out --stream to read files of a shared file system",
            )

    def threads(self, *, streamed: bool) -> int:
        """Return the number of workers.

        A stream gets one by default: several would read places further apart than the blocks in
        memory reach, and read blocks twice; the network is slower than one thread.
        """
        return self.workers or (1 if streamed else default_workers())


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices, with the nearest one. RecipeError."""
    if value not in choices:
        raise RecipeError(name, f"is {value!r}", one_of(choices) + guess(value, choices))


def check_device(device: str, fix: str) -> None:
    """Refuse a device that does not exist (RecipeError), or that is not here (MissingError)."""
    check_choice("device", device, DEVICES)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise MissingError("device cuda: no CUDA GPU found", fix=fix)


def default_workers() -> int:
    """Return the number of worker threads for this machine."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_WORKERS)


DEFAULTS = RunOptions()
