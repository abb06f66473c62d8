"""Progress on standard error, where it does not mix with results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def rows_bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps on stderr; yield what advances it by one."""
    with tqdm(total=total, desc=what, unit="tensor", file=sys.stderr, disable=None) as bar:

        def advance() -> None:
            bar.update()

        yield advance


def say(text: str) -> None:
    """Write a line on stderr, above the bar if there is one."""
    tqdm.write(f"note: {text}", file=sys.stderr)


@contextmanager
def quiet() -> Iterator[Callable[[], None]]:
    """Yield what advances no bar."""
    yield lambda: None
