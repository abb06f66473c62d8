"""Numba's cache of a loop on disk, shared by processes: no two of them compile the same loop.

Two processes that meet a loop which nobody has compiled would both do so, for seconds. Here the
first one holds a lock beside the cached files; the others wait and load what it has saved. Where
locks cannot be had, or one is held for a minute, each compiles for itself, as numba does.

Trap: numba documents no way to put a cache of one's own into a dispatcher. `FunctionCache` and its
two methods have been what they are since 2016.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
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
        self._lock: IO[bytes] | None = None

    def load_overload(self, sig: Signature, target_context: CPUContext) -> CompileResult | None:
        """Return what is compiled for a signature; None if this process is to compile it."""
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


def _locked(file: IO[bytes]) -> bool:
    """Take the lock of a file, if it is free. OSError where files have no locks."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True
