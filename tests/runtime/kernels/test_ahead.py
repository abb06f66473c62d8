"""What is asked for and what is launched, with a kernel that is never compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.kernels.launch import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
from triton.runtime import Autotuner, JITFunction

from runtime.kernels import ahead
from runtime.kernels.ahead import compiled_together, tuned_together

CHOICES = [triton.Config({}, num_warps=warps) for warps in (1, 2)]


def plain(x, y):
    """Stand for a kernel."""


@pytest.fixture
def runs(monkeypatch):
    """What is run: (whether it is only asked for, warps)."""
    found = []

    def run(_, *args, grid, warmup, num_warps=None, **_options):
        assert (args, grid) == ((1, 2), (3,))
        found.append((warmup, num_warps))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(Autotuner, "_bench", lambda tuned, *args, config, **_: timed(found, config))
    return found


def timed(found, config):
    found.append(("timed", config.num_warps))
    return [config.num_warps]


def test_a_kernel_is_only_asked_for(runs):
    kernel = JITFunction(plain)
    with compiled_together():
        kernel[(3,)](1, 2)
    kernel[(3,)](1, 2)
    assert runs == [(True, None), (False, None)]


def test_what_another_thread_calls_is_launched(runs):
    kernel = JITFunction(plain)
    with compiled_together(), ThreadPoolExecutor(1) as other:
        other.submit(kernel[(3,)], 1, 2).result()
        kernel[(3,)](1, 2)
    assert runs == [(False, None), (True, None)]


def test_of_a_kernel_that_is_tuned_all_choices_are_asked_for_and_none_is_timed(runs):
    tuned = triton.autotune(CHOICES, key=[])(JITFunction(plain))
    with compiled_together():
        tuned[(3,)](1, 2)
    assert runs == [(True, 1), (True, 2)]


def test_choices_are_asked_for_before_the_first_is_timed(runs):
    tuned = triton.autotune(CHOICES, key=[])(JITFunction(plain))
    with tuned_together():
        tuned[(3,)](1, 2)
    tuned[(3,)](1, 2)
    asked = [(True, 1), (True, 2)]
    assert runs == [*asked, ("timed", 1), ("timed", 2), (False, 1), (False, 1)]


class Kernel:
    """What is compiled."""

    ready = False

    def _init_handles(self):
        self.ready = True


def test_a_kernel_is_loaded_where_it_is_compiled():
    with ahead._Loading(1) as threads:
        assert threads.submit(Kernel).result().ready


def test_one_that_does_not_compile_is_told_when_it_is_launched():
    """The others are ready all the same."""
    done = []

    def broken():
        raise ValueError("is broken")

    with ahead._Loading(2) as threads, ahead._Together(threads) as mode:
        assert ahead.active_mode.get() is mode
        failed = mode.submit("broken", broken, done.append)
        made = mode.submit("whole", Kernel, done.append)
    assert ahead.active_mode.get() is None
    assert done == [made.result()]
    with pytest.raises(ValueError, match="is broken"):
        failed.result()
