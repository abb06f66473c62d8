"""Attributes of what is not ours, replaced for a while."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def replaced(changes: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Give attributes other values while the context lasts.

    changes  the value by owner and name
    """
    with ExitStack() as stack:
        for (owner, name), value in changes.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
