"""The softmaxes of two models over one vocabulary, carried along strip by strip of it.

    KL(source || artifact) = sum_v p_v (log p_v - log q_v)
                           = E_p[l - m] - log sum e^l + log sum e^m       l, m the logits of the two

Powers e^(l - top) are float32, the sums of them and of their products with l - m float64.

Bound: with u = 2^-24, subtracting `top` and the power (right to 2 u) leave each power a relative
error of u (2 + top - l), and l - m and the product another 2 u |l - m|. The KL of a token is off by
at most u (4 + E_p[top - l] + E_q[top - m] + (4 + top - l) |l - m|), all expected values: about 1e-6
for a flat distribution over 248320 tokens. Measured there against float64 throughout: 2e-8 at most
and 6e-10 in the mean of tokens, because the errors have either sign. Equal logits give exactly 0.
float32 sums would leave 3e-7 and 1e-8.

On a CPU the loops of `softmax_loops` do it in one pass, where all logits are finite.

Shape letters: R rows (tokens), V vocabulary, n tokens of a strip of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Softmax:
    """What is kept of one side's logits.

    top, total  the largest logit, float32, and the sum of e^(logit - top), float64, [R] each
    best        the token of the largest logit
    target      the logit of the token that comes next
    """

    def __init__(self, targets_R: Tensor) -> None:
        self.targets = targets_R
        zeros = torch.zeros(targets_R.shape, dtype=torch.float32, device=targets_R.device)
        self.top, self.target = zeros - torch.inf, zeros
        self.total = zeros.double()
        self.best = torch.zeros_like(targets_R)

    def take(self, strip_Rn: Tensor, first: int) -> Tensor:
        """Take the logits of tokens from `first`, which become e^(logit - top); return shrink [R].

        Sums of earlier powers are to be multiplied by shrink.
        """
        highest, before = strip_Rn.amax(-1), self.top
        higher = (highest > before).nonzero()[:, 0]
        self.best[higher] = first + strip_Rn[higher].argmax(-1)
        column, last = self.targets - first, strip_Rn.shape[1] - 1
        picked = strip_Rn.gather(1, column.clamp(0, last)[:, None])[:, 0]
        self.target = torch.where((column >= 0) & (column <= last), picked, self.target)
        self.top = torch.maximum(before, highest)
        shrink = (before.double() - self.top).exp()
        strip_Rn.sub_(self.top[:, None]).exp_()
        self.total = self.total * shrink + strip_Rn.sum(-1, dtype=torch.float64)
        return shrink

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
        """Take the next strip of both sides' logits, float32, which may be overwritten."""
        if source_Rn.is_cuda or not self._take_compiled(source_Rn, artifact_Rn):
            self._take(source_Rn, artifact_Rn)
        self.first += source_Rn.shape[1]

    def _take_compiled(self, source_Rn: Tensor, artifact_Rn: Tensor) -> bool:
        """Take a strip in one pass; False if it must be taken otherwise."""
        from runtime.softmax_loops import take

        sides = [
            (side.top.numpy(), side.total.numpy(), side.best.numpy(), side.target.numpy())
            for side in (self.source, self.artifact)
        ]
        logits, targets = (source_Rn.numpy(), artifact_Rn.numpy()), self.source.targets.numpy()
        return bool(take(*logits, self.first, targets, *sides, self.weighted.numpy()))

    def _take(self, source_Rn: Tensor, artifact_Rn: Tensor) -> None:
        """Take a strip in plain torch, which overwrites it: the definition."""
        difference = source_Rn - artifact_Rn
        shrink = self.source.take(source_Rn, self.first)
        self.artifact.take(artifact_Rn, self.first)
        terms = difference.mul_(source_Rn).sum(-1, dtype=torch.float64)
        self.weighted = self.weighted * shrink + terms

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
