from __future__ import annotations

import pytest
import torch

from runtime.kernels.cases import FLOAT
from runtime.kernels.delta_rule.mixed_step import mixed_step, mixed_step_reference
from runtime.kernels.delta_rule.rule import Rule
from runtime.kernels.delta_rule.several import several_unscaled
from runtime.kernels.linear.product import linear_update
from runtime.kernels.linear.row import added_linear
from runtime.kernels.norm.gated import scaled_reference

# A dozen roundings, in a norm of a small output.
FLOAT32 = 2**-16
# A few roundings to 8 bits, one after another.
BFLOAT16 = 2**-7
VALUES = (6, 24)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def channels(keys):
    return 2 * keys * 16 + 6 * 24


def rule(keys):
    return Rule(
        conv_C1K=normal(channels(keys), 1, 4, seed=1) / 2,
        A_log=torch.linspace(-3, 0.5, 6),
        dt_bias=normal(6, seed=2),
        norm_v=torch.linspace(0.5, 2, 24),
        keys=(keys, 16),
        values=VALUES,
        eps=1e-6,
    )


def inputs(batch, keys):
    """Rows of two products."""
    qkvz, ba = normal(batch, channels(keys) + 6 * 24, seed=3), normal(batch, 12, seed=4)
    b, a = ba.chunk(2, -1)
    return qkvz[:, : channels(keys)], qkvz[:, channels(keys) :].view(batch, 6, 24), a, b


def pools(keys, count=4):
    return normal(count, channels(keys), 3, seed=5), normal(count, 6, 16, 24, seed=6)


@pytest.mark.parametrize(("keys", "few"), [(2, 256), (2, 1), (6, 256)])
def test_all_ways_do_what_the_reference_does(keys, few, interpreter, thresholds):
    """Two kernels, or first the convolution, or one; padding gives zeros and moves nothing."""
    thresholds(FEW_STATES=few)
    slots, got, expected = torch.tensor([3, -1, 0]), pools(keys), pools(keys)
    y = mixed_step(*inputs(3, keys), rule(keys), *got, slots, slots)
    wanted = mixed_step_reference(*inputs(3, keys), rule(keys), *expected, slots, slots)
    assert ((y - wanted).norm() / wanted.norm()).item() < FLOAT32
    assert not y[1].any()
    for ours, theirs, before in zip(got, expected, pools(keys), strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < FLOAT32
        assert torch.equal(ours[1:3], before[1:3])
        assert not torch.equal(ours[::3], before[::3])


def one_by_one(rows, before, source, keys):
    """Return the outputs and what each row leaves, every token in a step of its own."""
    conv, state = (pool[source : source + 1].clone() for pool in before)
    outputs, left = [], []
    for row in range(len(rows[0])):
        one = (x[row : row + 1] for x in rows)
        slot = torch.tensor([0])
        outputs.append(mixed_step_reference(*one, rule(keys), conv, state, slot, slot))
        left.append((conv[0].clone(), state[0].clone()))
    return torch.cat(outputs), left


@pytest.mark.parametrize(("keys", "kernel"), [(2, False), (2, True)])
@pytest.mark.parametrize("each", [2, 5])
def test_each_token_of_a_sequence_leaves_its_state_in_a_slot_of_its_own(
    each, keys, kernel, request
):
    """Whichever slot a sequence continues; more tokens than the convolution has taps, too."""
    if kernel:
        request.getfixturevalue("interpreter")
    count = 2 * each + 1
    before = pools(keys, count)
    rows, got = inputs(3 * each, keys), [pool.clone() for pool in before]
    slots = torch.tensor([*range(each), *[-1] * each, *range(each, 2 * each)])
    sources = torch.tensor([each - 1, -1, each])
    y = mixed_step(*rows, rule(keys), *got, sources, slots)
    assert not y[each : 2 * each].any()
    for n in (0, 2):
        own = slice(n * each, (n + 1) * each)
        wanted, left = one_by_one([x[own] for x in rows], before, sources[n], keys)
        assert ((y[own] - wanted).norm() / wanted.norm()).item() < FLOAT32
        for slot, kept in zip(slots[own], left, strict=True):
            for pool, expected in zip(got, kept, strict=True):
                assert ((pool[slot] - expected).norm() / expected.norm()).item() < FLOAT32
    assert all(torch.equal(pool[-1], old[-1]) for pool, old in zip(got, before, strict=True))


@pytest.mark.parametrize(("keys", "each"), [(2, 2), (6, 5)])
def test_heads_are_left_to_be_scaled(keys, each, interpreter):
    """Their scales are the roots of the norm; a source is none of the slots, and stays."""
    before, rows = pools(keys, 3 * each + 2), inputs(3 * each, keys)
    got = [pool.clone() for pool in before]
    slots = torch.tensor([*range(each), *[-1] * each, *range(each, 2 * each)])
    sources = torch.tensor([2 * each, -1, 2 * each + 1])
    unscaled = several_unscaled(*rows, rule(keys), *got, sources, slots)
    y = scaled_reference(unscaled).view(3 * each, *VALUES)
    assert not y[each : 2 * each].any()
    for n in (0, 2):
        own = slice(n * each, (n + 1) * each)
        wanted, left = one_by_one([x[own] for x in rows], before, sources[n], keys)
        assert ((y[own] - wanted).norm() / wanted.norm()).item() < FLOAT32
        for slot, kept in zip(slots[own], left, strict=True):
            for pool, expected in zip(got, kept, strict=True):
                assert ((pool[slot] - expected).norm() / expected.norm()).item() < FLOAT32
    kept = slice(2 * each, None)
    assert all(torch.equal(pool[kept], old[kept]) for pool, old in zip(got, before, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("each", [2, 3, 4])
def test_compiled_heads_are_exact_to_bfloat16(each):
    """Of 0.8B, with the product after them; in float64 nothing is rounded."""
    generator = torch.Generator("cuda").manual_seed(each)

    def bf16(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    rows = bf16(each, 6144), bf16(each, 16, 128), bf16(each, 16), bf16(each, 16)
    gates = bf16(16) / 4, bf16(16)
    given = Rule(bf16(6144, 1, 4) / 2, *gates, 1 + bf16(128) / 8, (16, 128), (16, 128), 1e-6)
    histories, states = bf16(each + 1, 6144, 3), bf16(each + 1, 16, 128, 128).float()
    weight, residual = bf16(1024, 2048) / 45, bf16(each, 1024)
    at = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.arange(1, each + 1, device="cuda")
    wide = Rule(*(x.double() for x in given[:4]), *given[4:])
    exact = histories.double(), states.double()
    y = mixed_step_reference(*(x.double() for x in rows), wide, *exact, *at).flatten(1)
    x = mixed_step(*rows, given, histories, states, *at, FLOAT)
    if each == 2:
        got, expected = added_linear(x, weight, residual), residual.double()
    else:
        got, expected = linear_update(x, weight).sums.sum(0), 0
    expected = expected + y @ weight.double().T
    for ours, theirs in ((got, expected), (histories, exact[0]), (states, exact[1])):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < BFLOAT16
