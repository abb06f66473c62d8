"""Progress and notes on standard error, where they do not mix with results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bytes_bar(total: int, what: str, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar of `total` bytes on stderr, if wanted; yield the call that advances it by so many.

    What ends well ends at 100 %, with nothing left to do.
    """
    if not shown:
        yield _advance_nothing
        return
    from tqdm import tqdm

    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=None
    ) as bar:
        yield bar.update
        bar.update(total - bar.n)


@contextmanager
def items_bar(total: int, what: str, unit: str, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` items on stderr, if wanted; yield the call that advances it by one."""
    if not shown:
        yield _advance_nothing
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, file=sys.stderr, disable=None) as bar:

        def advance() -> None:
            bar.update()

        yield advance


def _advance_nothing(_: int = 1) -> None:
    """Advance no bar."""


def notice(text: str) -> None:
    """Write a line on stderr, above the bar if there is one."""
    from tqdm import tqdm

    tqdm.write(f"note: {text}", file=sys.stderr)


def ignore(_: str) -> None:
    """Write nothing."""
