from __future__ import annotations

import pytest
import torch

from runtime.kernels.moe.router import few_logits

# sums of at most 300 products of float32
FLOAT32 = 300 * 2**-24


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [2, 5, 8])
@pytest.mark.parametrize(("num_experts", "hidden"), [(1, 256), (8, 300), (17, 31)])
def test_logits_of_a_few_tokens_are_products(tokens, num_experts, hidden, interpreter):
    """Rows of x stand apart; the last program may have one expert."""
    x = normal(tokens, hidden + 3)[:, :hidden]
    router = normal(num_experts, hidden, seed=1)
    expected = x.double() @ router.double().T
    scale = x.double().abs() @ router.double().abs().T
    assert ((few_logits(x, router) - expected).abs() <= FLOAT32 * scale).all()
