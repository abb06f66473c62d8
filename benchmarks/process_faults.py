"""What befalls a process: kills and Ctrl-C at random moments, rivals for one OUT, hostile input."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.fault_jobs import DONE, INTERRUPTED, KILLED, OUTPUT, Job, Trial, finish, start
from benchmarks.fault_scene import Scene, often
from tests.hostile import case, test_hostile


def kills(scene: Scene, count: int) -> Iterator[Trial]:
    """SIGKILL at random moments; a trial kills until a run comes through, and returns how often."""
    while scene.hits < count:
        yield lambda: _killed(
            scene, scene.job(scene.random.choice(scene.forms), scene.random.choice((1, 2)))
        )


def _killed(scene: Scene, job: Job) -> int:
    scene.clean(job)
    hits, code = 0, KILLED
    while code == KILLED and not scene.is_complete(job) and hits < 8:
        pid = start(job, scene.random.choice((None, often)))
        time.sleep(scene.random.uniform(0, 1.1 * scene.seconds[job.form]))
        os.kill(pid, signal.SIGKILL)
        code = finish(pid)
        scene.check(job, code, (KILLED, DONE))
        hits += code == KILLED
    scene.recover(job)
    scene.hits += hits
    return hits


def interrupts(scene: Scene, count: int) -> Iterator[Trial]:
    """SIGINT at random moments."""
    for _ in range(count):
        form, workers = scene.random.choice(scene.forms), scene.random.choice((1, 2))
        part = scene.random.uniform(0, 1.05)
        yield lambda form=form, workers=workers, part=part: _interrupted(
            scene, scene.job(form, workers), part
        )


def _interrupted(scene: Scene, job: Job, part: float) -> None:
    scene.clean(job)
    pid = start(job, scene.random.choice((None, often)))
    time.sleep(part * scene.seconds[job.form])
    os.kill(pid, signal.SIGINT)
    scene.check(job, finish(pid), (INTERRUPTED, DONE))
    scene.recover(job)


def races(scene: Scene, count: int) -> Iterator[Trial]:
    """Two conversions into one OUT, the second at a random moment of the first."""
    for _ in range(count):
        form, part = scene.random.choice(scene.forms), scene.random.uniform(0, 1.1)
        yield lambda form=form, part=part: _race(scene, scene.job(form), part)


def _race(scene: Scene, job: Job, part: float) -> None:
    scene.clean(job)
    first = start(job, scene.random.choice((None, often)))
    time.sleep(part * scene.seconds[job.form])
    codes = [finish(start(job)), finish(first)]
    again = job.form.old or job.form.code  # then OUT is no obstacle to the one that comes later
    due = ([DONE, OUTPUT], [DONE, DONE]) if again else ([DONE, OUTPUT],)
    assert sorted(codes) in due, f"exit codes {codes}: {job.log.read_text()}"
    scene.recover(job)


def hostile(scene: Scene, count: int) -> Iterator[Trial]:
    """Every hostile case through the command."""
    good = case.write_good(scene.folder / "good")
    for one in test_hostile.CASES[: count * 10]:
        yield lambda one=one: _refused(scene, good, one)


def _refused(scene: Scene, good: Path, one: case.Case) -> None:
    job = scene.job("folder")
    source, recipe = test_hostile.prepare(one, good, job.place)
    plain = replace(job.form, recipe=recipe, settings=())
    job = replace(job, source=source, form=plain)
    changes = [word for change in one.overrides for word in ("--set", change)]

    def command() -> None:
        sys.argv = [*job.command, "--no-verify", *changes]
        os.chdir(job.place)

    code = finish(start(job, command))
    log = job.log.read_text(errors="replace")
    assert code == one.code, f"exit {code}, expected {one.code}: {log}"
    assert "Traceback" not in log, log
    assert (job.place / "out").exists() == (code == DONE)
    shutil.rmtree(job.place)
