"""KL carried along strips, against float64 throughout."""

from __future__ import annotations

import pytest
import torch

from runtime.softmax import Divergence

U = 2.0**-24


def some_logits(rows, width, *, noise, peak, seed=3):
    """Return flat logits of two sides, and with a `peak` one likely token in each row."""
    rng = torch.Generator().manual_seed(seed)
    source = 2.5 * torch.randn(rows, width, generator=rng)
    source[torch.arange(rows), torch.randint(width, (rows,), generator=rng)] += peak
    return source, source + noise * torch.randn(rows, width, generator=rng)


def diverged(source, artifact, targets, step=300):
    divergence = Divergence(targets)
    for start in range(0, source.shape[1], step):
        part = slice(start, start + step)
        divergence.take(source[:, part].clone(), artifact[:, part].clone())
    return divergence


@pytest.mark.parametrize("noise", [1.0, 0.1, 0.001])
@pytest.mark.parametrize("peak", [0, 12, 20])
def test_kl_is_within_its_bound_of_float64(noise, peak):
    source, artifact = some_logits(40, 5000, noise=noise, peak=peak)
    targets = torch.arange(40)
    divergence = diverged(source, artifact, targets)
    source, artifact = source.double(), artifact.double()
    log_p, log_q = source.log_softmax(-1), artifact.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    gap_p, gap_q = (x.amax(-1, keepdim=True) - x for x in (source, artifact))
    difference = (source - artifact).abs()
    bound = (log_p.exp() * (gap_p + (4 + gap_p) * difference)).sum(-1)
    bound += (log_q.exp() * gap_q).sum(-1) + 4
    assert ((divergence.kl - kl).abs() <= U * bound).all()
    assert (divergence.kl - kl).mean().abs() < 5e-9
    assert torch.equal(divergence.source.best, source.argmax(-1))
    assert torch.equal(divergence.agrees, source.argmax(-1) == artifact.argmax(-1))
    loss = -log_p.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(divergence.source.loss, loss, rtol=1e-7, atol=1e-6)


def test_equal_logits_do_not_diverge_at_all():
    source, _ = some_logits(10, 1000, noise=0, peak=5)
    assert not diverged(source, source, torch.zeros(10, dtype=torch.int64)).kl.any()


def test_a_not_a_number_stays_one():
    source, artifact = some_logits(3, 500, noise=0.1, peak=0)
    artifact[1, 400] = torch.nan
    kl = diverged(source, artifact, torch.zeros(3, dtype=torch.int64)).kl
    assert kl.isnan().tolist() == [False, True, False]
