"""Rounding keys and values as an FP8 cache does."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels.attention.fp8_cache import LARGEST, Fp8Cache, rounded

SCALES = [1.0, 0.0123, 2.0**-7, 3.7]


def every_code():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes[codes.isfinite()]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_twice_is_rounding_once(scale, dtype):
    """Padding rounds cells again that are rounded already."""
    scale = torch.tensor(scale)
    once = (every_code() * scale).to(dtype)
    assert torch.equal(rounded(once, scale), once)


@pytest.mark.parametrize("scale", SCALES)
def test_a_value_goes_to_the_nearest_code_and_what_is_too_large_to_the_largest(scale):
    scale = torch.tensor(scale)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 200 * scale
    grid = every_code() * scale
    nearest = (x[:, None] - grid).abs().min(1).values
    assert torch.allclose((rounded(x, scale) - x).abs(), nearest, rtol=1e-4, atol=1e-6)
    far = torch.tensor([-1e30, -449.0, 470.0, 1e9]) * scale
    expected = torch.tensor([-1.0, -1.0, 1.0, 1.0]) * LARGEST * scale
    assert torch.equal(rounded(far, scale), expected)


def test_keys_and_values_have_a_scale_each_and_other_places_stay():
    pools = torch.randn(2, 3, 5, 2, 8, generator=torch.Generator().manual_seed(2))
    before, cache = pools.clone(), Fp8Cache(torch.tensor(0.01), torch.tensor(0.5))
    at = torch.tensor([0, 2, 2]), torch.tensor([4, 0, 1])
    cache.round(*pools, *at)
    for pool, old, scale in zip(pools, before, (cache.key_scale, cache.value_scale), strict=True):
        assert torch.equal(pool[at], rounded(old[at], scale))
        pool[at] = old[at]
    assert torch.equal(pools, before)
