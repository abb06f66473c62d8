from __future__ import annotations

import fcntl

import pytest
import torch

from runtime import timing
from runtime.timing import alone, decode_time, prefill_time
from tests.runtime.models import NANO, load


def holding(lock):
    """Return how the lock is held: alone, shared or not at all."""
    for kind, how in ((fcntl.LOCK_SH, "alone"), (fcntl.LOCK_EX, "shared")):
        with lock.open("w") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return how
    return None


@pytest.mark.parametrize("time", [decode_time, prefill_time])
def test_only_what_is_timed_holds_the_lock_alone(time, tmp_path, monkeypatch):
    """What comes before, in which kernels are compiled, shares it: nobody times beside that."""
    lock, calls = tmp_path / "lock", []
    monkeypatch.setattr(timing, "logits", lambda *_: calls.append(holding(lock)) or torch.zeros(1))
    sizes = (1, 8) if time is decode_time else (8,)
    assert time(load(NANO), *sizes, lock=lock).ms > 0
    assert calls == ["shared", "shared", "alone", "alone", "alone"]
    assert holding(lock) is None


def test_without_a_lock_nothing_is_locked(tmp_path):
    with alone(None):
        assert not list(tmp_path.iterdir())


def test_a_prompt_of_seconds_is_timed_less_often(monkeypatch):
    repeats = []
    monkeypatch.setattr(timing, "_timed", lambda call, model, repeat, lock: repeats.append(repeat))
    monkeypatch.setattr(timing, "LONG", 64)
    for tokens in (8, 32, 64, 100):
        prefill_time(load(NANO), tokens)
    assert repeats == [5, 2, 1, 1]
