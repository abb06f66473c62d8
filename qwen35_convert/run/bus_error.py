"""SIGBUS as an exit code: what a mapped file sends when it shrinks under its reader.

Weights are read through maps. If the file shrinks or its disk fails, there is no error to return:
the kernel sends SIGBUS to the thread that touched the page, and Python cannot raise from it,
because the instruction would only be retried. So the process prints a message and exits; what a
conversion has journalled is kept, as after SIGKILL.

Trap: `signal.signal` runs its handler after the instruction, which never ends; libc's runs at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

MESSAGE = (
    b"qwen35: a file shrank while it was being read, or its disk failed (SIGBUS)\n"
    b"  left  finished work is kept; restore the file and run the same command again to resume\n"
)
_handlers: list[Callable[[int], None]] = []  # libc keeps the address only


def exit_on_bus_error(code: int) -> None:
    """Let this process exit with `code` and one message instead of dying of SIGBUS."""
    libc = ctypes.CDLL(None)
    if not hasattr(signal, "SIGBUS") or not hasattr(libc, "signal"):
        return

    def handler(_: int) -> None:
        os.write(2, MESSAGE)
        os._exit(code)

    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    _handlers.append(kind(handler))
    libc.signal.argtypes = [ctypes.c_int, kind]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGBUS, _handlers[-1])
