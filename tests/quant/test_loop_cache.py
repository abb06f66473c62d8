"""No two processes compile the same loop; a caller may ask not to wait, or not to compile."""

from __future__ import annotations

import multiprocessing
import sys
from fcntl import LOCK_EX, flock
from importlib import import_module, invalidate_caches
from pathlib import Path

import numpy as np
import pytest

from quant.loop_cache import Missing, NoCache, NotCompiledError, _age, when_missing

LOOP = """
from quant.numba_ops import loop

@loop
def double(x):
    for i in range(x.size):
        x[i] = x[i] + x[i]
"""


def load(path: Path):
    """Return the loop of a file on the path, as another process would meet it."""
    sys.modules.pop(path.stem, None)
    return import_module(path.stem).double


CALLS = """
from quant.numba_ops import loop
from a_helper import twice

@loop
def double(x):
    for i in range(x.size):
        x[i] = twice(x[i])
"""
HELPER = """
from quant.numba_ops import inline

@inline
def twice(x):
    return x + x
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    """A file with one loop, which nobody has compiled; its cache lies beside it."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "a_loop.py"
    path.write_text(LOOP)
    return path


def doubled(double) -> list[float]:
    x = np.ones(2)
    double(x)
    return x.tolist()


def test_a_loop_is_not_compiled_where_only_loading_is_allowed(file):
    with when_missing(Missing.REFUSE), pytest.raises(NotCompiledError, match="double"):
        doubled(load(file))
    assert doubled(load(file)) == [2, 2]
    with when_missing(Missing.REFUSE):
        assert doubled(load(file)) == [2, 2]


def test_a_loop_that_another_process_compiles_is_skipped_on_request(file):
    double = load(file)
    folder = Path(double._cache.cache_path)
    folder.mkdir(exist_ok=True)
    lock = folder / f"{double._cache._impl.filename_base}.lock"
    with lock.open("ab") as held:
        flock(held, LOCK_EX)
        with when_missing(Missing.SKIP), pytest.raises(NotCompiledError):
            doubled(double)
    with when_missing(Missing.SKIP):
        assert doubled(double) == [2, 2]


def compile_it(path: Path, results) -> None:
    double = load(path)
    doubled(double)
    results.put(sum(double.stats.cache_misses.values()))


def test_of_processes_at_once_one_compiles(file):
    """A miss that is waited out ends as a hit."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=compile_it, args=(file, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == [0, 0, 1]
    for process in processes:
        process.join()


def test_a_folder_without_locks_compiles_all_the_same(file, monkeypatch):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr("quant.loop_cache.flock", no_locks)
    assert doubled(load(file)) == [2, 2]
    with when_missing(Missing.REFUSE):
        assert doubled(load(file)) == [2, 2]


def test_a_loop_that_no_folder_keeps_is_compiled_where_that_is_allowed(file, monkeypatch):
    """As in a container whose files cannot be written: the command says that it compiles."""

    def nowhere(_):
        raise RuntimeError("no locator available")

    monkeypatch.setattr("quant.numba_ops.SharedCache", nowhere)
    monkeypatch.setattr(NoCache, "used", False)
    double = load(file)
    assert NoCache.used
    with when_missing(Missing.REFUSE), pytest.raises(NotCompiledError, match="double"):
        doubled(double)
    assert doubled(double) == [2, 2]
    with when_missing(Missing.REFUSE):
        assert doubled(double) == [2, 2]


def test_a_change_of_what_a_loop_calls_is_a_change_of_the_loop(file):
    helper = file.with_name("a_helper.py")
    helper.write_text(HELPER)
    file.write_text(CALLS)
    assert doubled(load(file)) == [2, 2]
    with when_missing(Missing.REFUSE):
        assert doubled(load(file)) == [2, 2]
    helper.write_text(HELPER.replace("x + x", "x + x + x"))
    invalidate_caches()
    sys.modules.pop("a_helper")
    _age.cache_clear()
    assert doubled(load(file)) == [3, 3]
