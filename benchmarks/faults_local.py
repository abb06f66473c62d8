"""Convert a small model while this machine fails: kills, full and broken disks, Ctrl-C, races.

    python -m benchmarks.faults_local [--what KIND ...] [--count 200] [--seed 0] [--record]

What must hold after every fault: the exit code of its kind, one block on stderr and no traceback,
OUT absent or complete; and the same command again gives the bytes of an undisturbed run.

    kills       SIGKILL at random moments, again and again until a run comes through
    steps       SIGKILL at every call that changes the disk, one after another
    writes      ENOSPC and EIO at every such call; at every fourth also a disk that stays full
    full        real small file systems, one size after another (needs the right to mount)
    reads       EIO at every file opened; a source cut, removed or replaced before every row
    interrupts  SIGINT at random moments
    races       two conversions into one OUT
    hostile     every case of tests/hostile through the command

Everything is imported once; each case is a forked child that runs the command's `main`. One JSON
line for each kind, {"what", "tried", "ok"}, is printed, and appended to
benchmarks/results/faults.jsonl with --record. Exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.faulty_disk import Disk, fail_reads, harm_source
from qwen35_convert import api, cli, run
from qwen35_convert.recipe import read_recipe
from tests.checkpoints import make_weights, text_config, write_checkpoint

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "faults.jsonl"
NANO = ROOT / "tests" / "data" / "nano-dense"
SIDES = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json")
DONE, INPUT, OUTPUT, BROKEN, INTERRUPTED = 0, 3, 4, 70, 130
KILLED = -signal.SIGKILL
FORMATS = {"folder": ("out", "fp8-block"), "gguf": ("out.gguf", "gguf-bf16")}
Prepare = Callable[[], object]


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
    from formats.qwen35 import Form

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


Trial = Callable[[], int | None]


def kills(scene: Scene, count: int) -> Iterator[Trial]:
    """SIGKILL at random moments; a trial kills until a run comes through, and returns how often."""
    while scene.hits < count:
        yield lambda: _killed(scene, scene.job(scene.random.choice(sorted(FORMATS)),
                                               scene.random.choice((1, 2))))  # fmt: skip


def _killed(scene: Scene, job: Job) -> int:
    scene.clean(job)
    hits, code = 0, KILLED
    while code == KILLED and not scene.is_complete(job) and hits < 8:
        pid = start(job, scene.random.choice((None, often)))
        time.sleep(scene.random.uniform(0, 1.1 * scene.seconds[job.out]))
        os.kill(pid, signal.SIGKILL)
        code = finish(pid)
        scene.check(job, code, (KILLED, DONE))
        hits += code == KILLED
    scene.recover(job)
    scene.hits += hits
    return hits


def steps(scene: Scene, count: int) -> Iterator[Trial]:
    """SIGKILL at each call that changes the disk."""
    for form in FORMATS:
        for n in _calls(scene, form, count):
            yield lambda form=form, n=n: _one_fault(
                scene, scene.job(form), lambda: Disk(n, "kill").install(), (KILLED,)
            )


def writes(scene: Scene, count: int) -> Iterator[Trial]:
    """ENOSPC and EIO at each call that changes the disk; at every fourth a disk that stays full."""
    for form in FORMATS:
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
    for form in FORMATS:
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
    for form in FORMATS:
        for n in range(1, min(count, 12) + 1):
            yield lambda form=form, n=n: _one_fault(
                scene, scene.job(form), lambda: fail_reads(scene.source, n), (INPUT, DONE)
            )
        rows = len(api.plan(scene.source, read_recipe(FORMATS[form][1]),
                            out=FORMATS[form][0]).rows)  # fmt: skip
        for n in sorted(scene.random.sample(range(rows), min(count, rows))):
            for kind in ("cut", "emptied", "removed", "replaced"):
                yield lambda form=form, n=n, kind=kind: _harmed(scene, form, n, kind)


def _harmed(scene: Scene, form: str, row: int, kind: str) -> None:
    """Harm a copy of the source before a row; put it right again for the second run."""
    job = scene.job(form)
    kept = job.place.with_name(f"{job.place.name}.source")
    shutil.copytree(scene.source, kept / "source", copy_function=shutil.copy2)
    job = replace(job, source=kept / "source")
    scene.clean(replace(job, source=scene.source))
    scene.check(job, finish(start(job, lambda: (often(), harm_source(job.source, row, kind)))),
                (INPUT,))  # fmt: skip
    shutil.rmtree(kept / "source")
    shutil.copytree(scene.source, kept / "source", copy_function=shutil.copy2)
    scene.recover(job)
    shutil.rmtree(kept)


def interrupts(scene: Scene, count: int) -> Iterator[Trial]:
    """SIGINT at random moments."""
    for _ in range(count):
        form, workers = scene.random.choice(sorted(FORMATS)), scene.random.choice((1, 2))
        part = scene.random.uniform(0, 1.05)
        yield lambda form=form, workers=workers, part=part: _interrupted(
            scene, scene.job(form, workers), part
        )


def _interrupted(scene: Scene, job: Job, part: float) -> None:
    scene.clean(job)
    pid = start(job, scene.random.choice((None, often)))
    time.sleep(part * scene.seconds[job.out])
    os.kill(pid, signal.SIGINT)
    scene.check(job, finish(pid), (INTERRUPTED, DONE))
    scene.recover(job)


def races(scene: Scene, count: int) -> Iterator[Trial]:
    """Two conversions into one OUT, the second at a random moment of the first."""
    for _ in range(count):
        form, part = scene.random.choice(sorted(FORMATS)), scene.random.uniform(0, 1.1)
        yield lambda form=form, part=part: _race(scene, scene.job(form), part)


def _race(scene: Scene, job: Job, part: float) -> None:
    scene.clean(job)
    first = start(job, scene.random.choice((None, often)))
    time.sleep(part * scene.seconds[job.out])
    codes = [finish(start(job)), finish(first)]
    assert sorted(codes) == [DONE, OUTPUT], f"exit codes {codes}: {job.log.read_text()}"
    scene.recover(job)


def hostile(scene: Scene, count: int) -> Iterator[Trial]:
    """Every hostile case through the command."""
    from tests.hostile import case, test_hostile

    good = case.write_good(scene.folder / "good")
    for one in test_hostile.CASES[: count * 10]:
        yield lambda one=one: _refused(scene, good, one)


def _refused(scene: Scene, good: Path, case: object) -> None:
    from tests.hostile import test_hostile

    job = scene.job("folder")
    source, recipe = test_hostile.prepare(case, good, job.place)
    job = replace(job, source=source, recipe=recipe)
    changes = [word for change in case.overrides for word in ("--set", change)]

    def command() -> None:
        sys.argv = [*job.command[:-2], "--no-verify", *changes]
        os.chdir(job.place)

    code = finish(start(job, command))
    said = job.log.read_text(errors="replace")
    assert code == case.code, f"exit {code}, expected {case.code}: {said}"
    assert "Traceback" not in said, said
    assert (job.place / "out").exists() == (code == DONE)
    shutil.rmtree(job.place)


KINDS = {kind.__name__: kind for kind in (kills, steps, writes, full, reads, interrupts, races,
                                          hostile)}  # fmt: skip
NAMES = {"steps": "kills at every write", "writes": "write faults", "full": "full disks",
         "reads": "read faults", "hostile": "hostile inputs"}  # fmt: skip


def try_all(what: str, scene: Scene, count: int) -> dict[str, object]:
    """Run every trial of a kind; print those that fail."""
    tried = ok = 0
    started = time.monotonic()
    for trial in KINDS[what](scene, count):
        try:
            faults = trial()
        except AssertionError as failure:
            tried += 1
            print(f"{what}, trial {tried}: {failure}", file=sys.stderr)
        else:
            faults = 1 if faults is None else faults
            tried, ok = tried + faults, ok + faults
    return {
        "what": NAMES.get(what, what), "tried": tried, "ok": ok,
        "seconds": round(time.monotonic() - started, 1), "machine": platform.machine(),
        "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    """Try what is asked for; exit 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--what", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), asked.seed)
        for what in asked.what:
            line = try_all(what, scene, asked.count)
            failed |= line["ok"] != line["tried"]
            print(json.dumps(line), flush=True)
            if asked.record:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
