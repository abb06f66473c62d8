"""How a kernel is chosen: conditions on a case, rows that name an entry point, operations.

The table itself is in dispatch. A choice is remembered: the next one of an equal case is a look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

Function = Callable[..., Any]

NOTHING = "nothing"


class When(NamedTuple):
    """A condition on a case."""

    text: str
    holds: Callable[[Any], bool]


def unless(*conditions: When) -> When:
    """Return the condition that not all of these hold."""
    text = " and ".join(condition.text for condition in conditions)
    return When(
        f"not ({text})", lambda case: not all(condition.holds(case) for condition in conditions)
    )


@dataclass(frozen=True)
class Row:
    """An entry point, the conditions that all hold where it serves, and why it is chosen there.

    kernel  module and function, below `runtime.kernels` unless it begins with `runtime`; or NOTHING
    """

    kernel: str
    when: tuple[When, ...]
    why: str

    def serves(self, case: Any) -> bool:
        """Return whether this row is for the case."""
        return all(condition.holds(case) for condition in self.when)


@dataclass(frozen=True, eq=False)
class Operation:
    """Something a layer needs, the type of its cases, and its rows."""

    name: str
    case: type
    rows: tuple[Row, ...]

    def bind(self, *functions: Function) -> Callable[[Any], Function]:
        """Return the choice among these functions, the ones that the rows name, for a case."""
        named = {entry_point(function): function for function in functions}
        listed = {row.kernel for row in self.rows}
        assert named.keys() == listed, f"{self.name}: {sorted(named)} for {sorted(listed)}"
        return lambda case: named[choose(self, case).kernel]


def entry_point(function: Function) -> str:
    """Return what rows call a function."""
    inner = getattr(function, "fn", function)  # of a Triton function
    return f"{inner.__module__}.{inner.__name__}".removeprefix("runtime.kernels.")


@lru_cache(maxsize=1 << 14)
def choose(operation: Operation, case: Any) -> Row:
    """Return the row of an operation that serves a case."""
    return next(row for row in operation.rows if row.serves(case))
