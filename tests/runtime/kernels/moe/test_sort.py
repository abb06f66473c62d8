from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.launch import interpreting
from runtime.kernels.moe import sort
from runtime.kernels.moe.sort import expert_blocks, expert_blocks_reference

COUNTS = (0, 1, 63, 64, 65, 127, 128, 129, 200, 0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def used(blocks):
    return blocks[blocks[:, 0] >= 0]


def shuffled(counts, seed=0):
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed))]


@given(
    tokens=st.integers(1, 40),
    k=st.integers(1, 5),
    num_experts=st.integers(5, 12),
    size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_each_pair_stands_in_one_block_of_its_expert(tokens, k, num_experts, size, seed):
    experts = normal(tokens, num_experts, seed=seed).topk(k).indices
    order, blocks = expert_blocks(experts, num_experts, size)
    seen = []
    for expert, first, end in blocks.tolist():
        if expert >= 0:
            assert 0 < end - first <= size
            pairs = order[first:end]
            assert (experts.flatten()[pairs] == expert).all()
            seen += pairs.tolist()
    assert sorted(seen) == list(range(tokens * k))


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 130),
    k=st.integers(1, 8),
    num_experts=st.sampled_from([8, 9, 15, 16, 31]),
    size=st.sampled_from([1, 16, 128]),
    few=st.sampled_from([0, 1 << 11]),
    seed=st.integers(0, 99),
)
def test_the_kernels_sort_and_cut_as_the_reference(tokens, k, num_experts, size, few, seed):
    """Up to 1040 pairs: nine tiles in three launches, or all at once."""
    experts = normal(tokens, num_experts, seed=seed).topk(k).indices
    with interpreting(), patch.object(sort, "_FEW_PAIRS", few):
        order, blocks = expert_blocks(experts, num_experts, size)
    expected_order, expected_blocks = expert_blocks_reference(experts, num_experts, size)
    assert torch.equal(order, expected_order)
    assert torch.equal(used(blocks), used(expected_blocks))
    assert (blocks[:, 0] >= -1).all()


@pytest.mark.parametrize("few", [0, 1 << 10])
@pytest.mark.parametrize("size", [1, 64, 128])
def test_experts_of_any_number_of_pairs_are_cut(size, few, interpreter, monkeypatch):
    monkeypatch.setattr(sort, "_FEW_PAIRS", few)
    experts = shuffled(COUNTS).view(-1, 1)
    order, blocks = expert_blocks(experts, len(COUNTS), size)
    expected_order, expected_blocks = expert_blocks_reference(experts, len(COUNTS), size)
    assert torch.equal(order, expected_order)
    assert torch.equal(used(blocks), used(expected_blocks))


def test_one_expert_may_have_all_pairs(interpreter):
    """More than 256 tiles of counts and 128 blocks, which are two steps of both loops."""
    experts = torch.full((33000, 1), 2)
    order, blocks = expert_blocks(experts, 4, 128)
    assert torch.equal(order, torch.arange(33000))
    expected = expert_blocks_reference(experts, 4, 128)[1]
    assert torch.equal(used(blocks), used(expected))
