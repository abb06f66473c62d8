from __future__ import annotations

import pytest
import torch

from runtime.kernels.sample.draw import NO_TOKEN, by_counts, by_sort
from tests.runtime.models import needs_cuda

INF = float("inf")
WAYS = [
    (1.0, INF, 1.0),
    (0.7, 20.0, 0.8),
    (1.5, 1.0, 1.0),
    (0.3, 3000.0, 0.9),
    (1e-100, INF, 1e-9),
]


def rows(count, size, seed, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, size, generator=generator) * scale).bfloat16()


def numbers(count, seed):
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("size", "scale", "number"),
    [
        (5, 3.0, None),
        (5000, 3.0, None),
        (5000, 0.01, None),
        (300, 1.0, 0.0),
        (300, 1.0, 1 - 2**-53),
    ],
)
def test_counting_draws_what_sorting_does(size, scale, number, interpreter):
    """Many logits are alike where they are small: which of them it is depends on their order."""
    ways = torch.tensor(WAYS, dtype=torch.float64)
    logits, at = rows(len(ways), size, size, scale), numbers(len(ways), size)
    at = at if number is None else torch.full_like(at, number)
    assert by_counts(logits, ways, at).tolist() == by_sort(logits, ways, at).tolist()


def test_zeros_of_both_signs_and_endless_logits_have_their_places(interpreter):
    logits = torch.tensor(
        [
            [0.0, -0.0, 0.0, -INF, -0.0],
            [-INF, -3.0, -INF, -3.0, -3.0],
            [1.0, INF, 0.0, 2.0, 3.0],
            [1.0, -torch.nan, 0.0, 2.0, 3.0],
        ]
    ).bfloat16()
    ways = torch.tensor([[1.0, INF, 1.0]] * 4, dtype=torch.float64)
    for at in (0.3, 0.9):
        at = torch.full((4,), at, dtype=torch.float64)
        got = by_counts(logits, ways, at).tolist()
        assert got == by_sort(logits, ways, at).tolist()
        assert got[2:] == [NO_TOKEN, NO_TOKEN]


@pytest.mark.gpu
@needs_cuda
def test_counting_draws_what_sorting_does_from_a_whole_vocabulary():
    ways = torch.tensor(WAYS, dtype=torch.float64, device="cuda")
    for seed in range(4):
        logits, at = rows(len(WAYS), 248320, seed).cuda(), numbers(len(WAYS), seed).cuda()
        assert torch.equal(by_counts(logits, ways, at), by_sort(logits, ways, at))
