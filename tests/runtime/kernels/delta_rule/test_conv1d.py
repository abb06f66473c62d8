from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from runtime.kernels.delta_rule.conv1d import conv1d_prefill, conv1d_prefill_reference
from runtime.kernels.delta_rule.conv1d_step import conv1d_step, conv1d_step_reference

TAPS = 4
# Four products and their sum, and one silu: a few units of 2^-24 of the largest output.
FLOAT32 = 1e-6


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got, expected):
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def fresh(channels, slots=3):
    return torch.zeros(slots, channels, TAPS - 1)


def whole(x, weight, pool, slot=0):
    return conv1d_prefill(x, weight, pool, torch.tensor([slot]), torch.tensor([0, len(x)]))


def one_by_one(x, weight, pool, slot=0):
    return torch.cat([conv1d_step(row[None], weight, pool, torch.tensor([slot])) for row in x])


def steps_apart(got, expected):
    """How many bfloat16 values lie between: their bits count as integers within one sign."""
    assert (got.signbit() == expected.signbit()).all()
    bits = got.view(torch.int16).int() - expected.view(torch.int16).int()
    return bits.abs().max().item()


def test_prefill_is_the_convolution_of_transformers():
    x, weight = normal(50, 37), normal(37, 1, TAPS, seed=1)
    expected = qwen.causal_conv1d_fn(x.T[None], weight[:, 0], activation="silu")[0].T
    assert distance(whole(x, weight, fresh(37)), expected) < FLOAT32


def test_prefill_in_bfloat16_is_within_one_step_of_transformers():
    x, weight = normal(50, 37, dtype=torch.bfloat16), normal(37, 1, TAPS, seed=1).bfloat16()
    expected = qwen.causal_conv1d_fn(x.T[None], weight[:, 0], activation="silu")[0].T
    assert steps_apart(whole(x, weight, fresh(37).bfloat16()), expected.contiguous()) <= 1


def test_a_step_is_the_update_of_transformers():
    x, weight, history = normal(1, 37), normal(37, 1, TAPS, seed=1), normal(1, 37, TAPS - 1, seed=2)
    pool, theirs = history.clone(), history.clone()
    got = conv1d_step(x, weight, pool, torch.tensor([0]))
    expected = qwen.causal_conv1d_update(x[..., None], theirs, weight[:, 0], activation="silu")
    assert distance(got, expected[..., 0]) < FLOAT32
    assert torch.equal(pool, theirs)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_every_way_to_cut_a_prompt_gives_the_same_bits(lengths, seed):
    x, weight = normal(sum(lengths), 5, seed=seed), normal(5, 1, TAPS, seed=seed + 1)
    pool, parts_pool, steps_pool = fresh(5), fresh(5), fresh(5)
    expected = whole(x, weight, pool, 1)
    parts = [whole(part, weight, parts_pool, 1) for part in x.split(lengths)]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(parts_pool, pool)
    if len(x):
        assert torch.equal(one_by_one(x, weight, steps_pool, 1), expected)
        assert torch.equal(steps_pool, pool)


def test_packed_sequences_do_not_see_one_another():
    bounds, slots = torch.tensor([0, 1, 1, 20, 33]), torch.tensor([4, 2, -1, 0])
    x, weight = normal(33, 7), normal(7, 1, TAPS, seed=1)
    pool = normal(6, 7, TAPS - 1, seed=2)
    alone_pool, before = pool.clone(), pool.clone()
    got = conv1d_prefill(x, weight, pool, slots, bounds)
    for n, slot in enumerate(slots.tolist()):
        part = x[bounds[n] : bounds[n + 1]]
        expected = whole(part, weight, alone_pool if slot >= 0 else fresh(7), max(slot, 0))
        assert torch.equal(got[bounds[n] : bounds[n + 1]], expected)
    assert torch.equal(pool, alone_pool)
    untouched = [1, 2, 3, 5]  # slot 2 belongs to an empty sequence
    assert torch.equal(pool[untouched], before[untouched])


def test_the_pool_keeps_the_last_inputs_oldest_first():
    x, pool = normal(9, 5), fresh(5)
    whole(x, normal(5, 1, TAPS, seed=1), pool, 2)
    assert torch.equal(pool[2], x[-3:].T)
    assert not pool[:2].any()


def test_padding_rows_write_nothing_and_give_zeros():
    x, weight, pool = normal(3, 7), normal(7, 1, TAPS, seed=1), normal(4, 7, TAPS - 1, seed=2)
    before = pool.clone()
    y = conv1d_step(x, weight, pool, torch.tensor([-1, 2, -1]))
    assert not y[[0, 2]].any()
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])
    assert torch.equal(pool[2], torch.cat([before[2, :, 1:], x[1, :, None]], 1))


def test_a_history_off_by_one_token_and_reversed_taps_are_seen():
    x, weight, pool = normal(20, 5), normal(5, 1, TAPS, seed=1), fresh(5)
    expected = whole(x, weight, pool.clone())
    whole(x[:10], weight, pool)
    late = pool.clone()
    late[0] = x[6:9].T
    assert distance(whole(x[10:], weight, late), expected[10:]) > 0.1
    assert distance(whole(x, weight.flip(2), fresh(5)), expected) > 0.1


def test_float32_is_close_to_float64():
    x, weight, pool = normal(30, 11), normal(11, 1, TAPS, seed=1), normal(2, 11, TAPS - 1, seed=2)
    exact = whole(x.double(), weight.double(), pool.double())
    assert exact.dtype == torch.float64
    assert distance(whole(x, weight, pool), exact) < FLOAT32


@pytest.mark.parametrize(
    ("lengths", "slots", "channels"),
    [([1], [0], 5), ([40], [1], 133), ([2, 0, 17, 3], [3, 0, -1, 1], 37)],
)
@pytest.mark.usefixtures("interpreter")
def test_the_prefill_kernel_agrees_with_its_reference(lengths, slots, channels):
    x = normal(sum(lengths), channels + 3)[:, 1 : 1 + channels]
    weight, pool = normal(channels, 1, TAPS, seed=1), normal(4, channels, TAPS - 1, seed=2)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    expected_pool = pool.clone()
    got = conv1d_prefill(x, weight, pool, torch.tensor(slots), bounds)
    expected = conv1d_prefill_reference(x, weight, expected_pool, torch.tensor(slots), bounds)
    assert distance(got, expected) < FLOAT32
    assert torch.equal(pool, expected_pool)


@pytest.mark.usefixtures("interpreter")
def test_the_step_kernel_agrees_with_its_reference():
    x, weight, pool = normal(4, 133), normal(133, 1, TAPS, seed=1), normal(6, 133, 3, seed=2)
    expected_pool, slots = pool.clone(), torch.tensor([5, -1, 0, 3], dtype=torch.int32)
    got = conv1d_step(x, weight, pool, slots)
    assert distance(got, conv1d_step_reference(x, weight, expected_pool, slots)) < FLOAT32
    assert not got[1].any()
    assert torch.equal(pool, expected_pool)


@pytest.mark.usefixtures("interpreter")
def test_the_kernels_decode_what_they_prefill_to_the_bit():
    x, weight, pool, steps_pool = normal(21, 19), normal(19, 1, TAPS, seed=1), fresh(19), fresh(19)
    expected = whole(x, weight, pool)
    assert torch.equal(one_by_one(x, weight, steps_pool), expected)
    assert torch.equal(steps_pool, pool)
