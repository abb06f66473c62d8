"""What runs on a node of a cluster: a batch of items goes into the files that the driver reserved.

A node trusts nothing it was told about files: it opens source and output itself, and refuses to
write without the driver's token in the lock file, or by another plan than the driver's. Errors that
a user can cause are returned, not raised, so that they arrive without the cluster's own traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from qwen35_convert.containers.registry import container_for, expect, open_checkpoint
from qwen35_convert.errors import MissingError, OutputError, RecipeError
from qwen35_convert.options import Limit, Share
from qwen35_convert.planning.plan import Plan
from qwen35_convert.progress import ignore
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.run.first_use import warm_all
from qwen35_convert.run.items import convert_items
from qwen35_convert.run.memory import fit_memory
from qwen35_convert.run.worker import Effort
from qwen35_convert.source import merge
from qwen35_convert.versions import version
from qwen35_convert.write.sink import FolderSink, read_mark

SHARED = "a file system that all nodes share"


@dataclass(frozen=True, slots=True)
class Spec:
    """A conversion as a node needs it: paths that all nodes see, recipe, what must agree.

    name     what people call the model
    adapter  the folder of what is merged into it; None: nothing is
    token    what stands in the lock file
    digest   of the plan: headers and recipe, sizes and times of the source's files
    version  of qwen35
    limit    memory of each node
    """

    source: Path
    name: str
    recipe: Recipe
    out: Path
    token: str
    digest: str
    version: str
    device: str
    limit: Limit | None
    adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    plan: Plan
    source: Checkpoint
    sink: FolderSink
    share: Share


class Node:
    """One node's process. `name` is the node's, for messages."""

    def __init__(self, spec: Spec, threads: int, name: str) -> None:
        self._spec, self._threads, self._name = spec, threads, name
        self._job: _Job | None = None

    def prepare(self) -> ValueError | None:
        """Open everything; return what is wrong."""
        try:
            self._job = self._open()
        except RecipeError as error:  # this node has too little memory
            return MissingError(f"node {self._name}: {error}")
        except ValueError as error:
            return error
        return None

    def convert(self, items: Sequence[int]) -> ValueError | None:
        """Convert items and make their bytes durable; return what is wrong."""
        job = self._job
        assert job is not None, "a node is prepared first"
        effort = Effort(job.share.workers, self._spec.device, lambda _: None, job.share.chunk_bytes)
        try:
            with closing(convert_items(job.plan, job.source, job.sink, items, effort)) as done:
                for _ in done:
                    pass
            job.sink.sync()
        except OSError as error:
            return OutputError(f"node {self._name}: {error.filename}: {error.strerror}")
        except ValueError as error:
            return error
        return None

    def _open(self) -> _Job:
        spec = self._spec
        if version() != spec.version:
            raise MissingError(f"node {self._name}", f"runs qwen35 {version()}", spec.version)
        if read_mark(spec.out) != spec.token:
            raise OutputError(
                f"node {self._name}",
                f"does not see what this machine writes beside {spec.out}",
                SHARED,
            )
        plan, source = self._plan()
        warm_all(plan.schemes().values(), verify=False, say=ignore)
        share = fit_memory(plan, source, spec.limit, self._threads, verify=False)
        sink = container_for(spec.out).open_sink(spec.out, plan)
        sink.attach()
        return _Job(plan, source, sink, share)

    def _plan(self) -> tuple[Plan, Checkpoint]:
        """Open the source and plan again. OutputError if it is another source here."""
        spec = self._spec
        try:
            source = open_checkpoint(spec.source, spec.name)
            if spec.adapter is not None:
                source = merge(source, spec.adapter, spec.name)
        except FormatError as error:
            raise OutputError(f"node {self._name}: {error}") from None
        plan = expect(source, spec.recipe, spec.out)
        if plan.digest(source) != spec.digest:
            raise OutputError(
                f"node {self._name}",
                f"sees another source at {spec.source}: its files differ in name, size or time",
                SHARED,
            )
        return plan, source
