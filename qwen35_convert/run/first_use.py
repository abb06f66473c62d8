"""The loops of a plan's schemes, ready before the first byte: loaded, or compiled at a first use.

Compiling holds one lock of a process, so on Linux two do it: this one begins with what encodes, a
forked one at the other end, with what verifies, and neither takes up a loop that the other has
begun. The fork happens only while this process has one thread of Python, and its absence changes
nothing but the time.
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
from functools import partial
from typing import TYPE_CHECKING

from formats.errors import Qwen35Error
from formats.safetensors.file import torch_dtype
from formats.tensor import block_of
from quant.ggml_types import ggml_type
from quant.part import Part
from quant.registry import OTHER_FORMS, SCHEMES
from quant.scheme import Scheme
from quant.stored import each_row
from qwen35_convert.options import default_workers
from qwen35_convert.progress import notice

if TYPE_CHECKING:
    from torch import Tensor

Step = Callable[[], object]
_ready: set[tuple[Scheme, bool]] = set()  # what this process has loaded, and whether to verify too
SMALLEST = 128, 256  # rows and columns on which an encoder is tried


def warm_all(schemes: Iterable[Scheme], *, verify: bool, say: Callable[[str], object]) -> None:
    """Load what schemes run; `say` is told if something must be compiled."""
    new = [scheme for scheme in schemes if (scheme, verify) not in _ready]
    missing = [scheme for scheme in new if not _is_compiled(scheme, verify=verify)]
    if missing:
        names = ", ".join(scheme.name for scheme in missing)
        say(f"compiling loops for {names} (first use, a few seconds)")
        steps = list(_steps(missing, verify=verify))
        gc.freeze()  # a collection would look at all that torch has made, again and again
        try:
            with _second_process(steps[::-1]):
                _compile(steps)
        finally:
            gc.unfreeze()
    _ready.update((scheme, verify) for scheme in new)


def warm(scheme: Scheme, *, verify: bool) -> None:
    """Load and compile what a scheme runs."""
    for step in _steps([scheme], verify=verify):
        step()


def _steps(schemes: Sequence[Scheme], *, verify: bool) -> Iterator[Step]:
    yield from (partial(_encode, scheme) for scheme in schemes)
    yield from (partial(_compare, scheme) for scheme in schemes if verify)


def _encode(scheme: Scheme) -> None:
    w = _weight()
    scheme.encode(w, scheme.prepare(iter([w])))


def _compare(scheme: Scheme) -> None:
    """Compare with what nobody has encoded, so that no encoder is needed."""
    scheme.compare(_weight(), each_row(scheme, blank_parts(scheme), SMALLEST))


def blank_parts(scheme: Scheme) -> dict[str, Tensor]:
    """Return parts of zeros, as they are read back."""
    parts = (part for part in scheme.parts("", SMALLEST) if part.constant is None)
    return {part.key: _zeros(part) for part in parts if not part.measured}


def _zeros(part: Part) -> Tensor:
    """Return a part of zeros; blocks are bytes of rows."""
    import torch

    info = part.info
    if block_of(info.dtype)[0] > 1:
        return torch.zeros((info.shape[0], info.nbytes // info.shape[0]), dtype=torch.uint8)
    zeros = torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
    return zeros.mT.contiguous() if part.transposed else zeros


def _weight() -> Tensor:
    import torch

    return torch.zeros(SMALLEST, dtype=torch.bfloat16)


def _is_compiled(scheme: Scheme, *, verify: bool) -> bool:
    """Load what a scheme runs; return whether all of it was compiled before."""
    from quant.loop_cache import Missing, NotCompiledError, when_missing

    try:
        with when_missing(Missing.REFUSE):
            warm(scheme, verify=verify)
    except NotCompiledError:
        return False
    return True


def _compile(steps: Iterable[Step]) -> None:
    """Take steps; one that needs what the other process compiles waits its turn."""
    from quant.loop_cache import Missing, NotCompiledError, when_missing

    waiting = deque(steps)
    while waiting:
        step = waiting.popleft()
        try:
            with when_missing(Missing.SKIP):
                step()
        except NotCompiledError:
            waiting.append(step)


@contextmanager
def _second_process(steps: Sequence[Step]) -> Iterator[None]:
    """Have another process take these steps, where that helps and is safe."""
    from quant.loop_cache import NoCache

    alone = sys.platform != "linux" or threading.active_count() > 1 or default_workers() < 2
    if alone or len(steps) < 2 or NoCache.used:  # it would compile what only it has
        yield
        return
    from multiprocessing import get_context

    forked = get_context("fork").Process(target=_compile_forked, args=(steps,), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that run no Python
        forked.start()
    try:
        yield
    finally:
        forked.terminate()
        forked.join()


def _compile_forked(steps: Sequence[Step]) -> None:
    """Take steps; the first process ends this one, and meets all errors itself."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(Qwen35Error):
        _compile(steps)


def main(names: Sequence[str]) -> None:
    """Compile what schemes run, as after an installation: the first conversion need not wait.

    names  of schemes; none: every scheme that can be written
    """
    from quant.ggml.kinds import WRITABLE

    every = [*SCHEMES.values(), *OTHER_FORMS.values(), *map(ggml_type, WRITABLE)]
    schemes = [SCHEMES.get(name) or ggml_type(name.upper()) for name in names] or every
    warm_all(schemes, verify=True, say=notice)


if __name__ == "__main__":
    main(sys.argv[1:])
