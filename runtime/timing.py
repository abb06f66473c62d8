"""How long a step of a model takes: one token for each sequence of a batch, or one prompt.

On a GPU a step is timed as a CUDA graph, which leaves out the launches that the engine's graphs
leave out too, and launch by launch. Medians of events on the device; on a CPU, of wall times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.capture import captured
from runtime.kernels.ahead import compiled_together
from runtime.model import hidden_states, logits
from runtime.state import Batch, Room, Span, State
from runtime.weights import Model

LONG = 1 << 16  # tokens of all repeats of a prompt


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step; `eager_ms` launch by launch, None on a CPU, which has no graphs."""

    ms: float
    eager_ms: float | None = None


@torch.inference_mode()
def decode_time(
    model: Model, batch: int, context: int, repeat: int = 20, lock: Path | None = None
) -> Timing:
    """Time one token for each of `batch` sequences that are `context` tokens long with it.

    lock  held alone while something is timed, with others while kernels are compiled
    """
    state = State.allocate(
        model.config, Room(batch, context), device=model.device, dtype=model.dtype
    )
    for pool in (state.recurrent, state.conv, state.keys, state.values):
        pool.normal_()
    spans = [Span([i % model.config.sizes["V"]], context - 1, i, i) for i in range(batch)]
    rows, pools = Batch.pack(spans, [], model.device), state.pools()
    return _timed(lambda: logits(model, hidden_states(model, pools, rows)), model, repeat, lock)


@torch.inference_mode()
def prefill_time(model: Model, tokens: int, repeat: int = 5, lock: Path | None = None) -> Timing:
    """Time one prompt, with the logits of its last token; one of seconds less often, or once."""
    repeat = max(1, min(repeat, LONG // tokens))
    state = State.allocate(model.config, Room(1, tokens), device=model.device, dtype=model.dtype)
    ids = torch.randint(model.config.sizes["V"], (tokens,)).tolist()
    rows, pools = Batch.pack([], [Span(ids, 0, 0, 0)], model.device), state.pools()

    def call() -> Tensor:
        return logits(model, hidden_states(model, pools, rows)[-1:])

    return _timed(call, model, repeat, lock)


@contextmanager
def alone(lock: Path | None, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock, if there is one: nothing else that holds it runs meanwhile.

    shared  others that share it do run: what prepares, so that nobody times beside it
    """
    if lock is None:
        yield
        return
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def _timed(call: Callable[[], Tensor], model: Model, repeat: int, lock: Path | None) -> Timing:
    on_gpu = model.device.type == "cuda"
    with alone(lock, shared=True):
        if on_gpu:
            with compiled_together():
                call()
        for _ in range(min(repeat, 2)):  # kernels are tuned
            call()
        graph = _graph(call, warm=repeat > 1) if on_gpu else None
    with alone(lock):
        if graph is None:
            return Timing(statistics.median(_wall_ms(call) for _ in range(min(repeat, 3))))
        return Timing(_device_ms(graph.replay, repeat), _device_ms(call, min(repeat, 5)))


def _graph(call: Callable[[], Tensor], *, warm: bool) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph, _ = captured(call)
    if warm:
        graph.replay()
    torch.cuda.synchronize()
    return graph


def _wall_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def _device_ms(call: Callable[[], object], repeat: int) -> float:
    event: Any = torch.cuda.Event  # its constructor is not typed
    events = [[event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events))
