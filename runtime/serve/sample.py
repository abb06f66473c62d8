"""The next token: the likeliest, or one drawn from the likeliest few.

The drawing: see kernels.sample.draw, with a number from the request's own generator. Each row is
treated by itself and each token takes one draw, so that what a request gets does not depend on its
neighbours.
The numbers are drawn when a request starts: from then on the device chooses by itself.

A row whose largest logit is NaN or infinite has no next token: NO_TOKEN stands for it until the
host, which reads the tokens anyway, refuses it.

Shape letters: R rows, V vocabulary, S slots, L tokens a slot holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from runtime.errors import LogitsError, RequestError
from runtime.kernels.sample.draw import NO_TOKEN, draw
from runtime.kernels.sample.likeliest import likeliest
from runtime.state import send


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

    @property
    def greedy(self) -> bool:
        """Return whether always the likeliest token is taken."""
        return self.temperature == 0

    def generator(self) -> Random:
        """Return the request's generator."""
        return Random(self.seed)


GREEDY = Sampling()


@dataclass(frozen=True)
class Sampler:
    """What the next token of each slot is drawn with, and its last token, all on the device.

    Whose slot is -1 is padding: it has the last place of each, which no slot has. A greedy row is
    one that draws from its likeliest token alone, so that rows of both kinds go together.

    last      [S+1] int64, the token that comes next in each slot's sequence, to be computed, or
              NO_TOKEN
    settings  [S+1, 3] float64: temperature, top_k, top_p
    numbers   [S+1, L] float64: the number that draws the token after each place
    """

    last: Tensor
    settings: Tensor
    numbers: Tensor

    @staticmethod
    def allocate(slots: int, max_len: int, device: torch.device) -> Sampler:
        """Return a sampler of greedy slots."""
        return Sampler(
            last=torch.zeros(slots + 1, dtype=torch.int64, device=device),
            settings=torch.ones(slots + 1, 3, dtype=torch.float64, device=device),
            numbers=torch.zeros(slots + 1, max_len, dtype=torch.float64, device=device),
        )

    def start(self, slot: int, sampling: Sampling, first: int, count: int) -> None:
        """Let the `count` tokens of a slot after place `first` and its followers be drawn so."""
        generator, (settings, numbers) = sampling.generator(), (self.settings, self.numbers)
        if sampling.greedy:
            send([1.0, 1.0, 1.0], settings[slot])
            return
        send([sampling.temperature, sampling.top_k or torch.inf, sampling.top_p], settings[slot])
        send([generator.random() for _ in range(count)], numbers[slot, first : first + count])

    def choose(
        self, logits_RV: Tensor, slots_R: Tensor, places_R: Tensor, *, sampled: bool
    ) -> Tensor:
        """Return the tokens [R] that come after the places whose logits these are, or NO_TOKEN.

        sampled  whether there are rows that are not greedy: to draw takes a sort
        """
        if not sampled:
            return likeliest(logits_RV, NO_TOKEN)
        return draw(logits_RV, self.settings[slots_R], self.numbers[slots_R, places_R])

    def take(self, slots_R: Tensor, out: Tensor) -> None:
        """Put the last tokens [R] of slots into `out`, as ids that can be embedded."""
        torch.take(self.last, slots_R, out=out)
        out.clamp_(min=0)


def check_token(token: int, number: int) -> None:
    """Raise LogitsError if the generated token of this number, from 1, is NO_TOKEN."""
    if token == NO_TOKEN:
        raise LogitsError(
            f"the logits of generated token {number} are NaN or infinite",
            fix="`qwen35 verify` names the tensors that hold such values, if any do",
        )
