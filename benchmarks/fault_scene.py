"""What the faults of this machine are tried on: fresh places to convert in, and what is due there.

Everything is imported once, by a first conversion of each format, for all children of `fault_jobs`.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fault_jobs import (
    DONE,
    FORMATS,
    INPUT,
    INTERRUPTED,
    OUTPUT,
    Job,
    Output,
    finish,
    make_source,
    start,
)
from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.run import items as run


class Scene:
    """Fresh places to work in, and what an undisturbed run gives for each job.

    forms  names of the outputs that are tried
    """

    def __init__(self, folder: Path, seed: int, forms: Sequence[str] = tuple(FORMATS)) -> None:
        self.folder, self.random, self.forms = folder, random.Random(seed), sorted(forms)
        self.sources = {
            kind: make_source(folder / kind / "source", vision=kind == "vision")
            for kind in ("text", "vision")
        }
        (folder / "warm").mkdir()
        self._count = self.hits = 0
        self._clean: dict[tuple[Output, str], dict[str, bytes]] = {}
        self._old: dict[Output, dict[str, bytes]] = {}
        self.seconds: dict[Output, float] = {}
        for form in FORMATS.values():  # imports and compiles once, for all children
            for recipe in filter(None, (form.recipe, form.old)):
                self._convert(form, recipe, folder / "warm" / form.out)

    def _convert(self, form: Output, recipe: str, out: Path) -> None:
        api.convert(
            self.sources[form.source],
            out,
            read_recipe(recipe, form.settings if form.code else ()),  # imports what a gate needs
            options=api.RunOptions(workers=1, overwrite=True),
        )

    def job(self, form: str, workers: int = 1) -> Job:
        """Return a job in a new place; where something is to be overwritten, it stands there."""
        self._count += 1
        place = self.folder / f"{self._count:05d}"
        place.mkdir()
        output = FORMATS[form]
        job = Job(place, self.sources[output.source], output, workers)
        for name, content in self.old(output).items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(content)
        return job

    def old(self, form: Output) -> dict[str, bytes]:
        """Return the files that stand where this output shall be."""
        if form.old and form not in self._old:
            made = replace(self.job_of_nothing(form), place=self.folder / f"old-{form.recipe}")
            made.place.mkdir()
            self._convert(form, form.old, made.place / form.out)
            self._old[form] = made.files()
        return self._old.get(form, {})

    def job_of_nothing(self, form: Output) -> Job:
        """Return a job that is not to be run: where it works is to be said."""
        return Job(self.folder, self.sources[form.source], form, 1)

    def clean(self, job: Job) -> dict[str, bytes]:
        """Return the bytes of an undisturbed run of a job."""
        key = (job.form, job.source.name)
        if key not in self._clean:
            undisturbed = replace(job, place=self.folder / f"clean-{len(self._clean)}")
            undisturbed.place.mkdir()
            started = time.monotonic()
            code = finish(start(undisturbed))
            assert code == DONE, undisturbed.log.read_text()
            self.seconds[job.form] = time.monotonic() - started
            self._clean[key] = undisturbed.files()
        return self._clean[key]

    def is_complete(self, job: Job) -> bool:
        """Whether OUT stands there; it must then be whole, or all is lost."""
        entry, old = job.form.entry, self.old(job.form)
        if not (job.place / entry).exists():
            assert not old, f"{job.place / entry} is gone"
            return False
        found, clean = job.files(), self.clean(job)
        standing = {n: found.get(n) for n in old if n == entry or n.startswith(f"{entry}/")}
        if old and standing == {n: old[n] for n in standing}:
            return False
        wrong = [name for name, content in clean.items() if found.get(name) != content]
        assert not wrong, f"{job.place / entry} is there, but not {wrong} as in a clean run"
        return True

    def check(self, job: Job, code: int, due: tuple[int, ...]) -> None:
        """Hold a run against what is due: its code, one block, OUT absent or complete."""
        log = job.log.read_text()
        assert code in due, f"exit {code}, expected {due}: {log}"
        assert "Traceback" not in log, log
        if code in (INPUT, OUTPUT, INTERRUPTED):
            assert log.count("qwen35: ") == 1, log
        complete = self.is_complete(job)
        assert complete or code != DONE, "exit 0, but there is no OUT"

    def recover(self, job: Job) -> None:
        """Run the same command undisturbed: its bytes are those of a clean run, nothing else is."""
        there = self.is_complete(job)
        code = finish(start(job))
        self.check(job, code, (DONE, OUTPUT) if there else (DONE,))
        assert self.is_complete(job), "there is no OUT after the last run"
        strange = set(job.files()) - set(self.clean(job)) - {f"{job.form.out}/lock"}
        assert not strange, f"left behind: {sorted(strange)}"
        shutil.rmtree(job.place)


def often() -> None:
    """Write the journal after every row, so that there is something to resume."""
    run.JOURNAL_SECONDS = 0.0
