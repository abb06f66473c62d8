"""SHA-256 of files, computed on threads of their own between being asked for and being needed.

The lock of the interpreter is free meanwhile, so whoever asks first and needs last pays core
seconds, but hardly any time.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

CHUNK = 2 << 20  # what the kernel maps at once anyway


class Digests:
    """Hashes by path, on `workers` threads; leaving it stops what nobody waited for.

    known  hashes that are not computed again
    """

    def __init__(self, workers: int, known: Mapping[Path, str] | None = None) -> None:
        self._known = known or {}
        self._pool = ThreadPoolExecutor(max(1, workers))
        self._stop = threading.Event()
        self._begun: dict[Path, Future[str]] = {}

    def __enter__(self) -> Digests:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def begin(self, paths: Iterable[Path]) -> None:
        """Compute those that are files, the largest first: the last to end is then a small one."""
        todo = (path for path in paths if path not in self._known and path.is_file())
        sizes = {path: path.stat().st_size for path in todo}
        for path in sorted(sizes, key=lambda path: sizes[path], reverse=True):
            if path not in self._begun:
                self._begun[path] = self._pool.submit(sha256_file, path, self._stop)

    def of(self, path: Path) -> str:
        """Return the hex digest of a file; OSError if it cannot be read."""
        if path in self._known:
            return self._known[path]
        self.begin([path])
        return self._begun[path].result()

    def describe(
        self, paths: Mapping[str, Path], known: Mapping[str, str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return size and SHA-256 of each file by its name; `known` hashes are not computed again.

        OSError if one cannot be read.
        """
        hashes = known or {}
        self.begin(path for name, path in paths.items() if not hashes.get(name))
        return {
            name: {"size": path.stat().st_size, "sha256": hashes.get(name) or self.of(path)}
            for name, path in sorted(paths.items())
        }


def sha256_file(path: Path, stop: threading.Event | None = None) -> str:
    """Return the hex SHA-256 of a file: mapped, so nothing is copied, and given back as it goes.

    When `stop` is set it returns early, with a hash of nothing in particular.
    """
    digest, size = hashlib.sha256(), path.stat().st_size
    if not size:
        return digest.hexdigest()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for start in range(0, size, CHUNK):
            if stop is not None and stop.is_set():
                break
            length = min(CHUNK, size - start)
            with memoryview(mapped) as view, view[start : start + length] as part:
                digest.update(part)
            mapped.madvise(mmap.MADV_DONTNEED, start, length)
    return digest.hexdigest()
