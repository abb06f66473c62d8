"""The time of a call on a CUDA device, the L2 cache overwritten before it, and of a copy there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from runtime.capture import captured

FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30


def timed(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Return the median milliseconds of a call, from a CUDA graph if it can be captured."""
    if device == "cpu":
        started = time.perf_counter()
        call()
        return {"ms": (time.perf_counter() - started) * 1e3, "timed": "interpreter"}
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        graph, _ = captured(call)
    except RuntimeError:
        return {"ms": eager(call), "timed": "eager"}
    return {"ms": eager(graph.replay), "timed": "graph"}


def eager(call: Callable[[], Any], repeat: int = 30) -> float:
    """Return the median milliseconds of calls on the device, each with a cold L2 cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def copy_bandwidth(device: str) -> float:
    """Return the gigabytes a second, read and written, of a copy within the device."""
    if device == "cpu":
        return 1.0
    source, target = (torch.empty(COPY_BYTES, dtype=torch.int8, device=device) for _ in range(2))
    source.random_()
    return 2 * COPY_BYTES / eager(lambda: target.copy_(source)) / 1e6
