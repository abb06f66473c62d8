"""A digest of tensors, one after another; those of a GPU are hashed while it goes on."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 4  # copies that may wait to be hashed


class Digest:
    """SHA-256 of what was added, in its order."""

    def __init__(self) -> None:
        self._sha256, self._pool = hashlib.sha256(), ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def add(self, values: Tensor) -> None:
        """Add numbers, which may change as soon as this returns."""
        data = values.contiguous().cpu().numpy().data
        if not values.is_cuda:
            self._wait(0)
            self._sha256.update(data)
            return
        self._wait(AHEAD)
        self._pending.append(self._pool.submit(self._sha256.update, data))

    def close(self) -> str:
        """Return the digest; nothing is added after it."""
        self._wait(0)
        self._pool.shutdown()
        return self._sha256.hexdigest()

    def _wait(self, most: int) -> None:
        """Wait until so many copies at most are left."""
        while len(self._pending) > most:
            self._pending.popleft().result()
