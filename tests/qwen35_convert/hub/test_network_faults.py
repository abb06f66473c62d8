"""Faults of the network, one at a time, against a hub of our own: what the commands answer.

Each case: the exit code is right; after a failure nothing stands at OUT (of a download: nothing but
finished files); the same command without the fault then gives the bytes of an undisturbed run. With
--all-faults every command meets every fault at every place; without it, a choice of them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from qwen35_convert import api, cli, source
from qwen35_convert.hub import remote_blocks, stream
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.qwen35_convert.hub.hub_server import Fault, Hub, point_to

REPO = "maker/tiny-qwen"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
BLOCK, HELD_BLOCKS, AHEAD = 1 << 17, 4, 2  # less than the model, so that blocks are read again
COMMANDS = ("download", "convert", "stream")
FOR_EVER = 40  # more than huggingface_hub's tries times ours
DONE, REFUSED, MISUSED = 0, 3, 2

PASSING = {
    "cut": [Fault(cut=10)],
    "reset": [Fault(cut=10, reset=True)],
    "503": [Fault(503), Fault(503)],
    "429": [Fault(429, retry_after="7")],
    "429 for an hour": [Fault(429, retry_after="3600")],
    "short": [Fault(grow=-10)],
    "long": [Fault(grow=10)],
}
LASTING = {
    "503 for ever": [Fault(503)] * FOR_EVER,
    "cut for ever": [Fault(cut=0)] * FOR_EVER,
    "404": [Fault(404, headers=(("X-Error-Code", "EntryNotFound"),))] * FOR_EVER,
    "gated": [Fault(401, headers=(("X-Error-Code", "GatedRepo"),))] * FOR_EVER,
    "wrong byte": [Fault(flip=50)],
}
# Only whoever asks for ranges can be answered another one.
OF_RANGES = {
    "whole file": [Fault(whole=True)],
    "other range": [Fault(headers=(("Content-Range", "bytes 0-1/99"),))],
    "other etag": [Fault(headers=(("ETag", '"other"'),))],
    "expired address": [Fault(403)],
}
PLACES = {
    "listing": ("api", REPO, None),
    "index": ("GET", INDEX, None),
    "config": ("GET", "config.json", None),
    "tokenizer": ("GET", "tokenizer.json", None),
    "address of shard 1": ("HEAD", SHARDS[0], None),
    "header of shard 1": ("GET", SHARDS[0], 0.0),
    "middle of shard 1": ("GET", SHARDS[0], 0.5),
    "end of shard 2": ("GET", SHARDS[1], 1.0),
}


@dataclass(frozen=True)
class Case:
    """A command, what goes wrong where, and the exit code that it gives."""

    command: str
    place: str
    fault: str
    code: int

    def __str__(self) -> str:
        return f"{self.command}-{self.place}-{self.fault}".replace(" ", "_")


def passing(place: str) -> tuple[str, ...]:
    """All faults in the middle of the weights, two of them where little is at stake."""
    if place in ("index", "config", "tokenizer"):
        return ("cut", "503")
    return tuple(PASSING) if place == "middle of shard 1" else ("cut", "reset", "503", "429")


def cases() -> Iterator[Case]:
    """All commands with the faults that each place can have."""
    for command in COMMANDS:
        ranged = command == "stream"
        for place, (what, _, where) in PLACES.items():
            if where not in (None, 0.0) and not ranged:
                continue  # whoever asks for whole files meets these faults at the first byte
            for fault in passing(place):
                head = what == "HEAD" and fault in ("cut", "reset")
                if not head:
                    yield Case(command, place, fault, DONE)
            for fault in LASTING if place == "header of shard 1" else ("503 for ever",):
                yield Case(command, place, fault, REFUSED)
        yield from (Case(command, "header of shard 1", fault, DONE) for fault in ("short", "long"))
        yield Case(command, "header of shard 1", "expired address", DONE)
    for place in ("middle of shard 1", "end of shard 2"):
        yield from (Case("stream", place, fault, DONE) for fault in OF_RANGES)
        yield Case("stream", place, "wrong byte", REFUSED)


def few(cases: Iterator[Case]) -> Iterator[Case]:
    """Each command at each place with one fault; each fault at one place, copied and streamed."""
    seen: set[tuple[object, str]] = set()
    for case in cases:
        pairs = {(case.command, case.place), (case.command == "stream", case.fault)}
        if not pairs <= seen:
            yield case
        seen |= pairs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        chosen = cases() if metafunc.config.getoption("--all-faults") else few(cases())
        metafunc.parametrize("case", [*chosen], ids=str)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in two shards; its vision is dropped, so that a stream has gaps to fill."""
    config = hub_config()
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, config, make_weights(config), shards=2)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    huggingface_hub.close_session()
    with Hub() as hub:
        hub.repo(REPO).commit(files)
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture(autouse=True)
def _quick(hub: Hub, tmp_path: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no waiting, and requests as small as the model."""
    point_to(hub, tmp_path, monkeypatch)
    monkeypatch.setattr("time.sleep", naps.append)
    monkeypatch.setattr(source, "open_stream", partial(stream.open_stream, block=BLOCK))
    monkeypatch.setattr(stream, "FIRST_BYTES", 1 << 12)
    monkeypatch.setattr(remote_blocks, "HELD_BLOCKS", HELD_BLOCKS)
    monkeypatch.setattr(remote_blocks, "AHEAD", AHEAD)
    hub.heal()
    hub.seen.clear()


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: its exit code, its stderr."""

    def run(command: str, out: Path, source: str = REPO, *more: str) -> tuple[int, str]:
        words = {
            "download": ["download", source, "-o", str(out)],
            "convert": ["convert", source, "-o", str(out), "--workers", "2", *more],
            "stream": ["convert", source, "-o", str(out), "--workers", "2", "--stream", *more],
            "plan": ["convert", source, "-o", str(out), "--plan"],
            "inspect": ["inspect", source],
        }[command]
        monkeypatch.setattr(sys, "argv", ["qwen35", *words])
        with pytest.raises(SystemExit) as done:
            cli.main()
        code = done.value.code
        assert isinstance(code, int)
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def expected(hub: Hub, files: dict[str, bytes], tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """What each command gives undisturbed; a stream gives what a copy gives."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home / "hf"))
        patch.setenv("HF_ENDPOINT", hub.url)
        api.convert(REPO, home / "out", options=api.RunOptions(workers=1))
    converted = content(home / "out")
    return {"download": files, "convert": converted, "stream": converted}


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder, less huggingface_hub's own notes."""
    files = (p for p in folder.rglob("*") if p.is_file() and ".cache" not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def harm(hub: Hub, files: dict[str, bytes], case: Case, *, passed: int = 0) -> int:
    """Let the case's fault wait at its place, after `passed` answers; return how many wait."""
    what, name, where = PLACES[case.place]
    ranged = case.command == "stream" and where is not None
    at = int(where * (len(files[name]) - 1)) if ranged and where is not None else -1
    faults = [*[Fault()] * passed, *(PASSING | LASTING | OF_RANGES)[case.fault]]
    if what == "HEAD" and "for ever" in case.fault:
        faults = faults * 2  # huggingface_hub tries these seven times itself
    hub.fail(what, name, *(replace(fault, at=at) for fault in faults))
    return len(faults)


def waiting(hub: Hub) -> int:
    return sum(map(len, hub.faults.values()))


def assert_refused(out: Path, error: str, expected: dict[str, bytes], command: str) -> None:
    """Nothing at OUT, of a download finished files only; one block that says what is left."""
    assert "Traceback" not in error
    assert "\n  left  " in error
    if command != "download":
        assert not out.exists()
    for name, data in content(out).items() if out.exists() else ():
        assert data == expected[name], f"{name} is half-written"


def test_a_fault_is_ridden_out_or_refused_and_the_next_run_is_whole(
    case: Case, hub: Hub, files, expected, run: Run, naps: list[float], tmp_path: Path
):
    out, right = tmp_path / "out", expected[case.command]
    waited = harm(hub, files, case)
    code, error = run(case.command, out)
    assert waiting(hub) < waited, "the fault has happened"
    assert code == case.code, error
    assert naps or code or case.command != "stream", "a wrong answer is not taken for a right one"
    if code:
        assert_refused(out, error, right, case.command)
        hub.heal()
        assert run(case.command, out)[0] == DONE
    assert content(out) == right
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "home"}


@pytest.mark.parametrize("fault", ["cut", "503", "wrong byte"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_fault_while_resuming_loses_nothing(
    command: str, fault: str, hub: Hub, files, expected, run: Run, tmp_path: Path
):
    out, place = tmp_path / "out", "end of shard 2"
    harm(hub, files, Case(command, place, "503 for ever", REFUSED))
    assert run(command, out)[0] == REFUSED
    hub.heal()
    waited = harm(hub, files, Case(command, place, fault, DONE))
    code, error = run(command, out)
    assert waiting(hub) < waited, "the fault has happened"
    assert code == (REFUSED if fault in LASTING else DONE), error
    hub.heal()
    if code:
        assert_refused(out, error, expected[command], command)
        assert run(command, out)[0] == DONE
    assert content(out) == expected[command]


@pytest.mark.parametrize("fault", ["cut", "503", *OF_RANGES, "wrong byte", "503 for ever"])
def test_a_fault_while_verifying_is_not_taken_for_a_difference(
    fault: str, hub: Hub, files, expected, run: Run, tmp_path: Path
):
    """The source is read a second time; every block has to be the one of the first time."""
    out, case = tmp_path / "out", Case("stream", "middle of shard 1", fault, DONE)
    waited = harm(hub, files, case, passed=1)
    code, error = run("stream", out)
    assert waiting(hub) < waited - 1, "the fault has happened, in the second reading"
    assert code == (REFUSED if fault == "503 for ever" else DONE), error
    if code:
        assert_refused(out, error, expected["stream"], "stream")
        hub.heal()
        assert run("stream", out)[0] == DONE
    assert content(out) == expected["stream"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_branch_that_moves_between_two_files_mixes_nothing(
    command: str, hub: Hub, files, expected, run: Run, tmp_path: Path
):
    sha = hub.repos[REPO].branches["main"]

    def move(seen) -> None:
        if seen.path.endswith("config.json"):
            hub.repos[REPO].commit(files | {"config.json": b"{}"})

    hub.after = move
    try:
        assert run(command, tmp_path / "out")[0] == DONE
    finally:
        hub.after = lambda seen: None
        hub.repos[REPO].branches["main"] = sha
    assert content(tmp_path / "out") == expected[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_another_commit_is_refused(
    command: str, hub: Hub, expected, run: Run, tmp_path: Path
):
    hub.fail("HEAD", SHARDS[1], Fault(headers=(("X-Repo-Commit", "0" * 40),)))
    code, error = run(command, tmp_path / "out")
    assert code == REFUSED, error
    assert "another revision" in error or "not the listed file" in error
    assert_refused(tmp_path / "out", error, expected[command], command)
    assert run(command, tmp_path / "out")[0] == DONE
    assert content(tmp_path / "out") == expected[command]


@pytest.mark.parametrize("command", [*COMMANDS, "plan", "inspect"])
@pytest.mark.parametrize("what", ["missing", "revision", "closed port", "offline"])
def test_what_is_not_there_is_refused(
    command: str, what: str, hub: Hub, run: Run, tmp_path: Path, monkeypatch
):
    source = {"missing": "maker/none", "revision": f"{REPO}@v9"}.get(what, REPO)
    if what == "closed port":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    if what == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, error = run(command, tmp_path / "out", source)
    assert code == REFUSED
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_stream_writes_nothing_but_its_output(hub: Hub, expected, run: Run, tmp_path: Path):
    assert run("stream", tmp_path / "out")[0] == DONE
    assert content(tmp_path / "out") == expected["stream"], "also the receipt is a download's"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_stream_needs_a_repository(run: Run, nano: Path, tmp_path: Path):
    code, error = run("stream", tmp_path / "out", str(nano))
    assert code == MISUSED, error


def test_of_a_slice_no_hash_is_claimed(hub: Hub, files, run: Run, tmp_path: Path):
    code, error = run("stream", tmp_path / "out", REPO, "--only", "layers.0.*")
    assert code == DONE, error
    receipt = (tmp_path / "out" / "qwen35-receipt.json").read_text()
    assert '"sha256": null' in receipt
    asked = sum(size_of(seen.range) for seen in hub.seen if seen.range)
    assert asked < sum(len(files[name]) for name in SHARDS)


def size_of(asked: str) -> int:
    first, _, last = asked.removeprefix("bytes=").partition("-")
    return int(last) - int(first) + 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_may_ask_for_time_but_not_for_an_hour(
    command: str, hub: Hub, files, run: Run, naps: list[float], tmp_path: Path
):
    hub.fail("api", REPO, Fault(429, retry_after="7"), Fault(429, retry_after="3600"))
    assert run(command, tmp_path / "out")[0] == DONE
    assert sum(naps) == 307.0


def test_a_cache_that_is_there_spares_the_network(hub: Hub, expected, run: Run, tmp_path: Path):
    assert run("convert", tmp_path / "one")[0] == DONE
    shutil.rmtree(tmp_path / "one")
    hub.seen.clear()
    assert run("convert", tmp_path / "one")[0] == DONE
    assert hub.got() == []
    assert content(tmp_path / "one") == expected["convert"]
