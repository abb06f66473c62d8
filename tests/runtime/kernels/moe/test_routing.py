from __future__ import annotations

import pytest
import torch

from runtime.kernels.moe.routing import (
    route,
    route_absorbed,
    route_absorbed_reference,
    route_reference,
)

# A softmax over a few dozen logits, then a division: a few units of 2^-24.
FLOAT32 = 1e-6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("num_experts", [7, 64])
def test_the_routing_kernel_chooses_as_the_reference(num_experts, interpreter):
    logits = normal(9, num_experts + 1)
    weights, experts = route(logits[:, :-1], 3)
    expected_weights, expected_experts = route_reference(logits[:, :-1], 3)
    assert torch.equal(experts, expected_experts)
    assert distance(weights, expected_weights) < FLOAT32
    weights, experts = route_absorbed(logits, 3)
    expected_weights, expected_experts = route_absorbed_reference(logits, 3)
    assert torch.equal(experts, expected_experts)
    assert distance(weights, expected_weights) < FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_routing_kernel_orders_what_is_negative_equal_or_zero(dtype, interpreter):
    """Of equal logits, and of zeros of both signs, the lower number comes first."""
    rows = [[-3, -1, -2, -1, -4, -5], [0, -0.0, 0, -1, 1, -0.0], [-2.0] * 6]
    logits = torch.tensor(rows, dtype=dtype)
    weights, experts = route(logits, 4)
    assert experts.tolist() == [[1, 3, 2, 0], [4, 0, 1, 2], [0, 1, 2, 3]]
    expected = logits.gather(1, experts).float().softmax(-1)
    assert (weights.float() - expected).abs().max() <= torch.finfo(dtype).eps
