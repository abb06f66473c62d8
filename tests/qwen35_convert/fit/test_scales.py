"""Scales of kinds and depths from probes whose answer is known."""

from __future__ import annotations

import pytest

from qwen35_convert.fit.scales import Places, fit_scales

KINDS = {"a": 2.0, "b": 0.5}
DEPTHS = {0: 3.0, 1: 1.0, 2: 0.25}
ERRORS = {("a", 0): 1.0, ("a", 1): 2.0, ("a", 2): 5.0, ("b", 0): 4.0, ("b", 2): 3.0}


def marginals(share=1.0):
    costs = {(k, d): KINDS[k] * DEPTHS[d] * error for (k, d), error in ERRORS.items()}
    by_kind = {kind: sum(c for (k, _), c in costs.items() if k == kind) for kind in KINDS}
    by_depth = {d: share * sum(c for (_, e), c in costs.items() if e == d) for d in DEPTHS}
    return costs, by_kind, by_depth


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_scales_that_gave_the_probes_are_found_again(share):
    costs, by_kind, by_depth = marginals(share)
    scales = fit_scales(ERRORS, by_kind, by_depth)
    for cell, error in ERRORS.items():
        assert scales.of(cell) * error == pytest.approx(costs[cell], rel=1e-6)


def test_a_kind_outside_the_layers_has_its_own_scale():
    _, by_kind, by_depth = marginals()
    scales = fit_scales(ERRORS | {("head", None): 4.0}, by_kind | {"head": 2.0}, by_depth)
    assert scales.of(("head", None)) == 0.5


def test_probes_without_a_difference_cost_nothing():
    scales = fit_scales(ERRORS, dict.fromkeys(KINDS, 0.0), dict.fromkeys(DEPTHS, 0.0))
    assert scales.of(("a", 0)) == 0.0
    assert scales.of(("unknown", 1)) == 0.0


def test_every_layer_has_a_depth():
    places = Places(36)
    assert places.place("layers.7.mlp.experts.11.gate_proj") == ("mlp.experts.gate_proj", 7)
    assert places.cell(("mlp.experts.gate_proj", 7)) == ("mlp.experts.gate_proj", 3)
    assert places.cell(places.place("lm_head")) == ("lm_head", None)
    ranges = [places.range(depth) for depth in range(places.depths)]
    assert [first for first, _ in ranges][1:] == [last + 1 for _, last in ranges][:-1]
    assert (ranges[0][0], ranges[-1][1]) == (0, 35)
