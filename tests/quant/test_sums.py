"""The compiled sums are those of the definition, to the rounding of float64."""

from __future__ import annotations

from dataclasses import asdict
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.measure import Error
from quant.measure import measure as defined
from quant.sums import measure

SHAPES = st.sampled_from([(1, 1), (3, 63), (2, 64), (5, 65), (4, 200), (2, 3, 130), (7,)])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def assert_alike(one: Error, other: Error) -> None:
    for (name, mine), its in zip(asdict(one).items(), asdict(other).values(), strict=True):
        if isinstance(mine, float):
            assert mine == pytest.approx(its, rel=1e-12, abs=1e-12), name
        else:
            assert mine == its, name


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 99), scale=st.integers(-20, 10))
def test_the_sums_are_those_of_the_definition(shape, dtype, seed, scale):
    draw = torch.Generator().manual_seed(seed)
    w = (torch.randn(shape, generator=draw) * 2.0**scale).to(dtype)
    w[torch.rand(shape, generator=draw) < 0.2] = 0
    decoded = (w.float() * 8 / 2.0**scale).round() / 8 * 2.0**scale
    decoded[-1:] *= seed % 2  # sometimes rows are emptied
    assert_alike(measure(w, decoded), defined(w, decoded))


def test_a_row_that_is_lost_counts_once_and_a_row_of_zeros_does_not():
    w = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    error = measure(w, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 4.0]]))
    assert (error.zeros, error.zero_rows, error.count) == (3, 1, 6)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_left_to_the_definition(bad, side):
    sides = [torch.ones(3, 70), torch.ones(3, 70)]
    sides[side][1, 66] = bad
    assert repr(measure(*sides)) == repr(defined(*sides))


def test_no_weights_have_no_error():
    assert measure(torch.zeros(0, 4), torch.zeros(0, 4)) == Error()


def test_columns_in_another_order_and_views_are_measured_as_they_are():
    w = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_alike(measure(w.T, w.T.float() + 0.5), defined(w.T, w.T.float() + 0.5))
