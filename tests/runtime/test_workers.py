from __future__ import annotations

import threading
import time

import pytest
import torch

from runtime.workers import Workers


@pytest.fixture
def cores():
    """Two threads of torch's, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_results_come_in_order_from_several_threads(cores):
    threads = set()

    def square(piece):
        threads.add(threading.get_ident())
        time.sleep(0.01 * (piece % 3))
        return piece**2

    with Workers("cpu") as workers:
        assert list(workers.each(square, range(12))) == [piece**2 for piece in range(12)]
    assert len(threads) == cores
    assert threading.get_ident() not in threads


def test_a_piece_has_one_core_and_torch_gets_its_own_back(cores):
    with Workers("cpu") as workers:
        assert torch.get_num_threads() == 1
        counts = list(workers.each(lambda _: torch.get_num_threads(), range(4)))
    assert counts == [1] * 4
    assert torch.get_num_threads() == cores


def test_few_results_are_computed_in_advance(cores):
    started = []
    with Workers("cpu") as workers:
        results = workers.each(started.append, range(50))
        next(results)
        time.sleep(0.05)
        assert len(started) <= cores + 1
        results.close()


def test_an_error_reaches_the_caller(cores):
    def fail(piece):
        if piece == 2:
            raise ValueError("piece 2")

    with Workers("cpu") as workers, pytest.raises(ValueError, match="piece 2"):
        workers.run(fail, range(5))
    assert torch.get_num_threads() == cores


def test_on_a_gpu_and_for_one_worker_the_caller_works(cores):
    for workers in (Workers("cuda"), Workers("cpu", 1)):
        with workers:
            threads = set(workers.each(lambda _: threading.get_ident(), range(3)))
            assert threads == {threading.get_ident()}
            assert torch.get_num_threads() == cores
