"""What the predictions of two checkpoints on one text come to.

    KL(source || artifact)   in nats at each token (see softmax)
    perplexity               exp(-mean log p(next token))
    error of the mean KL     sqrt(B / (B - 1) * sum_b (n_b (mean_b - mean))^2) / R

The error of the mean is taken from means of blocks b of n_b tokens, B of them, none of which spans
two sequences: the tokens of a text are no independent draws.

Shape letters: N sequences, T tokens of each, R = N*T rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.softmax import Divergence, Softmax

MEAN_TOKENS = 128


@dataclass(frozen=True)
class LayerError:
    """How far the residual stream of the artifact is from its source's after a layer.

    shared  it holds the source's numbers and got its stream, so it was not run again
    """

    layer: int
    kind: str
    relative_error: float
    shared: bool = False


@dataclass(frozen=True)
class LogitsReport:
    """How the artifact's predictions compare with its source's. KL is in nats per token.

    kl_stderr  the standard error of the mean, None with fewer than two blocks of tokens
    """

    kl_mean: float
    kl_stderr: float | None
    kl_median: float
    kl_p999: float
    top1: float
    ppl_source: float
    ppl_artifact: float
    tokens: int
    layers: tuple[LayerError, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers]}


def logits_report(
    ids_NT: Tensor, blocks: Sequence[Divergence], layers: tuple[LayerError, ...]
) -> LogitsReport:
    """Return what blocks of rows came to, after the whole vocabulary."""
    kl = torch.cat([block.kl for block in blocks])
    return LogitsReport(
        kl_mean=float(kl.mean()),
        kl_stderr=_mean_error(kl.view(ids_NT.shape)),
        kl_median=float(kl.quantile(0.5)),
        kl_p999=float(kl.quantile(0.999)),
        top1=float(torch.cat([block.agrees for block in blocks]).double().mean()),
        ppl_source=_perplexity([block.source for block in blocks], ids_NT),
        ppl_artifact=_perplexity([block.artifact for block in blocks], ids_NT),
        tokens=ids_NT.numel(),
        layers=layers,
    )


def _mean_error(kl_NT: Tensor) -> float | None:
    """Return the standard error of the mean (see the module's head)."""
    blocks = torch.split(kl_NT, MEAN_TOKENS, dim=1)
    count = sum(len(block) for block in blocks)
    if count < 2:
        return None
    sums = [((block - kl_NT.mean()).sum(1)).square().sum() for block in blocks]
    return math.sqrt(count / (count - 1) * float(sum(sums))) / kl_NT.numel()


def _perplexity(blocks: Sequence[Softmax], ids_NT: Tensor) -> float:
    loss = torch.cat([block.loss for block in blocks])
    return float(loss.view(ids_NT.shape)[:, :-1].mean().exp())
