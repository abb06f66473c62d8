"""One call for each of many items, on threads, without an object for each call that waits.

A pool's own `map` makes a future of every item at once: 2 KB each, of the largest models 200 MB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(call: Callable[[T], R], items: Sequence[T], workers: int) -> list[R]:
    """Return what `call` gives for each item, in order; the first error ends it and is raised."""
    results: dict[int, R] = {}
    pending, lock, stop = iter(range(len(items))), threading.Lock(), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with lock:
                index = next(pending, None)
            if index is None:
                return
            try:
                results[index] = call(items[index])
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            for done in [pool.submit(loop) for _ in range(workers)]:
                done.result()
        finally:
            stop.set()
    return [results[index] for index in range(len(items))]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch to one thread meanwhile: our workers are the parallelism, its own would fight."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
