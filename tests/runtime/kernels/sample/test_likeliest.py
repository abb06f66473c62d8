from __future__ import annotations

import pytest
import torch

from runtime.kernels.sample.likeliest import likeliest, likeliest_reference

INF = float("inf")


@pytest.mark.parametrize("size", [5, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_finds_the_first_of_the_largest(size, dtype, interpreter):
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    logits[1] = -3
    logits[2] = -INF
    logits[2, -1] = -9
    logits[3, size // 2 :] = logits[3].max() + 1
    got = likeliest(logits, -2)
    assert torch.equal(got, likeliest_reference(logits, -2))
    assert got.tolist()[1:] == [0, size - 1, size // 2]


@pytest.mark.parametrize("wrong", [torch.nan, -torch.nan, INF])
def test_a_row_with_nan_or_infinity_has_none(wrong, interpreter):
    logits = torch.zeros(2, 3000)
    logits[1, 2500] = wrong
    assert likeliest(logits, -2).tolist() == [0, -2]
