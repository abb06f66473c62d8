"""A request: a prompt, how many tokens shall follow it, and the tokens generated so far.

The host knows a request's tokens one step late: while the last ones are on their way, `computed`
is ahead of `ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.errors import RequestError
from runtime.serve.sample import GREEDY, Sampling
from runtime.state import Span
from runtime.weights import Model


@dataclass(eq=False)
class Request:
    """A prompt, what is wanted, and what has been generated so far.

    ids       the prompt, then the generated tokens
    computed  how many tokens have passed through the model, or will have when the steps end that
              run now; after a stop token that may be one too many
    stop      tokens that end the answer; the one that does is kept
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()
    slot: int = -1
    computed: int = 0
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt has no tokens")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}, expected at least 1")
        self.ids = list(self.prompt)

    @property
    def tokens(self) -> list[int]:
        """Return what has been generated."""
        return self.ids[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        """Return whether no more tokens are wanted."""
        generated = len(self.ids) - len(self.prompt)
        return generated > 0 and (generated >= self.max_tokens or self.ids[-1] in self.stop)

    @property
    def longest(self) -> int:
        """Return how many tokens may pass through the model; the last one is not needed."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def decodes(self) -> bool:
        """Return whether the prompt is computed and tokens after it are left to compute."""
        return len(self.prompt) <= self.computed < self.longest

    def prefill(self, count: int) -> Span:
        """Return the next `count` tokens of the prompt."""
        ids = self.ids[self.computed : self.computed + count]
        return Span(ids, self.computed, self.slot, self.slot)

    def row(self) -> Span:
        """Return the place of the next token to compute; which one it is the device knows."""
        return Span([0], self.computed, self.slot, self.slot)


def check_ids(ids: Sequence[int], model: Model) -> None:
    """Raise RequestError for a token that the vocabulary does not have."""
    for token in ids:
        if not 0 <= token < model.config.sizes["V"]:
            raise RequestError(f"token {token} is not in a vocabulary of {model.config.sizes['V']}")
