"""Run `qwen35` commands, one per line of stdin, without what only Linux has.

    python -m tests.without_linux < commands

What macOS lacks is taken away before anything of ours is imported: calls of `os`, flags, /proc, the
C library's renameat2, and triton.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import mmap
import os
import resource
import shlex
import sys
from pathlib import Path

# Source: "Availability" in Python's documentation of each module.
LACKING = {
    os: (
        "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "fdatasync",
        "copy_file_range", "memfd_create", "eventfd", "pidfd_open", "pipe2", "getrandom", "splice",
        "O_DIRECT", "O_PATH", "POSIX_FADV_DONTNEED",
    ),
    mmap: ("MAP_POPULATE", "MADV_DONTFORK", "MADV_HUGEPAGE", "MADV_REMOVE"),
    resource: ("RUSAGE_THREAD", "prlimit"),
}  # fmt: skip
FOLDERS = ("/proc", "/sys")


class NoTriton(importlib.abc.MetaPathFinder):
    """Finds no module of triton's."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class Library:
    """The C library without what Linux adds to it."""

    def __init__(self, library) -> None:
        self.library = library

    def __getattr__(self, name):
        if name == "renameat2":
            raise AttributeError(name)
        return getattr(self.library, name)


def take_away() -> None:
    for module, names in LACKING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.meta_path.insert(0, NoTriton())
    load = ctypes.CDLL
    ctypes.CDLL = lambda *at, **how: (
        Library(load(*at, **how)) if at == (None,) else load(*at, **how)
    )
    for method in ("exists", "is_file", "is_dir"):
        setattr(Path, method, _hiding(getattr(Path, method)))


def _hiding(method):
    def hidden(self, *arguments, **named):
        away = any(Path(folder) in (self, *self.parents) for folder in FOLDERS)
        return False if away else method(self, *arguments, **named)

    return hidden


def main() -> None:
    take_away()
    from qwen35_convert.cli import app

    for line in sys.stdin:
        app(shlex.split(line), standalone_mode=False)
    assert "triton" not in sys.modules, "triton was loaded"


if __name__ == "__main__":
    main()
