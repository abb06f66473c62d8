"""A disk that fails at a chosen call, for one process: what `faults_local` puts into its children.

Every call of Python's that changes a file system is counted: opening to write, reserving, writing,
fsync, renaming, removing. At one of them the process is killed, or the system's answer is an error.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen35_convert import durable

CALLS = (
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
)
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Fails at call number `at` (counted from 1): "kill", "ENOSPC", "EIO", or these "for good"."""

    def __init__(self, at: int = 0, kind: str = "") -> None:
        self.at, self.kind, self.count = at, kind, 0
        self._lock = threading.Lock()
        self._tally = -1

    def install(self, tally: Path | None = None) -> None:
        """Put this disk under the running process; `tally` gets one byte for every call."""
        if tally is not None:
            self._tally = os.open(tally, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for name in CALLS:
            setattr(os, name, self._wrap(getattr(os, name)))
        os.open = self._wrap(os.open, lambda _, flags, *rest: flags & CHANGING)
        durable.exchange = self._wrap(durable.exchange)
        opened = io.open

        def open_file(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+"):
                return opened(file, mode, *rest, **options)
            self._step()
            return _Written(opened(file, mode, *rest, **options), self._step)

        io.open = builtins.open = open_file

    def _wrap(self, call: Any, counts: Callable[..., Any] = lambda *_: True) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if counts(*arguments):
                self._step()
            return call(*arguments, **options)

        return wrapped

    def _step(self) -> None:
        with self._lock:
            self.count += 1
            now = self.count
        if self._tally >= 0:
            os.write(self._tally, b".")
        if not self.at or now < self.at or (now > self.at and "for good" not in self.kind):
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self.kind.split(" ", 1)[0])
        raise OSError(number, os.strerror(number))


class _Written:
    """A file opened to write, whose writes are counted."""

    def __init__(self, file: Any, step: Callable[[], None]) -> None:
        self._file, self._step = file, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> Any:
        """Write, as one call."""
        self._step()
        return self._file.write(data)


def fail_reads(folder: Path, at: int) -> None:
    """Let the `at`-th opening of a file of a folder to read fail with EIO."""
    opened, count = io.open, 0

    def open_file(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        nonlocal count
        if isinstance(file, str | Path) and Path(file).parent == folder:
            count += 1
            if count == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return opened(file, mode, *rest, **options)

    io.open = builtins.open = open_file


def harm_source(folder: Path, row: int, kind: str) -> None:
    """Before a row is converted: cut, empty, remove or replace a file of the source."""
    from qwen35_convert.run import items as run

    convert, count = run.convert_item, 0

    def harmed(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == row + 1:
            _harm(sorted(folder.glob("*.safetensors"))[-1], kind)
        return convert(*arguments)

    run.convert_item = harmed


def _harm(path: Path, kind: str) -> None:
    if kind == "removed":
        path.unlink()
    elif kind == "replaced":
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.rename(path)
    else:
        os.truncate(path, path.stat().st_size // 2 if kind == "cut" else 0)
