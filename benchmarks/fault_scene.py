"""What the faults of this machine are tried on: conversions in forked children, and what is due.

Everything is imported once, by a first conversion of each format; each case is a forked child that
runs the command's `main`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from formats.qwen35 import Form
from qwen35_convert import api, cli, run
from qwen35_convert.recipe import read_recipe
from tests.checkpoints import make_weights, text_config, write_checkpoint

NANO = Path(__file__).parent.parent / "tests" / "data" / "nano-dense"
SIDES = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json")
DONE, INPUT, OUTPUT, BROKEN, INTERRUPTED = 0, 3, 4, 70, 130
KILLED = -signal.SIGKILL
FORMATS = {"folder": ("out", "fp8-block"), "gguf": ("out.gguf", "gguf-bf16")}
Prepare = Callable[[], object]
Trial = Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion: where it works, from what, to which OUT, how."""

    place: Path
    source: Path
    out: str
    recipe: str
    workers: int

    @property
    def command(self) -> list[str]:
        """The command line."""
        sizes = ["--set", "export.max_shard_size=400KB"] if self.out == "out" else []
        return ["qwen35", "convert", str(self.source), "-o", str(self.place / self.out),
                "--recipe", self.recipe, "--workers", str(self.workers), *sizes]  # fmt: skip

    @property
    def log(self) -> Path:
        """What it says, on stdout and stderr."""
        return self.place.with_name(f"{self.place.name}.log")

    def files(self) -> dict[str, bytes]:
        """Every file that belongs to OUT, hidden ones too."""
        found = sorted(path for path in self.place.rglob("*") if path.is_file())
        return {str(path.relative_to(self.place)): path.read_bytes() for path in found}


def make_source(folder: Path) -> Path:
    """Write a model of two layers that every format takes, in two files, with a tokenizer."""
    types = ["linear_attention", "full_attention"]
    config = text_config(vocab_size=2048, num_hidden_layers=2, layer_types=types,
                         linear_value_head_dim=64, mtp_num_hidden_layers=1)  # fmt: skip
    weights = make_weights(config, Form(vision=False), namespace="text")
    write_checkpoint(folder, config, weights, shards=2)
    for name in SIDES:
        shutil.copy(NANO / name, folder / name)
    return folder


def start(job: Job, prepare: Prepare | None = None) -> int:
    """Fork a child that runs the command after `prepare`; return its process id."""
    job.log.write_text("")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the command itself runs
    pid = os.fork()
    if pid:
        signal.signal(signal.SIGINT, before)
        return pid
    code = BROKEN
    try:
        said = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.argv = job.command
        if prepare:
            prepare()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = DONE
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else BROKEN
    finally:
        os._exit(code)


def finish(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Scene:
    """Fresh places to work in, and what an undisturbed run gives for each job."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.source = make_source(folder / "source")
        (folder / "warm").mkdir()
        self._count = self.hits = 0
        self._clean: dict[tuple[str, str], dict[str, bytes]] = {}
        self.seconds: dict[str, float] = {}
        for out, recipe in FORMATS.values():  # imports and compiles once, for all children
            api.convert(self.source, folder / "warm" / out, read_recipe(recipe), workers=1)

    def job(self, form: str, workers: int = 1, source: Path | None = None) -> Job:
        """Return a job in a new place."""
        self._count += 1
        place = self.folder / f"{self._count:05d}"
        place.mkdir()
        out, recipe = FORMATS[form]
        return Job(place, source or self.source, out, recipe, workers)

    def clean(self, job: Job) -> dict[str, bytes]:
        """Return the bytes of an undisturbed run of a job."""
        key = (job.out, job.source.name)
        if key not in self._clean:
            undisturbed = replace(job, place=self.folder / f"clean-{job.out}-{job.source.name}")
            undisturbed.place.mkdir()
            started = time.monotonic()
            code = finish(start(undisturbed))
            assert code == DONE, undisturbed.log.read_text()
            self.seconds[job.out] = time.monotonic() - started
            self._clean[key] = undisturbed.files()
        return self._clean[key]

    def is_complete(self, job: Job) -> bool:
        """Whether OUT stands there; it must then be whole, or all is lost."""
        if not (job.place / job.out).exists():
            return False
        found, clean = job.files(), self.clean(job)
        wrong = [name for name, content in clean.items() if found.get(name) != content]
        assert not wrong, f"{job.place / job.out} is there, but not {wrong} as in a clean run"
        return True

    def check(self, job: Job, code: int, due: tuple[int, ...]) -> None:
        """Hold a run against what is due: its code, one block, OUT absent or complete."""
        said = job.log.read_text()
        assert code in due, f"exit {code}, expected {due}: {said}"
        assert "Traceback" not in said, said
        if code in (INPUT, OUTPUT, INTERRUPTED):
            assert said.count("qwen35: ") == 1, said
        complete = self.is_complete(job)
        assert complete or code != DONE, "exit 0, but there is no OUT"

    def recover(self, job: Job) -> None:
        """Run the same command undisturbed: its bytes are those of a clean run, nothing else is."""
        there = self.is_complete(job)
        code = finish(start(job))
        self.check(job, code, (DONE, OUTPUT) if there else (DONE,))
        assert self.is_complete(job), "there is no OUT after the last run"
        strange = set(job.files()) - set(self.clean(job)) - {f"{job.out}/lock"}
        assert not strange, f"left behind: {sorted(strange)}"
        shutil.rmtree(job.place)


def often() -> None:
    """Write the journal after every row, so that there is something to resume."""
    run.JOURNAL_SECONDS = 0.0
