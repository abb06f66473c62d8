"""Numba's cache of a loop on disk, shared by processes: no two of them compile the same loop.

Two processes that meet a loop which nobody has compiled would both do so, for seconds. Here the
first one holds a lock beside the cached files; the others wait and load what it has saved. Where
locks cannot be had, or one is held for a minute, each compiles for itself, as numba does.

What is cached is fresh as long as the file of the loop and those of all that it calls are what they
were: numba looks at the first alone. A number that is imported has no file, and is not looked at.

Trap: numba documents no way to put a cache of one's own into a dispatcher. `FunctionCache`, its two
methods and the stamp of its index have been what they are since 2016.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from inspect import unwrap
from pathlib import Path
from types import FunctionType
from typing import IO, TYPE_CHECKING, Any

from numba.core.caching import FunctionCache, NullCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numba.core.compiler import CompileResult
    from numba.core.cpu import CPUContext
    from numba.core.typing.templates import Signature

PATIENCE = 60.0  # seconds; no loop compiles for so long
SHORT = 0.4  # seconds, that a small loop takes
PAUSE = 0.02


class Missing(Enum):
    """What happens where a loop is not in the cache.

    WAIT    it is compiled; if another process does so, that is waited for
    SKIP    it is compiled; if another process does so and it takes long, NotCompiledError is raised
    REFUSE  NotCompiledError is raised
    """

    WAIT = 0
    SKIP = 1
    REFUSE = 2


_missing: ContextVar[Missing] = ContextVar("missing", default=Missing.WAIT)


class NotCompiledError(Exception):
    """A loop is not in the cache."""


@contextmanager
def when_missing(what: Missing) -> Iterator[None]:
    """Choose what happens in this thread where a loop is not in the cache."""
    token = _missing.set(what)
    try:
        yield
    finally:
        _missing.reset(token)


class SharedCache(FunctionCache):
    """The cache of one loop; a miss takes its lock, which saving gives back."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._stamped = False
        self._lock: IO[bytes] | None = None

    def load_overload(self, sig: Signature, target_context: CPUContext) -> CompileResult | None:
        """Return what is compiled for a signature; None if this process is to compile it."""
        if not self._stamped:  # not before: helpers may stand below the loop
            self._cache_file._source_stamp = _stamp(self._py_func)
            self._stamped = True
        loaded: CompileResult | None = super().load_overload(sig, target_context)
        if loaded is not None:
            return loaded
        if _missing.get() is Missing.REFUSE:
            raise NotCompiledError(self._name)
        self._acquire()
        loaded = super().load_overload(sig, target_context)
        if loaded is not None:
            self._release()
        return loaded

    def save_overload(self, sig: Signature, data: CompileResult) -> None:
        """Save what was compiled for a signature."""
        try:
            super().save_overload(sig, data)
        finally:
            self._release()

    def _acquire(self) -> None:
        self._release()  # of a compilation that failed
        skips = _missing.get() is Missing.SKIP
        until = time.monotonic() + (SHORT if skips else PATIENCE)
        try:
            self._impl.locator.ensure_cache_path()
            path = Path(self.cache_path, f"{self._impl.filename_base}.lock")
            self._lock = path.open("ab")
            while not _locked(self._lock):
                if time.monotonic() < until:
                    time.sleep(PAUSE)
                elif skips:
                    raise NotCompiledError(self._name)
                else:
                    break
        except OSError:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class NoCache(NullCache):
    """The cache of a loop that no folder can keep: every process compiles it, and says so."""

    used = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        NoCache.used = True

    def load_overload(self, sig: Signature, target_context: CPUContext) -> None:
        """Return nothing; NotCompiledError where compiling is not allowed."""
        if _missing.get() is Missing.REFUSE:
            raise NotCompiledError(self._name)


def _stamp(function: Callable[..., Any]) -> tuple[tuple[str, float, int], ...]:
    """Return the name, age and size of every file that what is compiled comes from."""
    files = {Path(called.__code__.co_filename) for called in _called(function)}
    return tuple(sorted((file.name, *_age(file)) for file in files))


def _called(function: Callable[..., Any]) -> set[FunctionType]:
    """Return a function and all that it calls by name: helpers, intrinsics, and what they call."""
    found: set[FunctionType] = set()
    waiting: list[Any] = [function]
    while waiting:
        called = unwrap(waiting.pop())
        if isinstance(called, FunctionType) and called not in found:
            found.add(called)
            names = called.__code__.co_names
            waiting += [x for name in names if callable(x := called.__globals__.get(name))]
    return found


@cache
def _age(file: Path) -> tuple[float, int]:
    """Return when a file was changed, and its size; what lies in an archive does not change."""
    try:
        status = file.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size


def _locked(file: IO[bytes]) -> bool:
    """Take the lock of a file, if it is free. OSError where files have no locks."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True
