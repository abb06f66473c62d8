"""CUDA graphs of what a function launches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a CUDA graph of what a function launches, and what the function returns.

    It must have run before: nothing can be compiled or tuned while it is captured. RuntimeError if
    it does what a graph cannot hold, such as reading a number back.

    Trap: another graph that the garbage collector frees meanwhile ends the capture with an error.
    """
    graph = torch.cuda.CUDAGraph()
    with _uncollected(), torch.cuda.graph(graph):
        result = function()
    return graph, result


@contextmanager
def _uncollected() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
