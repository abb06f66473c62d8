"""Conversions in forked children, as the faults of this machine are tried on them.

Each case is a forked child that runs the command's `main`, with everything imported by its parent.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from formats.family.slots import Form
from qwen35_convert import cli
from qwen35_convert.run import bus_error
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
        code = _run(job, prepare)
    finally:
        os._exit(code)


def _run(job: Job, prepare: Prepare | None) -> int:
    """Run the command in this child; return 0 if it exits as an undisturbed run does."""
    try:
        _begin(job, prepare)
        cli.main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = DONE
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else BROKEN
    except BaseException:  # noqa: BLE001 - a bug, and the log says which
        traceback.print_exc()
        return BROKEN
    if code == job.form.code:
        return DONE
    return BROKEN if code == DONE else code


def _begin(job: Job, prepare: Prepare | None) -> None:
    """Send what is printed to the log, and let SIGINT through once the command has begun."""
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = job.command
    if prepare:
        prepare()
    bus_error.exit_on_bus_error = _unblocking(bus_error.exit_on_bus_error)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _unblocking(first: Callable[[int], None]) -> Callable[[int], None]:
    """Let SIGINT through after the command's first call: before it, no program has begun."""

    def call(code: int) -> None:
        first(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    return call


def finish(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
