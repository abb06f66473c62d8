"""Shared by all tests: poison for torch.empty, golden files, one CPU thread, Ctrl-C."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
# Commands that tests start spend half of their start on sources that were not kept compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")

# A shell lets what it starts in the background ignore Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
NANO = TESTS / "data" / "nano-dense"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files")
    parser.addoption("--all-faults", action="store_true", help="try every fault of the network")


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, have Triton's kernels defined for its interpreter.

    transformers imports triton too, so the variable must be there first. The process that only
    tells workers what to run needs no torch.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give one worker all tests that share a fixture of their module: it is made once."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path)
    for item in items:
        if item.get_closest_marker("xdist_group") is None and (group := _shared(item)):
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(optionalhook=True)  # without xdist there is none
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Schedule groups of tests, where groups are asked for."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.scheduling import ShortMemory

    return ShortMemory(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let workers of xdist begin at two ends, and tell less where nobody asks for more."""
    if not hasattr(session.config, "workerinput"):
        return
    from tests.scheduling import begin_at_the_end, tell_less

    option = session.config.option
    if not (option.durations or option.verbose > 0 or option.xmlpath):
        tell_less(session.config)
    if session.config.workerinput["workerid"][-1] in "13579":
        begin_at_the_end(session.config)


def pytest_collection_finish() -> None:
    """Let Python's collector pass over the tests and all that they imported, and run rarely."""
    gc.freeze()
    gc.set_threshold(50_000)


def _shared(item: pytest.Item) -> str:
    """Return the file and the parameters of a test's module-wide fixtures; "" without any."""
    fixtures = item._fixtureinfo.name2fixturedefs
    wide = sorted(name for name, found in fixtures.items() if found[-1].scope == "module")
    case = getattr(item, "callspec", None)
    chosen = [str(case.indices[name]) for name in wide if case and name in case.indices]
    return " ".join([str(item.path.relative_to(TESTS)), *chosen]) if wide else ""


@pytest.fixture(autouse=True)
def _poisoned_empty():
    """Fill torch.empty with NaN, so that an output nobody wrote is seen."""
    import torch

    torch.set_num_threads(1)
    before = torch.get_deterministic_debug_mode()
    # use_deterministic_algorithms(True) does the same and imports torch's compiler for seconds
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(scope="session", autouse=True)
def _unsynced():
    """Wait for no disk: a sync sees whether its file is open. Commands that are started sync."""

    def looked_at(file) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):  # macOS has no fdatasync
                patch.setattr(os, name, looked_at)
        yield


@pytest.fixture(scope="session")
def _numbers() -> count[int]:
    return count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory, _numbers) -> Iterator[Path]:
    """A folder of the test's own, which stays if the test fails: of all, ten GB would be written.

    pytest's own fixture looks through the folders of all earlier tests for a name.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
    folder.mkdir(mode=0o700)
    failed = request.session.testsfailed
    yield folder
    if request.session.testsfailed == failed:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare text with tests/golden/NAME; `pytest --update-golden` rewrites it."""

    def check(name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{name} changed; review with --update-golden"

    return check


@pytest.fixture
def nano() -> Path:
    """The bundled trained model."""
    return NANO


@pytest.fixture(scope="session")
def nano_path() -> Path:
    """The bundled trained model, for fixtures of any scope."""
    return NANO


@pytest.fixture(scope="session")
def short_text(tmp_path_factory) -> str:
    """A file with the beginning of the bundled text, for proofs of predictions."""
    from qwen35_convert.text.tokens import DEFAULT_TEXT

    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(DEFAULT_TEXT.read_text(encoding="utf-8")[:1500], encoding="utf-8")
    return str(path)


@pytest.fixture
def layers_read(monkeypatch):
    """The folders whose layers are read."""
    from runtime.load import Loader

    read = []
    original = Loader.layer

    def spy(self, i):
        read.append(self.checkpoint.folder.name)
        return original(self, i)

    monkeypatch.setattr(Loader, "layer", spy)
    return read
