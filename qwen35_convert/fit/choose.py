"""Choose the form of each unit so that the predicted cost is least within a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from quant.mix.spend import Option, hull, spend
from qwen35_convert.errors import RecipeError
from qwen35_convert.fit.sizes import Costs, Sizes, Unit


@dataclass(frozen=True, slots=True)
class Choice:
    """The form of each unit by its name, the bytes of it all, and the cost that is predicted."""

    forms: dict[str, str]
    nbytes: int
    cost: float


def choose_within(sizes: Sizes, costs: Costs, budget: int) -> Choice:
    """Return the choice within `budget` bytes. RecipeError if there is none."""
    hulls = [hull(_options(unit, costs)) for unit in sizes.units]
    check_enough(sizes.rest + sum(options[0].nbytes for options in hulls), budget)
    chosen = spend(hulls, budget - sizes.rest)
    forms = {unit.name: option.form for unit, option in zip(sizes.units, chosen, strict=True)}
    return Choice(forms, sizes.total(forms), sum(option.cost for option in chosen))


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


def _options(unit: Unit, costs: Costs) -> list[Option]:
    """Return the forms whose cost is known. RecipeError if there is none."""
    known = ((form, costs.cost(unit, form)) for form in unit.sizes)
    options = [Option(unit.sizes[form], cost, form) for form, cost in known if cost is not None]
    if not options:
        raise RecipeError(f"no cost is known of {unit.name} in {' or '.join(unit.sizes)}")
    return options
