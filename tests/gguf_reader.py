"""The gguf package's own reader, as an outside eye on our files.

It cuts every string of a vocabulary out of `numpy.memmap`, whose views take twice as long as an
array's; the bytes are the same.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import gguf
import numpy as np


def read_gguf(path: Path) -> gguf.GGUFReader:
    """Return a file as the gguf package reads it, from a copy of its bytes."""

    def copy(path: Path, mode: str) -> np.ndarray:
        return np.fromfile(path, dtype=np.uint8)

    with mock.patch.object(gguf.gguf_reader.np, "memmap", copy):
        return gguf.GGUFReader(path)
