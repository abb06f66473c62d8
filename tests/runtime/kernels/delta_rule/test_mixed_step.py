from __future__ import annotations

import pytest
import torch

from runtime.kernels.delta_rule.mixed_step import Rule, mixed_step, mixed_step_reference

# A dozen roundings, in a norm of a small output.
FLOAT32 = 2**-16
KEYS, VALUES = (2, 16), (6, 24)
CHANNELS = 2 * 2 * 16 + 6 * 24


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rule():
    return Rule(
        conv_C1K=normal(CHANNELS, 1, 4, seed=1) / 2,
        A_log=torch.linspace(-3, 0.5, 6),
        dt_bias=normal(6, seed=2),
        norm_v=torch.linspace(0.5, 2, 24),
        keys=KEYS,
        values=VALUES,
        eps=1e-6,
    )


def inputs(batch):
    """Rows of two products."""
    qkvz, ba = normal(batch, CHANNELS + 6 * 24, seed=3), normal(batch, 12, seed=4)
    b, a = ba.chunk(2, -1)
    return qkvz[:, :CHANNELS], qkvz[:, CHANNELS:].view(batch, 6, 24), a, b


def pools():
    return normal(4, CHANNELS, 3, seed=5), normal(4, 6, 16, 24, seed=6)


@pytest.mark.parametrize("few", [256, 1])
def test_both_ways_do_what_the_reference_does(few, interpreter, thresholds):
    """Two kernels for all, or first the convolution; padding gives zeros and moves nothing."""
    thresholds(FEW_STATES=few)
    slots, got, expected = torch.tensor([3, -1, 0]), pools(), pools()
    y = mixed_step(*inputs(3), rule(), *got, slots)
    wanted = mixed_step_reference(*inputs(3), rule(), *expected, slots)
    assert ((y - wanted).norm() / wanted.norm()).item() < FLOAT32
    assert not y[1].any()
    for ours, theirs, before in zip(got, expected, pools(), strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < FLOAT32
        assert torch.equal(ours[1:3], before[1:3])
        assert not torch.equal(ours[::3], before[::3])
