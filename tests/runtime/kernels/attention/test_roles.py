"""Attention by warps with roles: what is compiled is read, a GPU says what it computes."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.kernels.attention.reference import attention_prefill_reference
from runtime.kernels.attention.roles import roles_prefill
from tests.runtime.kernels.compiled import compiled_by
from tests.runtime.kernels.test_roles import CHIP, needs_gluon, needs_hopper


@pytest.fixture(scope="module")
def compiled():
    return compiled_by("attention.roles_compiled")


@pytest.mark.all  # seconds of compiling
@needs_gluon
def test_a_program_fits_a_multiprocessor_in_three_parts(compiled):
    assert compiled["shared"] <= CHIP
    assert compiled["warps"] == 12


@pytest.mark.all
@needs_gluon
def test_a_stage_expects_what_is_copied_to_it(compiled):
    """Else a group waits for ever, or reads what has not come: queries, or a tile of 64 rows."""
    tile = 64 * 256 * 2
    assert compiled["expected"] == compiled["copied"]
    assert set(compiled["expected"]) == {tile, 2 * tile}


@pytest.mark.all
@needs_gluon
def test_a_stage_is_full_with_one_copy_and_empty_when_both_groups_have_read_it(compiled):
    assert compiled["arrivals"] == [1, 2]
    assert compiled["unshared"] == []


@pytest.mark.all
@needs_gluon
def test_the_softmax_of_a_tile_runs_beside_the_sums_of_the_one_before(compiled):
    """First scores, then in the loop scores and sums, of which one is left, and the last sums."""
    both = 2  # groups of warps
    assert compiled["dots"] == compiled["started"] == 4 * both
    assert compiled["left"] == both * [0, 1, 0, 0]


CASES = [
    ((300, 129, 1000), (40, 65, 0)),
    ((0, 70, 256, 1), (0, 3, 700, 0)),  # fewer than half a block of queries
    ((128,), (4000,)),
    ((8192,), (0,)),  # several tasks for each program
    ((4100,), (4091,)),
]


def prompts(heads, kv_heads, lengths, starts):
    """Return the arguments for sequences in slots; what none has written is NaN."""
    generator = torch.Generator("cuda").manual_seed(sum(lengths))

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    pools = []
    for _ in range(2):
        pool = torch.full((len(lengths) + 1, 8300, kv_heads, 256), torch.nan, device="cuda")
        for i, (length, start) in enumerate(zip(lengths, starts, strict=True)):
            pool[len(lengths) - i, : length + start] = normal(length + start, kv_heads, 256)
        pools.append(pool.bfloat16())
    slots = torch.arange(len(lengths), 0, -1).cuda()
    ends = torch.tensor([0, *itertools.accumulate(lengths)]).cuda()
    q, gate = normal(sum(lengths), heads, 512).split(256, -1)
    return q, gate, *pools, slots, ends, torch.tensor(starts).cuda()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (8, 2), (24, 4), (4, 2)])
@pytest.mark.parametrize(("lengths", "starts"), CASES)
def test_attention_by_roles_is_exact_to_bfloat16(heads, kv_heads, lengths, starts):
    """Beside float64, and the same twenty times: warps must not race.

    The weights of values are rounded, the output, the sigmoid and their product: each loses 2^-8 of
    itself at most. Weights that are wrong by so much make their sum wrong by as much of the sum of
    sizes. A tenth more is for what float32 loses of scores and sums, and for second orders.
    """
    args = prompts(heads, kv_heads, lengths, starts)
    got = roles_prefill(*args)
    q, gate, pool_k, pool_v, *lists = (x.double() if x.is_floating_point() else x for x in args)
    expected = attention_prefill_reference(q, gate, pool_k, pool_v, *lists)
    sizes = attention_prefill_reference(q, gate, pool_k, pool_v.abs(), *lists)
    assert ((got - expected).abs() <= 1.1 * 2**-8 * (3 * expected.abs() + sizes)).all()
    for _ in range(20):
        assert torch.equal(roles_prefill(*args), got)


@pytest.mark.gpu
@needs_hopper
def test_rows_of_padding_are_zeros():
    q, gate, pool_k, pool_v, slots, ends, starts = prompts(4, 2, (70, 200, 130), (3, 100, 0))
    slots[1] = -1
    got = roles_prefill(q, gate, pool_k, pool_v, slots, ends, starts)
    assert not got[70:270].any()
    assert got[:70].flatten(1).any(1).all()
    assert got[270:].flatten(1).any(1).all()
