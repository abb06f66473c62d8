"""Pieces of work on the cores of a CPU: every piece on one core from start to end.

torch's own threads split each operation among them and wait for one another after it, spinning.
With short operations, or with another process on a core, they mostly wait: on two busy cores a
layer of 0.8B took three times the core seconds. Pieces wait for each other once, at the end of all.
While workers are in use torch and numpy's BLAS have one thread, so numbers do not depend on how
many cores there are.

On a GPU, and with one core, the calling thread does the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Workers:
    """Threads for work on a device: `count`, or on a CPU as many as torch has.

    To be entered, which takes torch's own threads away.
    """

    def __init__(self, device: torch.device | str, count: int | None = None) -> None:
        self.cores, self.device = torch.get_num_threads(), torch.device(device)
        self.count = count or (self.cores if self.device.type == "cpu" else 1)
        self.pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> Workers:
        if self.count > 1:
            torch.set_num_threads(1)
        self.blas = threadpool_limits(torch.get_num_threads(), user_api="blas")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.shutdown()
        self.blas.restore_original_limits()
        torch.set_num_threads(self.cores)

    def each(
        self, function: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> Iterator[Result]:
        """Yield the function's result for each piece, in order; few are computed in advance."""
        if self.count == 1:
            yield from map(function, pieces)
            return

        def run(piece: Piece) -> Result:
            with torch.inference_mode():
                return function(piece)

        yield from _ahead((self.pool.submit(run, piece) for piece in pieces), self.count)

    def run(self, function: Callable[[Piece], object], pieces: Sequence[Piece]) -> None:
        """Call the function for each piece."""
        deque(self.each(function, pieces), maxlen=0)


def _ahead(submitted: Iterable[Future[Result]], count: int) -> Iterator[Result]:
    """Yield results in order while `count` more pieces are at work or done."""
    waiting: deque[Future[Result]] = deque()
    try:
        for future in submitted:
            waiting.append(future)
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
