"""The choice within a size, against every choice that there is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen35_convert as q
from qwen35_convert.fit.choose import choose_within
from qwen35_convert.fit.sizes import Sizes, Unit

RECIPE = q.read_recipe("gguf-q8_0")


class Table:
    """Costs by unit and form."""

    def __init__(self, costs):
        self.costs = costs

    def cost(self, unit, form):
        return self.costs[unit.name].get(form)


tables = st.lists(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def problem(table):
    units, costs = [], {}
    for i, forms in enumerate(table):
        sizes = {f"f{j}": size for j, (size, _) in enumerate(forms)}
        units.append(Unit(f"u{i}", "linear", (f"u{i}",), 1, sizes))
        costs[f"u{i}"] = {f"f{j}": float(cost) for j, (_, cost) in enumerate(forms)}
    return Sizes(RECIPE, tuple(units), rest=7), Table(costs)


@given(tables, st.integers(7, 220))
def test_the_choice_fits_and_is_the_best_of_its_size(table, budget):
    sizes, costs = problem(table)
    every = [
        (sum(size for size, _ in forms) + 7, sum(cost for _, cost in forms))
        for forms in product(*table)
    ]
    if min(nbytes for nbytes, _ in every) > budget:
        with pytest.raises(q.RecipeError, match="expected at least"):
            choose_within(sizes, costs, budget)
        return
    choice = choose_within(sizes, costs, budget)
    assert choice.nbytes == sizes.total(choice.forms) <= budget
    fitting = [cost for nbytes, cost in every if nbytes <= budget]
    step = max(cost for forms in table for _, cost in forms)
    assert min(fitting) <= choice.cost <= min(fitting) + step


@given(tables)
def test_with_room_for_all_every_unit_costs_least(table):
    sizes, costs = problem(table)
    choice = choose_within(sizes, costs, 10**6)
    assert choice.cost == sum(min(cost for _, cost in forms) for forms in table)


def test_a_unit_without_a_cost_is_named():
    sizes, _ = problem([[(1, 1)]])
    with pytest.raises(q.RecipeError, match="no cost is known of u0"):
        choose_within(sizes, Table({"u0": {}}), 100)
