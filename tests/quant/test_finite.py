"""Counting NaN and infinity by bits agrees with torch on every pattern."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.errors import QuantError
from quant.finite import STRIP, count_not_finite
from quant.plain import VALUES, Plain

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_every_pattern_of_two_bytes_is_judged_as_torch_does(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    bad = ~every.isfinite()
    assert count_not_finite(every) == int(bad.sum()) > 0
    assert count_not_finite(every[~bad]) == 0
    assert all(count_not_finite(one) == 1 for one in every[bad].split(1))


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1))
def test_patterns_of_four_bytes_are_judged_as_torch_does(bits):
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert count_not_finite(x) == int((~x.isfinite()).sum())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("at", [0, STRIP - 1, STRIP, 3 * STRIP - 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_is_found_anywhere(dtype, at, bad):
    x = torch.ones(3 * STRIP, dtype=dtype)
    assert count_not_finite(x) == 0
    x[at] = bad
    assert count_not_finite(x) == count_not_finite(x.view(3, -1).T) == 1
    x[at] = -x[at]
    assert count_not_finite(x) == 1


def test_other_shapes_and_types_are_counted_too():
    assert count_not_finite(torch.empty(0, 5)) == 0
    assert count_not_finite(torch.tensor(torch.nan)) == 1
    assert count_not_finite(torch.tensor([1.0, torch.nan], dtype=torch.float64)) == 1


def test_what_is_kept_must_be_finite_in_the_type_it_is_kept_in():
    w = torch.tensor([[1.0, 70000.0], [2.0, 3.0]])
    assert Plain("BF16").encode(w)[VALUES].isfinite().all()
    with pytest.raises(QuantError, match="1 of 4 weights are NaN or infinite in F16"):
        Plain("F16").encode(w)
    w[1, 0] = torch.nan
    with pytest.raises(QuantError, match="1 of 4 weights are NaN or infinite in F32"):
        Plain("F32").encode(w)
    assert Plain("F32").defects({VALUES: w}) == {VALUES: ("values that are NaN or infinite", 1)}
    assert Plain("F32").defects({VALUES: w[:1]}) == {}
