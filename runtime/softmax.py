"""The softmaxes of two models over one vocabulary, carried along strip by strip of it.

    KL(source || artifact) = sum_v p_v (log p_v - log q_v)
                           = E_p[l - m] - log sum e^l + log sum e^m       l, m the logits of the two

All sums are float64: KL is a small difference of large numbers, of which float32 would leave 1e-6.

Shape letters: R rows (tokens), V vocabulary, n tokens of a strip of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Softmax:
    """What is kept of one side's logits.

    top, total  the largest logit and the sum of e^(logit - top), [R] each
    best        the token of the largest logit
    target      the logit of the token that comes next
    """

    def __init__(self, targets_R: Tensor) -> None:
        self.targets = targets_R
        self.top = torch.full(
            targets_R.shape, -torch.inf, dtype=torch.float64, device=targets_R.device
        )
        self.total = torch.zeros_like(self.top)
        self.target = torch.zeros_like(self.top)
        self.best = torch.zeros_like(targets_R)

    def take(self, strip_Rn: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Take the logits of tokens from `first`; return (shrink [R], powers [R, n]).

        powers are e^(logit - top); sums of earlier powers are to be multiplied by shrink
        """
        highest, place = strip_Rn.max(-1)
        self.best = torch.where(highest > self.top, first + place, self.best)
        top = torch.maximum(self.top, highest)
        shrink, powers = (self.top - top).exp(), (strip_Rn - top[:, None]).exp()
        self.top, self.total = top, self.total * shrink + powers.sum(-1)
        column, last = self.targets - first, strip_Rn.shape[1] - 1
        picked = strip_Rn.gather(1, column.clamp(0, last)[:, None])[:, 0]
        self.target = torch.where((column >= 0) & (column <= last), picked, self.target)
        return shrink, powers

    @property
    def log_sum(self) -> Tensor:
        """Return the logarithm of the sum of e^logit [R]."""
        return self.top + self.total.log()

    @property
    def loss(self) -> Tensor:
        """Return -log p of the token that comes next [R]."""
        return self.log_sum - self.target


class Divergence:
    """The KL divergence [R] of two sides that are taken strip by strip.

    weighted  the sum of e^(l - top) (l - m), of which comes E_p[l - m]
    """

    def __init__(self, targets_R: Tensor) -> None:
        self.source, self.artifact = Softmax(targets_R), Softmax(targets_R)
        self.weighted = torch.zeros_like(self.source.total)
        self.first = 0

    def take(self, source_Rn: Tensor, artifact_Rn: Tensor) -> None:
        """Take the next strip of both sides' logits."""
        source, artifact = source_Rn.double(), artifact_Rn.double()
        shrink, powers = self.source.take(source, self.first)
        self.artifact.take(artifact, self.first)
        self.weighted = self.weighted * shrink + (powers * (source - artifact)).sum(-1)
        self.first += source.shape[1]

    @property
    def kl(self) -> Tensor:
        """Return the divergence [R] in nats, not below 0."""
        source, artifact = self.source, self.artifact
        kl = self.weighted / source.total - source.log_sum + artifact.log_sum
        return kl.clamp(min=0)

    @property
    def agrees(self) -> Tensor:
        """Return where [R] both sides have the same likeliest token; NaN agrees with nothing."""
        source, artifact = self.source, self.artifact
        known = ~(source.top.isnan() | artifact.top.isnan())
        return known & (source.best == artifact.best)
