"""Spend bytes where they save most: for each unit the option that the sum of costs asks for.

Of each unit only options on the lower convex hull of cost against bytes are of use. From the
smallest of each, the step that saves most cost for its bytes is taken as long as it fits. That is
the best there is for the bytes it uses, and for the given number of bytes at most one step worse.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Option:
    """A form that a unit may have, with its bytes and what it costs."""

    nbytes: int
    cost: float
    form: str


def hull(options: Iterable[Option]) -> list[Option]:
    """Return the lower convex hull: larger costs less, and each byte saves less than before."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.cost)):
        if kept and option.cost >= kept[-1].cost:
            continue
        while len(kept) > 1 and _above(kept[-2], kept[-1], option):
            kept.pop()
        kept.append(option)
    return kept


def spend(hulls: Sequence[Sequence[Option]], budget: int) -> list[Option]:
    """Return the option of each unit; the first of equal steps is taken first.

    hulls   of each unit, as `hull` gives them
    budget  bytes of them all; where even the smallest are more, those are returned
    """
    taken = [0] * len(hulls)
    left = budget - sum(options[0].nbytes for options in hulls)
    steps = [_step(hulls, unit, 0) for unit in range(len(hulls)) if hulls[unit][1:]]
    heapq.heapify(steps)
    while steps:
        _, unit = heapq.heappop(steps)
        options, place = hulls[unit], taken[unit]
        more = options[place + 1].nbytes - options[place].nbytes
        if more > left:
            continue  # nor does what follows it in this unit
        left, taken[unit] = left - more, place + 1
        if options[place + 2 :]:
            heapq.heappush(steps, _step(hulls, unit, place + 1))
    return [options[place] for options, place in zip(hulls, taken, strict=True)]


def _step(hulls: Sequence[Sequence[Option]], unit: int, place: int) -> tuple[float, int]:
    """Return how a step sorts: by the cost that it saves for each byte, most first."""
    here, there = hulls[unit][place : place + 2]
    return (there.cost - here.cost) / (there.nbytes - here.nbytes), unit


def _above(left: Option, middle: Option, right: Option) -> bool:
    """Whether the middle option lies on or above the line between the others."""
    ahead = (right.cost - left.cost) * (middle.nbytes - left.nbytes)
    return (middle.cost - left.cost) * (right.nbytes - left.nbytes) >= ahead
