"""The next token: the likeliest, or one drawn from the likeliest few.

    p = softmax(logits / temperature)     over the top_k likeliest tokens
    of these the fewest whose probabilities reach top_p, renormalised; the token where the
    cumulated probability passes a number drawn from the request's own generator

Source: Holtzman et al. 2020 for top-p, after top-k as in transformers. Each row is treated by
itself and each token takes one draw, so that what a request gets does not depend on its neighbours.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor


class RequestError(ValueError):
    """What is asked of a model cannot be done."""


@dataclass(frozen=True)
class Sampling:
    """How one request draws its tokens; temperature 0 is greedy.

    Raises RequestError for a temperature below 0, a top_k below 0 or a top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature}, expected 0 (greedy) or more")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}, expected 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}, expected more than 0 and at most 1")

    def generator(self) -> Random:
        """Return the request's generator."""
        return Random(self.seed)


GREEDY = Sampling()


def sample(
    logits_RV: Tensor, samplings: Sequence[Sampling], generators: Sequence[Random]
) -> list[int]:
    """Return a token for each row; a generator moves on by one draw where its row is sampled.

    logits_RV  [R, V] any float
    """
    tokens: list[int] = logits_RV.argmax(-1).tolist()
    drawn = [row for row, one in enumerate(samplings) if one.temperature > 0]
    if not drawn:
        return tokens
    uniform = [generators[row].random() for row in drawn]
    chosen = draw(logits_RV[drawn], [samplings[row] for row in drawn], uniform)
    for row, token in zip(drawn, chosen.tolist(), strict=True):
        tokens[row] = token
    return tokens


def draw(logits_RV: Tensor, samplings: Sequence[Sampling], uniform: Sequence[float]) -> Tensor:
    """Return the token [R] at each row's number in [0, 1) along its cumulated probabilities."""
    temperature, top_k, top_p, at = torch.tensor(
        [
            (one.temperature, one.top_k or logits_RV.shape[1], one.top_p, number)
            for one, number in zip(samplings, uniform, strict=True)
        ],
        dtype=torch.float64,
        device=logits_RV.device,
    ).T[..., None]
    ordered, order = logits_RV.double().sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    p = (
        ((ordered - ordered[:, :1]) / temperature)
        .masked_fill(rank >= top_k, -torch.inf)
        .softmax(-1)
    )
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    cumulated = p.cumsum(-1)
    place = torch.searchsorted(cumulated, at * cumulated[:, -1:], right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(place, last))[:, 0]
