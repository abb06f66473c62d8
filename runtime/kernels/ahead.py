"""Kernels compiled before they are launched, several at once.

A kernel is compiled at its first launch, alone, and so is the C function that launches it: a second
of one core for both, and a model's first token waits for all of them. What calls them is therefore
run twice, first in `with compiled_together():`, where a call only asks for its kernel. Triton keeps
what it compiled, in this process and on disk, so the second run, and another process, finds it.

Traps: what a kernel that was not launched leaves behind is whatever lay there, so nothing may be
indexed by it. Nor is anything tuned; all choices are compiled. One that does not compile, or does
not fit the GPU, is told when it is launched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from runtime.kernels.launch import HAS_TRITON
from runtime.kernels.replaced import replaced

if HAS_TRITON:
    from triton.runtime import Autotuner, JITFunction
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
else:
    AsyncCompileMode = object


class _Loading(ThreadPoolExecutor):
    """Threads that also load what they have compiled."""

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        """Return the kernel to come, ready to be launched."""

        def loaded() -> Any:
            kernel = compile_one()
            kernel._init_handles()  # compiles its launcher
            return kernel

        return super().submit(loaded)


class _Together(AsyncCompileMode):  # type: ignore[misc]
    """Has kernels compiled by an executor; ends with the last, whether it compiles or not."""

    def __exit__(self, *_: object) -> None:
        for kernel in self.future_kernels.values():
            with suppress(Exception):
                kernel.result()
        active_mode.set(None)


@contextmanager
def compiled_together(threads: int | None = None) -> Iterator[None]:
    """Compile the kernels that are called while this lasts, and launch none; it ends with the last.

    What other threads call is launched as ever.

    threads  how many at once; None: one for each core
    """
    launch, tune = JITFunction.run, Autotuner.run

    def ask(kernel: Any, *args: Any, warmup: bool, **named: Any) -> Any:
        asks = active_mode.get() is not None
        return launch(kernel, *args, warmup=warmup or asks, **named)

    def ask_all(tuned: Any, *args: Any, **named: Any) -> Any:
        if active_mode.get() is None:
            return tune(tuned, *args, **named)
        for choice in tuned.prune_configs(named):
            tuned.fn.run(*args, **named, **choice.all_kwargs())
        return None

    with (
        _Loading(threads or len(os.sched_getaffinity(0))) as pool,
        _Together(pool),
        replaced({(JITFunction, "run"): ask, (Autotuner, "run"): ask_all}),
    ):
        yield


@contextmanager
def tuned_together() -> Iterator[None]:
    """Compile the choices of each kernel together before they are timed, while this lasts."""
    prune = Autotuner.prune_configs

    def compiled(tuned: Any, named: dict[str, Any]) -> Any:
        choices = prune(tuned, named)
        with compiled_together():
            for choice in choices:
                tuned.fn.run(*tuned.nargs.values(), **named, **choice.all_kwargs())
        return choices

    with replaced({(Autotuner, "prune_configs"): compiled}):
        yield
