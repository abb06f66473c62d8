"""How a kernel is chosen: conditions on a case, rows that name an entry point, operations.

The table itself is in dispatch. A choice is remembered: the next one of an equal case is a look-up
in a dictionary. There are as many as there were different cases, a few thousand at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


class Memory(dict[Any, Any]):
    """What was computed for each case, and computed for a new one."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__()
        self.compute = compute

    def __missing__(self, case: Any) -> Any:
        self[case] = value = self.compute(case)
        return value


@dataclass(frozen=True, eq=False)
class Operation:
    """Something a layer needs, the type of its cases, and its rows."""

    name: str
    case: type
    rows: tuple[Row, ...]
    memories: list[Memory] = field(default_factory=list)

    def choose(self, case: Any) -> Row:
        """Return the row that serves a case."""
        return next(row for row in self.rows if row.serves(case))

    def remembered(self, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function of cases that computes each one once."""
        self.memories.append(Memory(compute))
        return self.memories[-1].__getitem__

    def bind(self, *functions: Function) -> Callable[[Any], Function]:
        """Return the choice among these functions, the ones that the rows name, for a case."""
        named = {entry_point(function): function for function in functions}
        listed = {row.kernel for row in self.rows}
        assert named.keys() == listed, f"{self.name}: {sorted(named)} for {sorted(listed)}"
        return self.remembered(lambda case: named[self.choose(case).kernel])

    def forget(self) -> None:
        """Let every case be chosen anew."""
        for memory in self.memories:
            memory.clear()


def entry_point(function: Function) -> str:
    """Return what rows call a function."""
    inner = getattr(function, "fn", function)  # of a Triton function
    return f"{inner.__module__}.{inner.__name__}".removeprefix("runtime.kernels.")
