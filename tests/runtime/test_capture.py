"""What captures CUDA graphs, with a fake of torch's where there is no GPU."""

import gc
from contextlib import contextmanager

import pytest
import torch

from runtime.capture import captured


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were captured to."""
    begun = []

    @contextmanager
    def graph(of):
        begun.append(of)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return begun


def test_nothing_is_collected_while_a_graph_is_captured(graphs):
    graph, collects = captured(gc.isenabled)
    assert (graphs, collects, gc.isenabled()) == ([graph], False, True)


def test_the_collector_goes_on_after_a_failure(graphs):
    with pytest.raises(ZeroDivisionError):
        captured(lambda: 1 // 0)
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_in_a_cycle_does_not_end_the_next_capture():
    x = torch.zeros(3, device="cuda")

    def add():
        [[] for _ in range(100_000)]  # enough for the collector to run, were it not held back
        return x.add_(1)

    add()
    cycle = {"graph": captured(add)[0]}
    cycle["itself"] = cycle
    del cycle
    graph, _ = captured(add)
    graph.replay()
    assert x.tolist() == [2.0] * 3
