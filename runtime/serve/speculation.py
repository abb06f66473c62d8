"""One sequence with drafted tokens in every step (speculative decoding).

    tokens    = choose(model(last, drafts))           1 + k rows, one after another, in one pass
    accepted  = how many drafts are the tokens before them
    drafts'   = MTP(hidden states, tokens)[accepted], and k - 1 times MTP of what it made itself
    last'     = tokens[accepted]                      1 + accepted tokens are new

Every row leaves the state after its token in a place of its own, which is not that of the state
before: the next step continues from that of the last right one, and nothing is copied or computed
again. A draft is accepted if it is the
very token that would have been chosen, so the tokens are the same, sampled ones too.

Source: Leviathan et al. 2023, with drafts of the model's own head.
Trap: after a rejected draft the keys and values of the rows from it on are wrong, in the model's
layers and in the head's. They stand at the places that the next step writes first, before anything
reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from runtime.context import angles_of, turns_of
from runtime.errors import RequestError
from runtime.kernels.draft.settle import Places, Turns, settle
from runtime.model import begin, draft, draft_stream, hidden_states
from runtime.serve.graphs import Arriving, Recorded, another_stream, last_tokens
from runtime.serve.request import Request
from runtime.serve.sample import Sampler, check_token
from runtime.state import Batch, Room, Span, State, send
from runtime.weights import Model


class Speculation:
    """One request, whose steps compute its last token and the drafts of those after.

    How many drafts are right the device decides, and goes on. The host learns of it while the next
    step runs, and that step may turn out to be one too many: it has room of its own.

    drafts             how many a step tries
    tried              the batch of last token and drafts
    following          the same rows in the MTP head, with the tokens that follow them
    turns              angles of the rows that are tried next
    head               what drafts are chosen from
    aside              a stream that tokens leave the device by; those of a step stay until the
                       second step after it
    drafted, accepted  how many drafts were tried, and how many were right
    """

    def __init__(
        self,
        model: Model,
        request: Request,
        drafts: int = 1,
        *,
        chunk: int = 512,
        graphs: bool = True,
    ) -> None:
        if drafts < 1:
            raise RequestError(f"drafts is {drafts}, expected at least 1")
        if model.mtp is None:
            raise RequestError("the checkpoint has no MTP head to draft tokens with")
        self.model, self.request, self.drafts, self.chunk = model, request, drafts, chunk
        self.sampled = not request.sampling.greedy
        # the step that is one too many may begin where all drafts of the one before were right
        room = Room(1, request.longest + 3 * drafts - 1, spares=drafts + 1, mtp_layers=1)
        self.state = State.allocate(model.config, room, device=model.device, dtype=model.dtype)
        self.pools, self.mtp_pools = self.state.pools(), self.state.mtp_pools()
        self.sampler = Sampler.allocate(1, room.max_len, model.device)
        rows = self._rows(request.longest)
        self.tried, self.following = (
            Batch.pack(rows, [], model.device, each=len(rows)) for _ in range(2)
        )
        self.turns = Turns(*self._angles(), *turns_of(model.config, model.device))
        self.head = model.draft_head()
        self.aside = another_stream(model.device)
        self.use_graphs = graphs and model.device.type == "cuda"
        self.drafted = self.accepted = 0

    @torch.inference_mode()
    def run(self) -> Iterator[int]:
        """Yield the tokens."""
        request = self.request
        # recording runs it once: before anything is in the states, and at the last places of the
        # slot, so that kernels are tuned for its length; no place is read before it is written
        step = Recorded(self._step, record=self.use_graphs, turns=2)
        arriving = self._prefill()
        while not request.finished:
            enough = len(request.tokens) + 1 >= request.max_tokens
            launched = None if enough else Arriving(step(), self.aside)
            yield from self._deliver(arriving.values())
            if launched is not None:
                arriving = launched

    def _rows(self, start: int) -> list[Span]:
        """Return the rows of a step: one at `start` and the drafts after it."""
        return [Span([0], start + row, 0, row + 1) for row in range(self.drafts + 1)]

    def _angles(self) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of the rows that are tried."""
        return angles_of(self.model.config, self.tried, self.model.dtype)

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
        self.tried.fill(self._rows(length))
        for x, known in zip(self.turns[:2], self._angles(), strict=True):
            x.copy_(known)
        x_1H = self._prefill_part(ids)
        while request.computed < length:
            x_1H = self._prefill_part(ids)
        torch.clamp(ids[length:], min=0, out=self.tried.ids[:1])
        self._draft(x_1H)
        return Arriving(ids[length:])

    def _prefill_part(self, ids: Tensor) -> Tensor:
        """Compute a part of the prompt, and with the last the token after it.

        Return what the MTP head makes of the last row: see `draft_stream`.

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
        last_1 = torch.full((1,), len(span.ids) - 1, dtype=torch.int64, device=ids.device)
        return draft_stream(self.model, self.mtp_pools, following, hidden, row_1=last_1)

    def _step(self) -> Tensor:
        """Return the tokens [1 + k] after the rows, -1 where they follow a wrong draft."""
        tried, following = self.tried, self.following
        begun = begin(self.model, tried)
        hidden = hidden_states(self.model, self.pools, tried, begun)
        tokens = self._choose(hidden, tried)
        rows, after = (Places(x.ids, x.positions, x.lengths) for x in (tried, following))
        new, last_1 = settle(tokens, rows, tried.states, tried.sources, after, self.turns)
        angles = begun[1].angles
        self._draft(draft_stream(self.model, self.mtp_pools, following, hidden, angles, last_1))
        return new

    def _draft(self, x_1H: Tensor) -> None:
        """Put the drafts in the rows that are tried next.

        x_1H  what the MTP head makes of the row before them: see `draft_stream`
        """
        model, ids = self.model, self.tried.ids
        for row in range(self.drafts):
            token_1 = ids[row + 1 : row + 2]
            hidden_1H = draft(model, self.head, x_1H, token_1)
            if row + 1 < self.drafts:
                batch = self._row(row, token_1)
                angles = self.turns.cos[row : row + 1], self.turns.sin[row : row + 1]
                x_1H = draft_stream(model, self.mtp_pools, batch, hidden_1H, angles)

    def _row(self, row: int, following: Tensor) -> Batch:
        """Return one row of those that are tried next, in the head, with the token after it."""
        tried, one = self.tried, slice(row, row + 1)
        places = {
            name: getattr(tried, name)[one]
            for name in ("positions", "lengths", "slots", "states", "token_slots")
        }
        return replace(tried, each=1, ids=following, **places)

    def _choose(self, hidden_RH: Tensor, batch: Batch) -> Tensor:
        """Return the tokens after the last rows of a batch, whose hidden states these are."""
        return last_tokens(self.model, hidden_RH, batch, self.sampler, sampled=self.sampled)
