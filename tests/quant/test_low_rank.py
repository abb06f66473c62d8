"""Merged rows: rounded once, and the same in whatever order a machine adds products."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.low_rank import add_low_rank
from tests.adapters import is_merged, noise

EXACT = torch.float64


@given(
    r=st.integers(1, 70), k=st.integers(1, 40), spread=st.integers(0, 30), seed=st.integers(0, 999)
)
def test_the_order_of_the_ranks_does_not_change_a_bit(r, k, spread, seed):
    """Sums of products are exact: BLAS may add them as it likes."""
    generator = torch.Generator().manual_seed(seed)
    left, right, w = (torch.randn(*s, generator=generator) for s in ((5, r), (r, k), (5, k)))
    left = left * 2.0 ** -torch.randint(0, spread + 1, (5, r), generator=generator)
    order = torch.randperm(r, generator=generator)
    one, other = (
        add_low_rank(w, left, right, 0.7),
        add_low_rank(w, left[:, order], right[order], 0.7),
    )
    assert torch.equal(one, other)


def exact_dot(row: torch.Tensor, column: torch.Tensor) -> Fraction:
    pairs = zip(row.tolist(), column.tolist(), strict=True)
    return sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))


def test_factors_in_bfloat16_lose_nothing():
    """Of eight bits within 2^16 of the largest, all lie on the grid: the sum is the exact one."""
    left, right = noise(3, 16).bfloat16(), noise(16, 7, seed=2).bfloat16()
    w = torch.zeros(3, 7, dtype=torch.float32)
    exact = [[float(exact_dot(row, column)) for column in right.mT] for row in left]
    assert torch.equal(add_low_rank(w, left, right, 1.0), torch.tensor(exact, dtype=EXACT).float())


@given(
    r=st.integers(1, 64), scale=st.sampled_from([0.25, 2.0, 1 / 3, 16.0]), seed=st.integers(0, 999)
)
def test_the_sum_is_as_near_as_float32(r, scale, seed):
    """A factor is off by half a step of 2^-b of the largest beside it, b = 23 bits at least."""
    left, right = noise(6, r, seed=seed), noise(r, 50, seed=seed + 1)
    w = noise(6, 50, seed=seed + 2)
    true = w.double() + scale * (left.double() @ right.double())
    left_max, right_max = left.abs().amax(1, keepdim=True), right.abs().amax(0, keepdim=True)
    off = 2.0**-23 * (left_max @ right.abs().sum(0, keepdim=True))
    off += 2.0**-23 * (left.abs().sum(1, keepdim=True) @ right_max)
    bound = scale * off.double() * (1 + 2.0**-20) + true.abs() * 2.0**-24
    assert ((add_low_rank(w, left, right, scale).double() - true).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_keep_their_type(dtype):
    w, left, right = noise(300, 700).to(dtype), noise(300, 8, seed=3), noise(8, 700, seed=4)
    merged = add_low_rank(w, left, right, 2.0)
    assert merged.dtype == dtype
    assert is_merged(merged, w, left, right, 2.0)


def test_what_is_not_finite_stays_so():
    left = noise(2, 4)
    left[1, 2] = torch.nan
    merged = add_low_rank(noise(2, 6), left, noise(4, 6), 1.0)
    assert merged[0].isfinite().all()
    assert merged[1].isnan().all()
