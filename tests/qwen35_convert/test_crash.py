"""Kills, full disks, Ctrl-C and races on this machine: nothing is lost, nothing is half-written.

The scenes are those of `benchmarks.faults_local`, here a few of each kind; there hundreds. They run
in their own process, which imports everything once and forks a child for each fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35_convert import api
from qwen35_convert.errors import OutputError
from qwen35_convert.planning.plan import Shard
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.out import partial_of
from qwen35_convert.write.sink import FolderSink

ROOT = Path(__file__).parents[2]
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="forks after torch is loaded")


def sink_of(out: Path) -> FolderSink:
    return FolderSink(out, [Shard("model.safetensors", (), b"head", (), 64)])


@needs_linux
@pytest.mark.all
def test_faults_of_this_machine_cost_nothing_but_time():
    """SIGKILL, ENOSPC, EIO, SIGINT, a source that shrinks, two conversions at once."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.faults_local",
        "--count",
        "1",
        "--what",
        "kills",
        "steps",
        "writes",
        "reads",
        "interrupts",
        "races",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 6
    assert all(line["tried"] == line["ok"] >= 1 for line in lines)


def test_a_journal_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    """A crash between creating and writing it must not leave a journal that belongs to nobody."""

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    journal = Journal(tmp_path / "journal", "digest")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.start()
    assert not (tmp_path / "journal").exists()
    journal.start()
    assert Journal(tmp_path / "journal", "digest").resume()


@pytest.mark.parametrize("tail", ["3", "\0\0\0\n", "x\n", "-1\n", "\u0663\n", "7\n\n"])
def test_what_is_no_row_in_a_journal_is_ignored(tmp_path, tail):
    (tmp_path / "journal").write_text(f"digest\n1\n2\n{tail}")
    journal = Journal(tmp_path / "journal", "digest")
    assert journal.resume()
    assert journal.done - {7} == {1, 2}


def test_an_fsync_that_failed_is_never_taken_for_done(tmp_path, monkeypatch):
    """The kernel reports lost pages once; a second fsync succeeds though they are gone."""
    sink = sink_of(tmp_path / "out")
    sink.open()
    sink.create()

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(OutputError, match="Input/output error"):
            sink.sync()
    with pytest.raises(OutputError, match="Input/output error"):
        sink.sync()
    sink.close()


def test_a_journal_does_not_outlive_the_files_it_speaks_of(tmp_path):
    sink = sink_of(tmp_path / "out")
    sink.open()
    sink.create()
    assert sink.is_whole()
    (sink.work / "model.safetensors").write_bytes(b"short")
    assert not sink.is_whole()
    (sink.work / "model.safetensors").unlink()
    assert not sink.is_whole()
    sink.close()


def test_what_a_killed_run_left_is_no_part_of_the_artifact(tmp_path):
    """A receipt half-written would be listed in the new one, and fail its own verification."""
    sink = sink_of(tmp_path / "out")
    sink.open()
    (sink.work / "qwen35-receipt.json").write_bytes(b"{")
    sink.create()
    assert list(sink.artifact_files()) == ["model.safetensors"]
    assert not (sink.work / "qwen35-receipt.json").exists()
    sink.close()


def test_a_lock_in_a_folder_that_was_renamed_is_refused(tmp_path, monkeypatch):
    """Another conversion commits between our opening the lock and taking it."""
    import fcntl

    out = tmp_path / "out"

    def taken(*_: object) -> None:
        partial_of(out).rename(out)

    monkeypatch.setattr(fcntl, "flock", taken)
    with pytest.raises(OutputError, match="has just been written by another conversion"):
        sink_of(out).open()


@pytest.mark.parametrize(
    ("out", "recipe", "settings"),
    [
        ("out", "bf16-split", ()),
        ("m.gguf", "gguf-bf16", ()),
        ("m.gguf", "gguf-bf16", ("export.max_shard_size=1MB", "vision=keep")),
    ],
)
def test_what_a_rival_finished_meanwhile_is_kept(tmp_path, nano, out, recipe, settings):
    """It began after this conversion had looked at OUT, and ended before it locked it."""
    chosen, before = read_recipe(recipe, settings), {}

    def rival(_) -> None:
        api.convert(nano, tmp_path / out, chosen, options=api.RunOptions(verify=False))
        before.update({path: path.stat().st_ino for path in tmp_path.rglob("*")})

    with pytest.raises(OutputError, match="another conversion"):
        api.convert(
            nano, tmp_path / out, chosen, options=api.RunOptions(verify=False, on_plan=rival)
        )
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before
