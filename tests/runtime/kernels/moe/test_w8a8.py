from __future__ import annotations

import dataclasses

import pytest
import torch

from runtime.kernels.encode.rows import quantize_rows
from runtime.kernels.linear.weight import Fp8Weight
from runtime.kernels.moe import w8a8
from runtime.kernels.moe.layer import expert_terms, moe_experts, moe_experts_reference
from runtime.kernels.moe.sort import expert_blocks

COUNTS = (0, 1, 63, 64, 65, 127, 128, 129, 200)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def signs(*shape, seed=0):
    """Return weights -1, 0 and 1 in blocks with any scale."""
    experts, n, k = shape
    codes = normal(*shape, seed=seed).round().clamp(-1, 1).to(torch.float8_e4m3fn)
    scale = torch.exp(normal(experts, -(-n // 128), -(-k // 128), seed=seed + 1)) / k**0.5
    return Fp8Weight(codes, scale, dynamic=True)


def chosen(counts, k, seed=0):
    """Return the experts [T, k] of tokens in random order, each expert with so many pairs."""
    pairs = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    experts = pairs.view(k, -1).T
    return experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize(
    ("counts", "hidden", "inner"),
    [pytest.param(COUNTS, 384, 128, marks=pytest.mark.all), ((1, 65, 129), 256, 256)],
)
def test_a_short_last_block_gives_the_bits_of_a_whole_one(
    counts, hidden, inner, interpreter, monkeypatch
):
    """777 pairs of 9 experts are cut into blocks of 128, and 195 of 3.

    Sums of 128 codes times -1, 0 or 1 are exact, whatever the order that numpy takes.
    """
    experts = chosen(counts, 3)
    x, weights = normal(len(experts), hidden), normal(*experts.shape, seed=1).softmax(-1)
    gate_up = signs(len(counts), 2 * inner, hidden)
    down = signs(len(counts), hidden, inner, seed=2)
    args = x, gate_up, down, weights, experts
    got = moe_experts(*args)
    monkeypatch.setattr(w8a8, "_TAIL", 128)
    assert torch.equal(got, moe_experts(*args))
    # as near as the interpreter's cast to FP8 comes, which cuts off
    expected = moe_experts_reference(*args)
    assert ((got - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.25
    exact = [dataclasses.replace(w, dynamic=False) for w in (gate_up, down)]
    assert not torch.equal(moe_experts(x, *exact, weights, experts), got)


def test_neither_the_order_of_an_experts_pairs_nor_that_of_blocks_changes_a_bit(
    interpreter, monkeypatch
):
    def reordered(experts, num_experts, size):
        order, blocks = expert_blocks(experts, num_experts, size)
        parts = order.split(torch.bincount(experts.flatten(), minlength=num_experts).tolist())
        return torch.cat([part.flip(0) for part in parts]), blocks.flip(0).contiguous()

    experts = chosen(COUNTS[:5], 1)
    x, weights = normal(len(experts), 384), normal(*experts.shape, seed=1).sigmoid()
    args = x, signs(5, 256, 384), signs(5, 384, 128, seed=2), weights, experts
    expected = moe_experts(*args)
    monkeypatch.setattr(w8a8, "expert_blocks", reordered)
    assert torch.equal(moe_experts(*args), expected)


def test_codes_of_x_may_come_with_it_in_more_rows(interpreter):
    """As a norm leaves them: 133 tokens in room for 144."""
    experts = chosen((100, 33), 1)
    x, weights = normal(len(experts), 384), normal(*experts.shape, seed=1).sigmoid()
    args = x, signs(2, 256, 384), signs(2, 384, 128, seed=2), weights, experts
    codes = quantize_rows(x, 128, 16)
    assert len(codes.codes) == 144
    got = expert_terms(torch.full_like(x, torch.nan), *args[1:], codes)
    assert torch.equal(got.rows, expert_terms(*args).rows)
