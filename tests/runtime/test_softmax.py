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


@pytest.fixture(params=["compiled", "defined"])
def way(request, monkeypatch):
    if request.param == "defined":
        monkeypatch.setattr(Divergence, "_take_compiled", lambda *_: False)


def diverged(source, artifact, targets, step=300):
    divergence = Divergence(targets)
    for start in range(0, source.shape[1], step):
        part = slice(start, start + step)
        divergence.take(source[:, part].clone(), artifact[:, part].clone())
    return divergence


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
def test_equal_logits_do_not_diverge_at_all():
    source, _ = some_logits(10, 1000, noise=0, peak=5)
    assert not diverged(source, source, torch.zeros(10, dtype=torch.int64)).kl.any()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 299, 300, 499])
def test_a_not_a_number_stays_one(value, column):
    source, artifact = some_logits(3, 500, noise=0.1, peak=0)
    artifact[1, column] = value
    kl = diverged(source, artifact, torch.zeros(3, dtype=torch.int64)).kl
    assert kl.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("step", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("scale", [1, 60])
def test_strips_of_any_width_are_taken_as_defined(monkeypatch, step, scale):
    source, artifact = (scale * x for x in some_logits(5, 1000, noise=0.1, peak=0))
    targets = torch.tensor([0, 63, 64, 500, 999])
    ours = diverged(source, artifact, targets, step)
    monkeypatch.setattr(Divergence, "_take_compiled", lambda *_: False)
    theirs = diverged(source, artifact, targets, step)
    torch.testing.assert_close(ours.kl, theirs.kl, rtol=1e-6, atol=1e-6)
    for mine, other in ((ours.source, theirs.source), (ours.artifact, theirs.artifact)):
        torch.testing.assert_close(mine.total, other.total, rtol=1e-6, atol=0)
        for what in ("top", "best", "target"):
            assert torch.equal(getattr(mine, what), getattr(other, what))


def test_equal_largest_logits_have_the_first_for_the_best():
    logits = torch.zeros(2, 300)
    logits[1, [70, 250]] = 3.0
    found = diverged(logits, logits, torch.zeros(2, dtype=torch.int64), step=100).source.best
    assert found.tolist() == [0, 70]
