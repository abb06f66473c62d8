"""Errors: their sums, their definition, and what they say of hopeless cases."""

from math import inf, isnan, nan, sqrt

import pytest
import torch

from quant.measure import Error, bound, measure, same_bits


def test_measure_counts_what_its_fields_say():
    w = torch.tensor([[3.0, 4.0, 0.0], [1e-3, 0.0, 0.0], [0.0, 0.0, 0.0]])
    decoded = torch.tensor([[3.0, 3.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    codes = torch.tensor([[-448.0, 448.0, 0.0]] + [[0.0] * 3] * 2).to(torch.float8_e4m3fn)
    error = measure(w, decoded, scale=torch.tensor(2.0**-7), codes=codes)
    assert error.sum_sq_error == pytest.approx(0.25 + 1e-6)
    assert error.sum_sq == pytest.approx(25.0 + 1e-6)
    assert error.sum_dot == 9.0 + 14.0
    assert error.sum_sq_q == 9.0 + 12.25
    assert error.max_abs == 0.5
    assert error.saturated == 2
    assert error.zeros == 1
    assert error.zero_rows == 1
    assert error.outside == 2  # 0.5 of 4, and 1e-3 where half a step is 2^-17
    assert error.count == 9
    assert error.relative_rms == pytest.approx(sqrt(0.250001 / 25.000001))


def test_errors_add_up_in_any_grouping():
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(12, 7, generator=draw)
    decoded = w + torch.randn(12, 7, generator=draw) * 0.1
    whole = measure(w, decoded)
    left, middle, right = (measure(w[i : i + 4], decoded[i : i + 4]) for i in (0, 4, 8))
    for total in ((left + middle) + right, left + (middle + right)):
        assert total.relative_rms == pytest.approx(whole.relative_rms)
        assert total.cosine == pytest.approx(whole.cosine)
        assert (total.max_abs, total.count) == (whole.max_abs, whole.count)


def test_adding_in_place_changes_the_left_side_only():
    total, part = Error(count=1, max_abs=0.5), Error(count=2, max_abs=0.25)
    both = total
    both += part
    assert total == Error(count=3, max_abs=0.5)
    assert part == Error(count=2, max_abs=0.25)
    assert total + part == Error(count=5, max_abs=0.5)
    assert total == Error(count=3, max_abs=0.5)


def test_a_nan_survives_every_sum():
    broken = measure(torch.tensor([[nan, 1.0]]), torch.ones(1, 2), scale=torch.tensor(1.0))
    assert broken.outside == 1
    for total in (Error() + broken, broken + Error()):
        assert isnan(total.relative_rms)
        assert isnan(total.max_abs)


def test_an_infinity_is_outside_whatever_the_scale():
    error = measure(torch.ones(1, 1), torch.full((1, 1), inf), scale=torch.tensor(inf))
    assert error.outside == 1


@pytest.mark.parametrize(
    ("error", "relative_rms", "cosine"),
    [
        (Error(), 0.0, 1.0),
        (Error(sum_sq_error=1.0, sum_sq_q=1.0), inf, 0.0),
        (Error(sum_sq_error=1.0, sum_sq=1.0), 1.0, 0.0),
    ],
)
def test_nothing_and_everything_lost_are_told_apart(error, relative_rms, cosine):
    assert error.relative_rms == relative_rms
    assert error.cosine == cosine


def test_the_bound_is_half_a_step_with_slack_for_a_rounded_scale():
    w = torch.tensor([16.0, 0.0])
    assert bound(w, torch.tensor(1.0)).tolist() == pytest.approx([1.0625, 2.0**-10], rel=2e-6)


def test_reports_show_six_digits():
    error = Error(sum_sq_error=1.0, sum_sq=3.0, sum_dot=2.0, sum_sq_q=2.0, saturated=4, zeros=5)
    assert error.as_dict() == {
        "relative_rms": 0.57735,
        "max_abs": 0.0,
        "cosine": 0.816497,
        "saturated": 4,
        "zeros": 5,
        "zero_rows": 0,
    }


@pytest.mark.parametrize("count", [0, 1, 7, 8, 4097])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_bits_are_the_same_wherever_they_begin_and_however_many(count, dtype):
    """By words where that goes, else by bytes: one bit anywhere is found."""
    rows = torch.arange(3 + count).to(dtype)
    one, other = rows[3:], rows.clone()[3:]
    assert same_bits(one, other)
    for place in {0, count // 2, count - 1} if count else ():
        changed = other.clone()
        changed.view(torch.uint8)[place] += 1
        assert not same_bits(one, changed)
    assert not same_bits(one, one[None])


def test_bits_are_not_values():
    assert same_bits(torch.full((4,), nan), torch.full((4,), nan))
    assert not same_bits(torch.zeros(2), -torch.zeros(2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
