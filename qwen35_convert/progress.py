"""Progress and notes on standard error, where they do not mix with results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def items_bar(total: int, what: str, unit: str = "tensor") -> Iterator[Callable[[], None]]:
    """Show a bar of `total` items on stderr; yield the call that advances it by one."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, file=sys.stderr, disable=None) as bar:

        def advance() -> None:
            bar.update()

        yield advance


@contextmanager
def quiet() -> Iterator[Callable[[], None]]:
    """Yield a call that does nothing."""
    yield lambda: None


def notice(text: str) -> None:
    """Write a line on stderr, above the bar if there is one."""
    from tqdm import tqdm

    tqdm.write(f"note: {text}", file=sys.stderr)


def ignore(_: str) -> None:
    """Write nothing."""
