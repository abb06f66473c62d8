"""Standard output and error that outlive their reader: `qwen35 recipes | head -1` is no failure.

What nobody reads any more is dropped, and the command ends with the exit code that it would have
had: an artifact that fell short must not pass because a pipe was closed. What a full disk does not
take is dropped too, and `lost` says so at the end.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

STREAMS = ("stdin", "stdout", "stderr")


class _Pipe(io.FileIO):
    """A file that drops what is written once nobody reads it, or it cannot be written.

    error  why it cannot be written; None for a pipe that nobody reads
    """

    error: OSError | None = None

    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return self._drop(data)
        except OSError as error:
            self.error = error
            return self._drop(data)

    def _drop(self, data: Buffer) -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes


def lost() -> OSError | None:
    """Write all that is buffered; return why standard output did not take everything, if so."""
    pipe = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(pipe, _Pipe):
        return None
    sys.stdout.flush()
    return pipe.error


def outlive_readers() -> None:
    """Put streams of this kind in the place of standard output and error."""
    _reopen_closed()
    sys.stdout = _lasting(sys.stdout)
    sys.stderr = _lasting(sys.stderr)


def _reopen_closed() -> None:
    """Open on nothing what was closed before the start (`2>&-`): no file is to get its number."""
    for number, name in enumerate(STREAMS):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _lasting(stream: TextIO) -> TextIO:
    try:
        file = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or no file
        return stream
    stream.flush()
    buffer = io.BufferedWriter(_Pipe(file, "w", closefd=False))
    lines = stream.isatty() or stream is sys.stderr
    # names in a checkpoint, and paths, may hold what no encoding has
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=lines)
