"""Scales, figures and labels of pictures."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_convert.page.labels import Ground, apart, place_labels
from qwen35_convert.page.scale import Scale, errors_scale, figure, short, sizes_scale

SIZES = st.floats(1, 1e12)
ERRORS = st.one_of(st.floats(0, 100), st.sampled_from([math.nan, math.inf, 0.0, 1e-12]))


@given(st.lists(SIZES, min_size=1, max_size=9))
def test_every_size_has_its_place_and_there_are_ticks(sizes):
    scale = sizes_scale(sizes, 10, 500)
    assert all(10 <= scale(size) <= 500 for size in sizes)
    assert 1 <= len(scale.ticks()) <= 14
    assert all(scale.low <= tick <= scale.high * (1 + 1e-9) for tick in scale.ticks())


@given(st.lists(ERRORS, min_size=1, max_size=9))
def test_every_error_has_its_place_on_a_log_scale(errors):
    scale = errors_scale(errors, 400, 20)
    for error in errors:
        if math.isfinite(error):
            assert 20 <= scale(error) <= 400
    places = [scale(tick) for tick in scale.ticks()]
    assert places == sorted(places, reverse=True)


def test_what_is_no_error_stands_at_the_foot_under_the_least():
    scale = errors_scale([0.0, 1e-3, 1e-1], 400, 20)
    assert scale.none
    assert scale(0.0) == 400
    assert scale(1e-3) < 390
    assert not errors_scale([1e-3, 1e-1], 400, 20).none


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0"), (0.5, "0.500"), (0.01234, "0.0123"), (12.345, "12.3"), (123.4, "123"),
        (1e-4, "0.000100"), (0.0000123, "1.2e-5"), (math.nan, "not finite"), (5e7, "5.0e7"),
    ],
)  # fmt: skip
def test_figures_have_three_digits(value, told):
    assert figure(value) == told


def test_axes_name_round_values_shortly():
    assert [short(x) for x in (0.01, 2.5, 1e-5, 20.0)] == ["0.01", "2.5", "1e-5", "20"]
    assert Scale(0.02, 3, 0, 1).ticks() == [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    assert Scale(1e-6, 1, 0, 1).ticks() == [1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0]


def test_names_of_points_do_not_cover_each_other():
    points = [(100.0, 100.0, "one"), (130.0, 100.0, "two"), (112.0, 104.0, "three")]
    labels = place_labels(points, Ground((0, 0, 400, 300), []), 12)
    assert len({(label.x, label.y) for label in labels if label}) == 3
    crowd = [(100.0, 100.0 + i, "a long name") for i in range(12)]
    assert None in place_labels(crowd, Ground((0, 0, 400, 300), []), 12)
    edge = place_labels([(395.0, 100.0, "at the edge")], Ground((0, 0, 400, 300), []), 12)
    assert edge[0].anchor == "end"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_names_beside_lines_are_apart_and_in_order(places):
    moved = apart(places, 10, 0, 100)
    order = sorted(range(len(places)), key=lambda i: places[i])
    assert all(moved[b] - moved[a] >= 10 - 1e-9 for a, b in pairwise(order))
    assert max(moved) <= 100 + 1e-9
