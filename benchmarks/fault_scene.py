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
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from formats.family.rules import Form
from qwen35_convert import api, cli
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.run import bus_error
from qwen35_convert.run import items as run
from tests.checkpoints import hub_config, make_weights, text_config, write_checkpoint

NANO = Path(__file__).parent.parent / "tests" / "data" / "nano-dense"
SIDES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "merges.txt",
    "vocab.json",
    "preprocessor_config.json",
)
DONE, FELL_SHORT, INPUT, OUTPUT, BROKEN, INTERRUPTED = 0, 1, 3, 4, 70, 130
KILLED = -signal.SIGKILL
Prepare = Callable[[], object]
Trial = Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class Output:
    """One kind of output.

    entry      what others open: its presence says that the output is complete
    old        the recipe of what stands at OUT before, to be overwritten
    code       how an undisturbed run exits: 0, or 1 if it fails its gate
    """

    out: str
    recipe: str
    entry: str
    settings: tuple[str, ...] = ()
    source: str = "text"
    old: str | None = None
    code: int = 0


SHARDED = ("export.max_shard_size=400KB",)
GATE = ("verify.max_kl=0", f"verify.text={NANO / 'chat_template.jinja'}")
FORMATS = {
    "folder": Output("out", "fp8-block", "out", SHARDED),
    "folder over another": Output("out", "fp8-block", "out", SHARDED, old="bf16-split"),
    "gguf": Output("out.gguf", "gguf-bf16", "out.gguf"),
    "gguf over another": Output("out.gguf", "gguf-bf16", "out.gguf", old="gguf-q8_0"),
    "split gguf and mmproj": Output(
        "out.gguf",
        "gguf-bf16",
        "out-00001-of-00004.gguf",
        ("export.max_shard_size=1MB", "vision=keep"),
        "vision",
    ),
    "folder that fails its gate": Output(
        "out", "fp8-block", "out.failed", (*SHARDED, *GATE), code=FELL_SHORT
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion: where it works, from what, to which form of output."""

    place: Path
    source: Path
    form: Output
    workers: int

    @property
    def command(self) -> list[str]:
        """The command line."""
        settings = [word for setting in self.form.settings for word in ("--set", setting)]
        return [
            "qwen35",
            "convert",
            str(self.source),
            "-o",
            str(self.place / self.form.out),
            "--recipe",
            self.form.recipe,
            "--workers",
            str(self.workers),
            *settings,
            *(["--overwrite"] if self.form.old else []),
        ]

    @property
    def log(self) -> Path:
        """What it says, on stdout and stderr."""
        return self.place.with_name(f"{self.place.name}.log")

    def files(self) -> dict[str, bytes]:
        """Every file that belongs to OUT, hidden ones too."""
        found = sorted(path for path in self.place.rglob("*") if path.is_file())
        return {str(path.relative_to(self.place)): path.read_bytes() for path in found}


def make_source(folder: Path, *, vision: bool = False) -> Path:
    """Write a model of two layers that every format takes, in two files, with a tokenizer."""
    types = ["linear_attention", "full_attention"]
    config = (hub_config if vision else text_config)(
        vocab_size=2048,
        num_hidden_layers=2,
        layer_types=types,
        linear_value_head_dim=64,
        mtp_num_hidden_layers=1,
    )
    namespace = "hub" if vision else "text"
    weights = make_weights(config, Form(vision=vision), namespace=namespace)
    write_checkpoint(folder, config, weights, shards=2)
    for name in SIDES:
        shutil.copy(NANO / name, folder / name)
    return folder


def start(job: Job, prepare: Prepare | None = None) -> int:
    """Fork a child that runs the command after `prepare`; return its process id.

    It exits with 0 if the command exits as an undisturbed run does.
    """
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
        bus_error.exit_on_bus_error = _unblocking(bus_error.exit_on_bus_error)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = DONE if job.form.code == DONE else BROKEN
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else BROKEN
        code = DONE if code == job.form.code else BROKEN if code == DONE else code
    except BaseException:  # noqa: BLE001 - a bug, and the log says which
        traceback.print_exc()
    finally:
        os._exit(code)


def _unblocking(first: Callable[[int], None]) -> Callable[[int], None]:
    """Let SIGINT through after the command's first call: before it, no program has begun."""

    def call(code: int) -> None:
        first(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    return call


def finish(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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
        strange = set(job.files()) - set(self.clean(job)) - {f"{job.form.out}/lock"}
        assert not strange, f"left behind: {sorted(strange)}"
        shutil.rmtree(job.place)


def often() -> None:
    """Write the journal after every row, so that there is something to resume."""
    run.JOURNAL_SECONDS = 0.0
