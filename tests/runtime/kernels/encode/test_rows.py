from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.kernels.encode.rows import quantize_rows, quantize_rows_reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def representable(m, k, group, seed=0):
    """Numbers that E4M3 holds exactly under their group's scale, which is a power of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (m, k), generator=generator) * 32.0
    x[:, ::group] = 448.0
    exponents = torch.randint(-3, 4, (m, -(-k // group)), generator=generator)
    return x * torch.exp2(exponents.float()).repeat_interleave(group, 1)[:, :k]


@given(
    m=st.integers(1, 9),
    k=st.integers(1, 300),
    group=st.integers(1, 140),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 99),
)
def test_the_error_is_at_most_half_a_step(m, k, group, exponent, seed):
    """Three mantissa bits and a smallest step of 2^-9: half of either is the most."""
    x = normal(m, k, seed=seed) * 2.0**exponent
    codes, scale = quantize_rows(x, group)
    s = scale.repeat_interleave(group, 1)[:, :k]
    bound = torch.maximum(x.abs() * 2**-4, s * 2**-10) * (1 + 2**-20)
    assert ((codes.float() * s - x).abs() <= bound).all()


def test_the_largest_of_each_group_is_the_largest_code():
    x = normal(5, 300)
    codes, scale = quantize_rows(x, 128)
    assert scale.shape == (5, 3)
    for group in (slice(0, 128), slice(128, 256), slice(256, 300)):
        assert (codes[:, group].float().abs().amax(1) == 448).all()


def test_a_group_of_zeros_has_scale_one():
    x = torch.zeros(2, 256)
    x[0, 130], x[1, 200] = 1.0, 1e-44
    codes, scale = quantize_rows(x, 128)
    assert torch.equal(scale, torch.tensor([[1.0, 1 / 448], [1.0, 1.0]]))
    assert codes.float().isfinite().all()


@pytest.mark.parametrize(("m", "k", "group"), [(1, 128, 128), (5, 300, 128), (3, 70, 70)])
def test_the_kernel_gives_the_codes_of_the_reference(m, k, group, interpreter):
    """The interpreter's cast to E4M3 is wrong where it has to round: here it has not."""
    x = representable(m, k, group)
    codes, scale = quantize_rows(x, group)
    expected_codes, expected_scale = quantize_rows_reference(x, group)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.float(), expected_codes.float())


def test_rows_are_filled_up_to_a_multiple(interpreter):
    x = representable(5, 300, 128)
    codes, scale = quantize_rows(x, 128, 16)
    expected_codes, expected_scale = quantize_rows_reference(x, 128)
    assert codes.shape == (16, 300)
    assert scale.stride() == (1, 16)
    assert torch.equal(scale[:5], expected_scale)
    assert torch.equal(codes[:5].float(), expected_codes.float())
