"""Steps that are recorded once as CUDA graphs and then replayed, and what they leave on the host.

A recorded step reads and writes tensors that stay in place. Decoding leaves nothing to the host:
a step takes each row's token from the sampler, leaves the next one there, and moves its rows on by
one place, so that as long as the rows stay the same each step is one launch. The table of slots
and places is sent anew when they do not. Tokens are copied to the host while the next step runs.

On a CPU the same functions are called instead of replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.capture import captured
from runtime.model import hidden_states, logits
from runtime.serve.sample import Sampler
from runtime.state import PADDING, Batch, Pools, Span
from runtime.weights import Model


class Recorded:
    """A function of tensors that stay in place, recorded if it is to be.

    It is called once before, so that kernels are compiled and tuned: on what it must not harm.

    turns  how many recordings take turns: a result lasts as many calls
    """

    def __init__(self, function: Callable[[], Tensor], *, record: bool, turns: int = 1) -> None:
        self.function = function
        self.graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
        self.calls = 0
        if record:
            function()
            torch.cuda.synchronize()
            self.graphs = [captured(function) for _ in range(turns)]

    def __call__(self) -> Tensor:
        """Return the result; a call to come may overwrite it."""
        if not self.graphs:
            return self.function()
        graph, result = self.graphs[self.calls % len(self.graphs)]
        self.calls += 1
        graph.replay()
        return result


class Arriving:
    """Whole numbers on their way from the device; the host goes on meanwhile.

    stream  another one that copies them, while the device goes on too: they have to stay as they
            are until they have arrived
    """

    def __init__(self, numbers: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self.numbers = numbers
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # None: the current one
            self.copy = numbers.to("cpu", non_blocking=True, copy=True)
            self.event: torch.cuda.Event | None = None
            if numbers.is_cuda:
                event: Any = torch.cuda.Event  # its constructor is not typed
                self.event = event()
                self.event.record()

    def values(self) -> list[int]:
        """Wait for them, and for nothing launched since; return them."""
        if self.event is not None:
            self.event.synchronize()
        values: list[int] = self.copy.tolist()
        return values


def another_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream of its own on a GPU."""
    stream: Any = torch.cuda.Stream  # its constructor is not typed
    return stream(device) if device.type == "cuda" else None


class DecodeRows:
    """One token for each of up to `size` sequences in one launch, as often as they stay the same.

    Rows that are not needed are padding. It is recorded on padding alone: no state is touched.

    sampled  whether rows may be other than greedy
    """

    def __init__(
        self,
        model: Model,
        pools: Sequence[Pools],
        sampler: Sampler,
        size: int,
        *,
        sampled: bool,
        record: bool,
    ) -> None:
        self.model, self.pools, self.sampler, self.sampled = model, pools, sampler, sampled
        self.batch = Batch.pack([PADDING] * size, [], model.device)
        self.one = torch.zeros_like(self.batch.slots)
        self.following = [(-1, 0)] * size
        self.step = Recorded(self._step, record=record)

    def run(self, rows: Sequence[Span]) -> None:
        """Compute the tokens of these rows; the sampler has those that come next."""
        padding = [PADDING] * (len(self.following) - len(rows))
        filled = [*rows, *padding]
        if [(row.slot, row.start) for row in filled] != self.following:
            self.batch.fill(filled)
            self.one.copy_(self.batch.slots >= 0)
        self.step()
        self.following = [(row.slot, row.start + (row.slot >= 0)) for row in filled]

    def _step(self) -> Tensor:
        batch = self.batch
        self.sampler.take(batch.slots, out=batch.ids)
        tokens = next_tokens(self.model, self.pools, batch, self.sampler, sampled=self.sampled)
        batch.positions.add_(self.one)
        batch.lengths.add_(self.one)
        return tokens


def next_tokens(
    model: Model,
    pools: Sequence[Pools],
    batch: Batch,
    sampler: Sampler,
    *,
    rows: Tensor | None = None,
    sampled: bool,
) -> Tensor:
    """Run a batch; return the tokens [R] after some of its rows, left in the sampler as well.

    rows  [R] int64, which; None: all
    """
    hidden, slots, places = hidden_states(model, pools, batch), batch.token_slots, batch.positions
    if rows is not None:
        hidden, slots, places = (x.index_select(0, rows) for x in (hidden, slots, places))
    tokens = sampler.choose(logits(model, hidden), slots, places, sampled=sampled)
    sampler.last[slots] = tokens
    return tokens


def last_tokens(
    model: Model, hidden_RH: Tensor, batch: Batch, sampler: Sampler, *, sampled: bool
) -> Tensor:
    """Return the tokens [R] after the last rows of a batch; the sampler does not have them.

    hidden_RH  [R, H], those of these rows
    """
    slots, places = (x[-len(hidden_RH) :] for x in (batch.token_slots, batch.positions))
    return sampler.choose(logits(model, hidden_RH), slots, places, sampled=sampled)
