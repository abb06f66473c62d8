from __future__ import annotations

import pytest
import torch

from benchmarks.cases.setting import BITS, ONCE, Bound, Part, poison
from benchmarks.cases.verdict import verdict


def part(got, expected, bound, name="y"):
    return Part(name, torch.tensor(got), torch.tensor(expected), bound)


def test_the_output_nearest_to_its_tolerance_is_told():
    parts = [part([1.001], [1.0], Bound(0.01), "near"), part([1.004], [1.0], Bound(0.1), "far")]
    said = verdict(parts)
    assert said["worst"] == "near"
    assert said["relative_rms"] == pytest.approx(1e-3, rel=1e-3)
    assert said["tolerance"] == "relative rms 0.01"
    assert said["passed"]


def test_every_output_beyond_its_tolerance_is_told():
    parts = [part([1.0], [1.0], BITS), part([1.1], [1.0], Bound(0.01), "o"), part([2], [1], BITS)]
    said = verdict(parts)
    assert not said["passed"]
    assert said["failed"] == ["o", "y"]


@pytest.mark.parametrize("bound", [BITS, ONCE, Bound(0.01), Bound(atol=9.0)])
def test_a_nan_does_not_pass(bound):
    assert verdict([part([1.0, 2.0], [1.0, 2.0], bound)])["passed"]
    assert not verdict([part([1.0, torch.nan], [1.0, 2.0], bound)])["passed"]


def test_one_element_beyond_the_absolute_bound_is_seen_among_many():
    got, expected = torch.ones(10_000), torch.ones(10_000)
    got[7] += 0.02
    assert not verdict([Part("y", got, expected, ONCE)])["passed"]
    assert verdict([Part("y", got, expected, Bound(0.002))])["passed"]


def test_bits_tell_minus_zero_from_zero():
    assert not verdict([part([-0.0, 1.0], [0.0, 1.0], BITS)])["passed"]


def test_new_tensors_are_poisoned_inside_alone():
    with poison():
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int64) == 2**63 - 1).all()
    assert not torch.are_deterministic_algorithms_enabled()
