"""The memory of a conversion, fitted to a limit before a byte is written.

    limit >= program and plan + mapped pages + workers * (chunk_bytes + OVERHEAD)

The program and the plan are measured: what this process holds after the encoders of the plan are
loaded and compiled. Mapped pages of the source (and of the artifact, when it is verified) are given
back after every 16 MB. What is left is shared among the workers: first the chunks become
smaller (`chunk_bytes`), then the workers fewer; less than one worker with its smallest chunk is
refused.

Without `--memory-limit` the command takes 600 MB, or three quarters of what the machine has free
where that is less; a plan that needs more gets it, and so does a chunk of the usual size: with the
smallest, writing takes 50 times as long. A caller in Python, whose process may be of any size,
takes three quarters of what is free.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from formats.checkpoint import MAX_MAPPED, Checkpoint
from formats.family.moves import VIEWS
from quant.stored import CHUNK_BYTES, scheme_of
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import Limit, Share
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.sizes import mb_text

SHARE = 0.75
MARGIN = 32 << 20  # what is loaded later: receipt, hashes, bars, pages of code not yet run
OVERHEAD = 4 << 20  # of a worker: its stack, the heap's slack, a chunk that is being hashed
PER_TENSOR = 2048  # what verification keeps of each tensor: header, atom, figures


@dataclass(frozen=True, slots=True)
class Need:
    """What a conversion needs in bytes.

    base    the program and the plan; of a stream the blocks that are held
    least   the smallest chunk of the widest item, and what merging an adapter holds
    verify  what verification keeps, and that it maps the artifact too; 0 without it
    """

    base: int
    least: int
    verify: int = 0

    @property
    def floor(self) -> int:
        """The least limit with which it runs, on one worker."""
        convert = self.least + OVERHEAD
        check = self.verify + max(CHUNK_BYTES, self.least) + OVERHEAD if self.verify else 0
        return self.base + MARGIN + MAX_MAPPED + max(convert, check)

    @property
    def usual(self) -> int:
        """The limit from which a worker has a chunk of the usual size."""
        return self.floor + max(0, CHUNK_BYTES - self.least)

    def part(self, limit: int, workers: int) -> Share:
        """Part what is left of a limit among workers, as many as fit."""
        free = limit - self.base - MARGIN - MAX_MAPPED
        fit = max(1, min(workers, free // (self.least + OVERHEAD)))
        chunk = min(max(self.least, free // fit - OVERHEAD), max(CHUNK_BYTES, self.least))
        each = max(CHUNK_BYTES, self.least) + OVERHEAD
        return Share(fit, chunk, max(1, min(workers, (free - self.verify) // each)))


def fit_memory(
    plan: Plan, source: Checkpoint, limit: Limit | None, workers: int, *, verify: bool
) -> Share:
    """Return how to work within a limit (None: the machine's). RecipeError if it is too small.

    What this process holds counts, so what the plan runs is loaded by now: `first_use`.
    """
    base = resident() + (source.remote.held_bytes if source.remote is not None else 0)
    merging = source.overlay.held_bytes if source.overlay is not None else 0
    need = Need(base, _least(plan, source) + merging, _kept(plan) if verify else 0)
    return need.part(_checked(limit, need), workers)


def fit_verification(source: Checkpoint | None, limit: Limit | None, workers: int) -> int:
    """Return how many workers verify within a limit. RecipeError if not even one does."""
    atoms = len(source.layout.atoms) if source else 0
    need = Need(resident(), 0, MAX_MAPPED + PER_TENSOR * atoms)
    return need.part(_checked(limit, need), workers).verifiers


def _checked(limit: Limit | None, need: Need) -> int:
    """Return the bytes of a limit. RecipeError if it is less than what is needed."""
    machine = need.base + int(SHARE * free_memory())
    if limit is None or not limit.firm:
        wished = max(limit.nbytes, need.usual) if limit else machine
        return max(need.floor, min(machine, wished))
    if limit.nbytes < need.floor:
        where = (
            f"{mb_text(need.base + MARGIN)} the program and the plan, "
            f"{mb_text(MAX_MAPPED)} pages of the source, {mb_text(need.least)} the smallest chunk"
            + (f", {mb_text(need.verify)} verification" if need.verify else "")
        )
        got, expected = f"is {mb_text(limit.nbytes)}", f"{mb_text(need.floor)} or more"
        raise RecipeError("--memory-limit", got, expected, where=where)
    return limit.nbytes


def _least(plan: Plan, source: Checkpoint) -> int:
    return max(_least_of(item, source) for item in plan.items)


def _least_of(item: Item, source: Checkpoint) -> int:
    """Return the bytes of an item's smallest chunk."""
    moved = bool(item.ops) or not all(isinstance(op, VIEWS) for op in item.atom.ops)
    cost = scheme_of(item.atom).cost(moved=moved).read + item.scheme.cost(moved=moved).write
    count = min(item.scheme.row_multiple, *item.atom.shape[:1])
    return count * prod(item.atom.shape[1:]) * cost


def _kept(plan: Plan) -> int:
    return MAX_MAPPED + PER_TENSOR * sum(len(shard.infos) for shard in plan.shards)


def resident() -> int:
    """Return the bytes of memory that this process holds now; elsewhere than on Linux its peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return _kilobytes(status, "VmRSS:") or 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int:
    """Return the bytes that this process may use: free on the machine, within every limit on us."""
    return min([_of_machine(), *group_limits()])


def _of_machine() -> int:
    free = _kilobytes(Path("/proc/meminfo"), "MemAvailable:")
    return free or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def group_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Yield every limit that a control group sets on this process: version 2, and 1's memory.

    Not what is left of it: most of what a group uses is cached files, which are evicted.
    """
    for line in own.read_text().splitlines() if own.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        here = root / kinds / path.lstrip("/")
        for folder in (here, *here.parents):
            file = folder / ("memory.limit_in_bytes" if kinds else "memory.max")
            text = file.read_text().strip() if file.is_file() else ""
            if text.isascii() and text.isdigit():
                yield int(text)
            if folder == root / kinds:
                break


def _kilobytes(path: Path, key: str) -> int | None:
    if not path.exists():
        return None
    lines = (line.split() for line in path.read_text().splitlines() if line.startswith(key))
    return next((int(words[1]) * 1024 for words in lines), None)
