"""One sequence with a drafted token in every step (speculative decoding).

    tokens    = choose(model(last, draft))             two rows, the second from a copy of the state
    accepted  = tokens[0] == draft
    draft'    = MTP(hidden states, tokens)[accepted]
    last'     = tokens[accepted]                       1 + accepted tokens are new

The two rows are two waves of one step: whichever state turns out to be that of the accepted prefix
is kept, and nothing is recomputed. A draft is accepted if it is the very token that would have
been chosen, so the tokens are the same, sampled ones too.

Source: Leviathan et al. 2023, with a draft of one token by the model's own head.
Trap: after a rejected draft the second row's keys and values are wrong, in the model's layers and
in the head's. They stand at the place that the next step writes first, before anything reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from runtime.errors import RequestError
from runtime.model import Model, draft_states, hidden_states, logits
from runtime.serve.graphs import Arriving, Recorded
from runtime.serve.request import Request
from runtime.serve.sample import Sampler, check_token
from runtime.state import Batch, Room, Span, State, send


class Speculation:
    """One request, whose steps compute its last token and the draft of the one after.

    Whether a draft is right the device decides, and goes on. The host learns of it while the next
    step runs, and that step may turn out to be one too many: it has room of its own.

    Its keys and values stay in slot 0. Its recurrent state moves between states 0 and 1: a step
    leaves in one the state after its sure token, in the other the state after the draft as well.

    tried              the batch of the two, the sure one first
    drafted, accepted  how many drafts were tried, and how many were right
    """

    def __init__(
        self, model: Model, request: Request, chunk: int = 512, *, graphs: bool = True
    ) -> None:
        if model.mtp is None:
            raise RequestError("the checkpoint has no MTP head to draft tokens with")
        self.model = model
        self.request = request
        self.chunk = chunk
        self.sampled = not request.sampling.greedy
        room = Room(1, request.longest + 2, spares=1, mtp_layers=1)
        self.state = State.allocate(model.config, room, device=model.device, dtype=model.dtype)
        self.pools = self.state.pools()
        self.sampler = Sampler.allocate(1, room.max_len, model.device)
        self.tried = Batch.pack(_waves(request.longest, slot=0), [], model.device)
        # the same rows, all at once: the head is attention, which may see several of one slot
        self.paired = replace(self.tried, waves=(2,))
        self.use_graphs = graphs and model.device.type == "cuda"
        self.drafted = self.accepted = 0

    @torch.inference_mode()
    def run(self) -> Iterator[int]:
        """Yield the tokens."""
        request = self.request
        # recording runs it once: before anything is in the states, and at the last places of the
        # slot, so that kernels are tuned for its length; no place is read before it is written
        step = Recorded(self._step, record=self.use_graphs)
        arriving = self._prefill()
        while not request.finished:
            enough = len(request.tokens) + 1 >= request.max_tokens
            launched = None if enough else Arriving(step())
            yield from self._deliver(arriving.values())
            if launched is not None:
                arriving = launched

    def _deliver(self, tokens: list[int]) -> list[int]:
        """Append and return what is wanted of a step's tokens, -1 being a draft in vain."""
        request, delivered = self.request, 0
        for token in tokens:
            if request.finished:
                break
            check_token(token, len(request.tokens) + 1)
            if token >= 0:
                request.ids.append(token)
                delivered += 1
        self.drafted += len(tokens) - 1
        self.accepted += delivered - 1
        request.computed = len(request.ids) - 1
        return request.ids[len(request.ids) - delivered :]

    def _prefill(self) -> Arriving:
        """Compute the prompt in chunks, choose a token and draft the next; return the token."""
        request, length = self.request, len(self.request.prompt)
        request.slot = self.state.take_slot()
        self.sampler.start(request.slot, request.sampling, length - 1, request.max_tokens)
        ids = torch.zeros(length + 1, dtype=torch.int64, device=self.model.device)
        send(request.prompt, ids[:length])
        self.tried.fill(_waves(length, slot=request.slot))
        drafted = self._prefill_part(ids)
        while request.computed < length:
            drafted = self._prefill_part(ids)
        draft = logits(self.model, drafted[-1:]).argmax(-1)
        self.tried.ids.copy_(torch.cat([ids[length:].clamp(min=0), draft]))
        return Arriving(ids[length:])

    def _prefill_part(self, ids: Tensor) -> Tensor:
        """Compute a part of the prompt, and with the last the token after it; return the head's.

        ids  the prompt and room for a token
        """
        request = self.request
        span = request.prefill(min(len(request.prompt) - request.computed, self.chunk))
        request.computed += len(span.ids)
        batch = Batch.pack([], [span], self.model.device)
        hidden = hidden_states(self.model, self.pools, batch)
        if request.computed == len(request.prompt):
            ids[-1:] = self._choose(hidden[-1:], batch)
        following = replace(batch, ids=ids[span.start + 1 : request.computed + 1].clamp(min=0))
        return draft_states(self.model, self.state.mtp_pools(), following, hidden)

    def _step(self) -> Tensor:
        """Return the tokens [2] after both rows, the second -1 if it follows a wrong draft."""
        tried = self.tried
        hidden = hidden_states(self.model, self.pools, tried)
        tokens = self._choose(hidden, tried)
        right = (tokens[:1] == tried.ids[1:]).long()
        torch.clamp(tokens, min=0, out=tried.ids)
        drafted = draft_states(self.model, self.state.mtp_pools(), self.paired, hidden)
        draft = logits(self.model, drafted.index_select(0, right)).argmax(-1)
        self._move_on(torch.cat([tried.ids.index_select(0, right), draft]), right)
        return torch.cat([tokens[:1], tokens[1:].masked_fill(right == 0, -1)])

    def _move_on(self, ids: Tensor, right: Tensor) -> None:
        """Begin the next step after the tokens of this one, which are `right` + 1."""
        tried = self.tried
        tried.ids.copy_(ids)
        tried.positions.add_(right + 1)
        tried.lengths.add_(right + 1)
        tried.states.copy_(torch.where(right > 0, tried.states.flip(0), tried.states))

    def _choose(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the tokens after the last rows of a batch, whose hidden states these are."""
        slots, places = (x[-len(hidden) :] for x in (batch.token_slots, batch.positions))
        scores = logits(self.model, hidden)
        return self.sampler.choose(scores, slots, places, sampled=self.sampled)


def _waves(start: int, *, slot: int) -> list[list[Span]]:
    """Return the waves of a step: one row at `start` and one after it."""
    return [[Span([0], start + row, slot, row)] for row in range(2)]
