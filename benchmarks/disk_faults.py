"""Faults of the disk, one at a time: kills and errors at every write, full and broken disks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.fault_jobs import (
    DONE,
    FORMATS,
    INPUT,
    KILLED,
    OUTPUT,
    Job,
    Prepare,
    Trial,
    finish,
    start,
)
from benchmarks.fault_scene import Scene, often
from benchmarks.faulty_disk import Disk, fail_reads, harm_source
from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe

HARMS = ("cut", "emptied", "removed", "replaced")


def steps(scene: Scene, count: int) -> Iterator[Trial]:
    """SIGKILL at each call that changes the disk."""
    for form in scene.forms:
        for n in _calls(scene, form, count):
            yield lambda form=form, n=n: _one_fault(
                scene, scene.job(form), lambda: Disk(n, "kill").install(), (KILLED,)
            )


def writes(scene: Scene, count: int) -> Iterator[Trial]:
    """ENOSPC and EIO at each call that changes the disk; at every fourth a disk that stays full."""
    for form in scene.forms:
        for n in _calls(scene, form, count):
            for kind in ("ENOSPC", "EIO", *(("ENOSPC for good",) if n % 4 == 0 else ())):
                yield lambda form=form, n=n, kind=kind: _one_fault(
                    scene, scene.job(form), lambda: Disk(n, kind).install(), (OUTPUT, DONE)
                )


def _calls(scene: Scene, form: str, count: int) -> list[int]:
    """Return the numbers of all calls of an undisturbed run, or `count` of them at random."""
    job, disk = scene.job(form), Disk()
    tally = job.place.with_name(f"{job.place.name}.tally")
    assert finish(start(job, lambda: (often(), disk.install(tally)))) == DONE, job.log.read_text()
    scene.clean(job)
    numbers = range(1, len(tally.read_bytes()) + 1)
    return sorted(scene.random.sample(numbers, min(count, len(numbers))))


def _one_fault(scene: Scene, job: Job, fault: Prepare, due: tuple[int, ...]) -> None:
    scene.clean(job)
    scene.check(job, finish(start(job, lambda: (often(), fault()))), due)
    scene.recover(job)


def full(scene: Scene, count: int) -> Iterator[Trial]:
    """Fill a real file system of each size up to what a conversion needs."""
    if subprocess.run(["mount", "--version"], capture_output=True, check=False).returncode:
        return
    for form in [name for name in scene.forms if not FORMATS[name].old]:
        needed = sum(map(len, scene.clean(scene.job(form)).values())) * 3 // 2
        for size in sorted(scene.random.sample(range(0, needed, 4096), count)):
            yield lambda form=form, size=size: _on_a_disk_of(size, scene, scene.job(form))


def _on_a_disk_of(size: int, scene: Scene, job: Job) -> None:
    def mount(option: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(job.place)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if not mount(f"size={max(4096, size)}"):
        raise PermissionError("mounting is not allowed here")
    try:
        scene.check(job, finish(start(job)), (OUTPUT, DONE))
        assert mount("remount,size=1g")
        assert finish(start(job)) == DONE or scene.is_complete(job), job.log.read_text()
        assert job.files() == scene.clean(job)
    finally:
        subprocess.run(["umount", str(job.place)], check=True)


def reads(scene: Scene, count: int) -> Iterator[Trial]:
    """EIO at the n-th file opened; a source that is cut, removed or replaced before row n."""
    for turn, form in enumerate(scene.forms):
        output = FORMATS[form]
        source = scene.sources[output.source]
        for n in range(1, min(count, 12) + 1):
            yield lambda form=form, n=n, source=source: _one_fault(
                scene, scene.job(form), lambda: fail_reads(source, n), (INPUT, DONE)
            )
        recipe, out = read_recipe(output.recipe, output.settings), source.parent / output.out
        rows = len(api.plan(source, recipe, out=out.with_name(f"planned-{out.name}")).items)
        for n in sorted(scene.random.sample(range(rows), min(count, rows))):
            for kind in _in_turn(HARMS, turn, count):
                yield lambda form=form, n=n, kind=kind: _harmed(scene, form, n, kind)


def _in_turn(kinds: Sequence[str], turn: int, count: int) -> list[str]:
    """Return up to `count` of the kinds, beginning with another one at each turn."""
    return [kinds[(turn + i) % len(kinds)] for i in range(min(count, len(kinds)))]


def _harmed(scene: Scene, form: str, row: int, kind: str) -> None:
    """Harm a copy of the source before a row; put it right again for the second run."""
    job = scene.job(form)
    source = job.source
    kept = job.place.with_name(f"{job.place.name}.source")
    shutil.copytree(source, kept / "source", copy_function=shutil.copy2)
    job = replace(job, source=kept / "source")
    scene.clean(replace(job, source=source))
    scene.check(
        job, finish(start(job, lambda: (often(), harm_source(job.source, row, kind)))), (INPUT,)
    )
    shutil.rmtree(kept / "source")
    shutil.copytree(source, kept / "source", copy_function=shutil.copy2)
    scene.recover(job)
    shutil.rmtree(kept)
