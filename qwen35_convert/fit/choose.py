"""Choose the form of each unit so that the predicted cost is least within a number of bytes.

Of each unit only forms on the lower convex hull of cost against bytes are of use. From the smallest
of each, the step that saves most cost for its bytes is taken as long as it fits. That is the best
there is for the bytes it uses, and for the given number of bytes at most one step worse.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qwen35_convert.errors import RecipeError
from qwen35_convert.fit.sizes import Costs, Sizes, Unit


@dataclass(frozen=True, slots=True)
class Choice:
    """The form of each unit by its name, the bytes of it all, and the cost that is predicted."""

    forms: dict[str, str]
    nbytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class _Point:
    nbytes: int
    cost: float
    form: str


def choose_within(sizes: Sizes, costs: Costs, budget: int) -> Choice:
    """Return the choice within `budget` bytes. RecipeError if there is none."""
    hulls = {unit.name: _hull(_points(unit, costs)) for unit in sizes.units}
    smallest = sizes.rest + sum(hull[0].nbytes for hull in hulls.values())
    check_enough(smallest, budget)
    taken = dict.fromkeys(hulls, 0)
    steps = [_step(name, hull, 0) for name, hull in hulls.items() if hull[1:]]
    heapq.heapify(steps)
    nbytes = smallest
    while steps:
        _, name = heapq.heappop(steps)
        hull, place = hulls[name], taken[name]
        more = hull[place + 1].nbytes - hull[place].nbytes
        if nbytes + more > budget:
            continue  # nor does what follows it in this unit
        nbytes, taken[name] = nbytes + more, place + 1
        if hull[place + 2 :]:
            heapq.heappush(steps, _step(name, hull, place + 1))
    points = {name: hulls[name][place] for name, place in taken.items()}
    forms = {name: point.form for name, point in points.items()}
    return Choice(forms, nbytes, sum(point.cost for point in points.values()))


def planned(sizes: Sizes, costs: Costs) -> Choice | None:
    """Return what the recipe itself gives every unit; None if a cost of that is not known."""
    forms = {unit.name: unit.planned for unit in sizes.units}
    found = [costs.cost(unit, unit.planned) for unit in sizes.units]
    known = [cost for cost in found if cost is not None]
    if len(known) < len(found) or any(unit.planned not in unit.sizes for unit in sizes.units):
        return None
    return Choice(forms, sizes.total(forms), sum(known))


def check_enough(smallest: int, budget: int) -> None:
    """Refuse a budget below the smallest size there is. RecipeError."""
    if smallest > budget:
        expected = f"at least {smallest:,}, the size with the smallest form of every weight"
        raise RecipeError("the size", f"is {budget:,} bytes", expected)


def _step(name: str, hull: Sequence[_Point], place: int) -> tuple[float, str]:
    """Return how a step sorts: by the cost that it saves for each byte, most first."""
    here, there = hull[place], hull[place + 1]
    return (there.cost - here.cost) / (there.nbytes - here.nbytes), name


def _points(unit: Unit, costs: Costs) -> list[_Point]:
    """Return the forms whose cost is known. RecipeError if there is none."""
    known = ((form, costs.cost(unit, form)) for form in unit.sizes)
    points = [_Point(unit.sizes[form], cost, form) for form, cost in known if cost is not None]
    if not points:
        raise RecipeError(f"no cost is known of {unit.name} in {' or '.join(unit.sizes)}")
    return points


def _hull(points: Iterable[_Point]) -> list[_Point]:
    """Return the lower convex hull: larger costs less, and each byte saves less than before."""
    hull: list[_Point] = []
    for point in sorted(points, key=lambda point: (point.nbytes, point.cost)):
        if hull and point.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(left: _Point, middle: _Point, right: _Point) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    ahead = (right.cost - left.cost) * (middle.nbytes - left.nbytes)
    return (middle.cost - left.cost) * (right.nbytes - left.nbytes) >= ahead
