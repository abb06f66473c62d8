from __future__ import annotations

from functools import partial

import pytest
import torch

from runtime.kernels.attention import parts as parts_module
from runtime.kernels.attention import step as step_module
from runtime.kernels.attention.decode import attention_decode
from runtime.kernels.attention.reference import split_query_gate
from runtime.kernels.attention.rope import rope_cos_sin
from runtime.kernels.attention.step import attention_step, attention_step_reference
from runtime.kernels.attention.write import norm_rope_write

EPS = 1e-6
# Scores, softmax and values in float32: sums of a few hundred terms in another order.
FLOAT32 = 1e-6
LENGTHS = [1, 63, 64, 65, 130, 5, 2]
SLOTS = [3, 0, 5, 1, 6, -1, 2]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def arguments(lengths, kv_heads=2, group=3, d=20, rotated=8):
    """All projections are views on one product, as in the model."""
    batch, heads = len(lengths), kv_heads * group
    widths = [2 * heads * d, kv_heads * d, kv_heads * d]
    query_gate, k, v = torch.split(normal(batch, sum(widths)), widths, -1)
    k, v = k.view(batch, kv_heads, d), v.view(batch, kv_heads, d)
    angles = rope_cos_sin(torch.tensor(lengths) - 1, rotated, 1e4)
    weights = normal(d, seed=2) * 0.1, normal(d, seed=3) * 0.1
    return *split_query_gate(query_gate, heads, d), k, v, *weights, *angles, EPS


def whole_pools(lengths, slots, kv_heads=2, d=20):
    """NaN but for what earlier steps wrote; the slot before the first is where -1 would be."""
    wholes = [torch.full((9, 140, kv_heads, d), torch.nan) for _ in range(2)]
    for seed, whole in enumerate(wholes):
        for slot, length in zip(slots, lengths, strict=True):
            if slot >= 0:
                whole[1 + slot, : length - 1] = normal(
                    length - 1, kv_heads, d, seed=9 * slot + seed
                )
    return wholes


def step(function, lengths, slots, each=1, **sizes):
    """Return the output, and both pools whole."""
    inputs = arguments(lengths, **sizes)
    kv_heads, d = inputs[2].shape[1:]
    wholes = whole_pools(lengths[::each], slots[::each], kv_heads, d)
    at = torch.tensor(slots), torch.tensor(lengths), each
    return function(*inputs, *(whole[1:] for whole in wholes), *at), wholes


def apart(q, gate, k, v, wq, wk, cos, sin, eps, pool_k, pool_v, slots, lengths, each):
    """Return the same from the kernels for larger batches."""
    q = norm_rope_write(q, k, v, wq, wk, cos, sin, eps, pool_k, pool_v, slots, lengths - 1)
    return attention_decode(q, gate, pool_k, pool_v, slots, lengths, each)


@pytest.fixture(params=[1, 40], ids=["whole contexts", "parts"])
def programs(request, monkeypatch):
    """How many programs there may be: fewer are sooner interpreted."""
    monkeypatch.setattr(parts_module, "_PROGRAMS", request.param)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"d": 24, "rotated": 24, "kv_heads": 1}, {"group": 8, "d": 16, "rotated": 4}],
    ids=str,
)
@pytest.mark.usefixtures("interpreter", "programs")
def test_outputs_and_pools_are_those_of_the_reference(sizes):
    """One sequence is padding; nothing but the newest places is written, and NaNs are not read."""
    lengths, slots = LENGTHS, SLOTS
    got, pools = step(attention_step, lengths, slots, **sizes)
    expected, others = step(attention_step_reference, lengths, slots, **sizes)
    before = whole_pools(lengths, slots, *pools[0].shape[2:])
    used = torch.tensor(slots) >= 0
    assert not got[~used].any()
    assert distance(got[used], expected[used]) < FLOAT32
    for ours, theirs, old in zip(pools, others, before, strict=True):
        assert torch.allclose(ours, theirs, atol=FLOAT32, rtol=FLOAT32, equal_nan=True)
        for slot, length in zip(slots, lengths, strict=True):
            if slot >= 0:
                assert not ours[1 + slot, length - 1].isnan().any()
                old[1 + slot, length - 1] = ours[1 + slot, length - 1]
        assert torch.equal(ours.nan_to_num(99), old.nan_to_num(99))


@pytest.mark.usefixtures("interpreter", "programs")
def test_the_pools_are_to_the_bit_those_of_the_kernels_apart():
    _, ours = step(attention_step, LENGTHS, SLOTS)
    _, theirs = step(apart, LENGTHS, SLOTS)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.nan_to_num(99), other.nan_to_num(99))


def test_a_long_context_of_few_programs_has_more_stages():
    def stages(batch, room):
        q, pool = (torch.empty(n, 8, 16, device="meta") for n in (batch, 1))
        pool_k = pool[:, :2].expand(room, 2, 16)[None]
        return parts_module.Parts.empty(q, pool_k).options(pool_k)["STAGES"]

    assert [stages(1, room) for room in (4096, 4097, 1 << 16, 1 << 17)] == [0, 2, 2, 3]
    assert [stages(batch, 1 << 17) for batch in (2, 8, 64)] == [2, 2, 2]


@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.usefixtures("interpreter", "programs")
def test_each_token_of_a_sequence_sees_those_before_it(each):
    """They are in no pool yet; one sequence has nothing else, one is padding."""
    firsts, owners = [64, 1, 9], [3, 0, -1]
    lengths = [first + token for first in firsts for token in range(each)]
    slots = [slot for slot in owners for _ in range(each)]
    got, ours = step(attention_step, lengths, slots, each)
    for other in (attention_step_reference, apart):
        expected, theirs = step(other, lengths, slots, each)
        assert distance(got, expected) < FLOAT32
        for one, two in zip(ours, theirs, strict=True):
            assert torch.allclose(one, two, atol=FLOAT32, rtol=FLOAT32, equal_nan=True)


@pytest.mark.parametrize("rows", [[1], [2, 0]])
def test_some_rows_are_what_they_are_among_all(rows, interpreter):
    whole, pools = step(attention_step, [9, 10, 11], [3, 3, 3], 3)
    some, others = step(partial(attention_step, rows_R=torch.tensor(rows)), [9, 10, 11], [3] * 3, 3)
    assert torch.equal(some, whole[rows])
    for one, other in zip(pools, others, strict=True):
        assert torch.equal(one.nan_to_num(99), other.nan_to_num(99))


@pytest.mark.parametrize("length", [1, 64, 65, 130])
def test_one_sequence_in_many_parts(length, interpreter):
    got, _ = step(attention_step, [length], [3], kv_heads=1)
    expected, _ = step(attention_step_reference, [length], [3], kv_heads=1)
    assert distance(got, expected) < FLOAT32


def test_projections_and_angles_are_read_only_after_the_wait(interpreter, monkeypatch):
    """q, k, v, cos and sin; nor does the first program write anything before it."""
    expected, _ = step(attention_step_reference, LENGTHS[:3], SLOTS[:3])
    known, early = arguments(LENGTHS[:3]), arguments(LENGTHS[:3])
    wholes = whole_pools(LENGTHS[:3], SLOTS[:3])
    before = [whole.clone() for whole in wholes]
    computed, unseen = (0, 2, 3, 6, 7), [True]

    def erase():
        for n in computed:
            early[n].fill_(torch.nan)

    def write():
        if unseen.pop():
            for whole, old in zip(wholes, before, strict=True):
                assert torch.equal(whole.nan_to_num(99), old.nan_to_num(99))
        unseen.append(False)
        for n in computed:
            early[n].copy_(known[n])

    monkeypatch.setattr(parts_module, "_PROGRAMS", 6)
    monkeypatch.setattr(step_module, "start_next", erase)
    monkeypatch.setattr(step_module, "wait_for_inputs", write)
    at = torch.tensor(SLOTS[:3]), torch.tensor(LENGTHS[:3])
    got = attention_step(*early, *(whole[1:] for whole in wholes), *at)
    assert distance(got, expected) < FLOAT32


def test_heads_that_are_not_those_of_the_pools_are_refused():
    inputs = arguments([3])
    pools = torch.zeros(2, 3, 5, 3, 20)
    with pytest.raises(AssertionError, match=r"k and v are \[B, m, d\]"):
        attention_step(*inputs, *pools, torch.tensor([0]), torch.tensor([3]))
