"""The loops of a plan's schemes, ready before the first byte: loaded, or compiled at a first use.

Compiling holds one lock of a process, so on Linux two do it, if there are two schemes or more: this
one begins with the first scheme, a forked one half-way down, and neither takes up a loop that the
other has begun. The fork happens only while this process has one thread of Python, and its absence
changes nothing but the time.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from formats.errors import Qwen35Error
from quant.ggml_types import ggml_type
from quant.registry import SCHEMES
from quant.scheme import Scheme
from quant.stored import each_row
from qwen35_convert.options import default_workers
from qwen35_convert.progress import notice

SMALLEST = 128, 256  # rows and columns on which an encoder is tried


def warm_all(schemes: Iterable[Scheme], *, verify: bool, say: Callable[[str], object]) -> None:
    """Load what schemes run; `say` is told if something must be compiled."""
    missing = [scheme for scheme in schemes if not _is_compiled(scheme, verify=verify)]
    if missing:
        names = ", ".join(scheme.name for scheme in missing)
        say(f"compiling loops for {names} (first use, a few seconds)")
        gc.freeze()  # a collection would look at all that torch has made, again and again
        try:
            half = len(missing) // 2
            with _second_process(missing[half:] + missing[:half], verify=verify):
                _compile(missing, verify=verify)
        finally:
            gc.unfreeze()


def warm(scheme: Scheme, *, verify: bool) -> None:
    """Load and compile what a scheme runs."""
    import torch

    w = torch.zeros(SMALLEST, dtype=torch.bfloat16)
    rows = scheme.encode(w, scheme.prepare(iter([w])))
    if verify:
        scheme.compare(w, each_row(scheme, rows, SMALLEST))


def _is_compiled(scheme: Scheme, *, verify: bool) -> bool:
    """Load what a scheme runs; return whether all of it was compiled before."""
    from quant.loop_cache import Missing, NotCompiledError, when_missing

    try:
        with when_missing(Missing.REFUSE):
            warm(scheme, verify=verify)
    except NotCompiledError:
        return False
    return True


def _compile(schemes: Iterable[Scheme], *, verify: bool) -> None:
    """Compile what schemes run; one that needs what the other process compiles waits its turn."""
    from quant.loop_cache import Missing, NotCompiledError, when_missing

    waiting = deque(schemes)
    while waiting:
        scheme = waiting.popleft()
        try:
            with when_missing(Missing.SKIP):
                warm(scheme, verify=verify)
        except NotCompiledError:
            waiting.append(scheme)


@contextmanager
def _second_process(schemes: Sequence[Scheme], *, verify: bool) -> Iterator[None]:
    """Have another process compile what schemes run, where that helps and is safe."""
    alone = sys.platform != "linux" or threading.active_count() > 1 or default_workers() < 2
    if alone or len(schemes) < 2:
        yield
        return
    from multiprocessing import get_context

    forked = get_context("fork").Process(
        target=_compile_forked, args=(schemes,), kwargs={"verify": verify}, daemon=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that run no Python
        forked.start()
    try:
        yield
    finally:
        forked.terminate()
        forked.join()


def _compile_forked(schemes: Sequence[Scheme], *, verify: bool) -> None:
    """Compile what schemes run; the first process ends this one, and meets all errors itself."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(Qwen35Error):
        _compile(schemes, verify=verify)


def main(names: Sequence[str]) -> None:
    """Compile what schemes run, as after an installation: the first conversion need not wait."""
    schemes = [SCHEMES.get(name) or ggml_type(name.upper()) for name in names]
    warm_all(schemes, verify=True, say=notice)


if __name__ == "__main__":
    main(sys.argv[1:])
