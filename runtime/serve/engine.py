"""Requests in, tokens out: continuous batching over slots, prompts prefilled in chunks.

Each step runs one batch: first a row for every sequence that is being decoded, then the next parts
of prompts. A prompt is cut at multiples of 64 tokens only, where the chunked delta rule is cut
anyway: the rule then computes the same, whatever a sequence shared its batches with.

The device chooses the tokens and goes on with them by itself. The host launches a step, and only
then waits for the tokens of the step before, which it delivers: it is one step behind. How long a
sequence is it knows without its tokens, so none is run beyond `max_tokens`. A stop token it sees
when one token more is already being computed; that one is dropped, and the slot given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from runtime.errors import RequestError
from runtime.kernels.ahead import compiled_together
from runtime.kernels.delta_rule.rule import CHUNK
from runtime.kernels.launch import power_of_two
from runtime.model import hidden_states
from runtime.serve.graphs import Arriving, DecodeRows, last_tokens, next_tokens
from runtime.serve.request import Request, check_ids
from runtime.serve.sample import GREEDY, Sampler, Sampling, check_token
from runtime.serve.speculation import Speculation
from runtime.state import PADDING, Batch, Room, Span, State, send
from runtime.weights import Model

__all__ = ["Engine", "Request", "Speculation", "check_ids", "generate"]


class Engine:
    """Runs requests together.

    slots    how many sequences run at once; the others wait
    max_len  tokens a slot has room for
    chunk    how many prompt tokens one step takes, a multiple of 64
    graphs   steps that only decode are CUDA graphs, recorded once for each power of two of rows,
             and once more if some of them are sampled
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        max_len: int = 4096,
        chunk: int = 512,
        recurrent_dtype: torch.dtype = torch.float32,
        graphs: bool = True,
    ) -> None:
        if chunk < CHUNK or chunk % CHUNK:
            raise RequestError(f"chunk is {chunk}, expected a multiple of {CHUNK}")
        self.model = model
        self.max_len = max_len
        self.chunk = chunk
        self.state = State.allocate(
            model.config,
            Room(slots, max_len),
            device=model.device,
            dtype=model.dtype,
            recurrent_dtype=recurrent_dtype,
        )
        self.pools = self.state.pools()
        self.sampler = Sampler.allocate(slots, max_len, model.device)
        self.use_graphs = graphs and model.device.type == "cuda"
        self.decoding: dict[tuple[int, bool], DecodeRows] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.arriving: tuple[list[Request], Arriving] | None = None

    def add(self, request: Request) -> None:
        """Queue a request. RequestError if it can never be run."""
        check_ids(request.prompt, self.model)
        if request.longest > self.max_len:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} more need "
                f"{request.longest} places, expected at most {self.max_len}"
            )
        self.waiting.append(request)

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile together the kernels that the requests that wait will launch, on a GPU.

        Without it each is compiled when it is first launched. It computes padding: no state moves.
        """
        if self.model.device.type != "cuda":
            return
        first = {(len(one.prompt[: self.chunk]), one.sampling.greedy) for one in self.waiting}
        with compiled_together():
            for length, greedy in first:
                prompt = Batch.pack([], [Span([0] * length, 0, -1, -1)], self.model.device)
                for batch in (prompt, Batch.pack([PADDING], [], self.model.device)):
                    last_1H = hidden_states(self.model, self.pools, batch)[-1:]
                    last_tokens(self.model, last_1H, batch, self.sampler, sampled=not greedy)

    @property
    def busy(self) -> bool:
        """Return whether requests are waiting, or running and not all delivered."""
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """Launch one batch; return the tokens of the one launched before, with their requests."""
        self._admit()
        launched = self._launch()
        delivered = self._deliver()
        self.arriving = launched
        return delivered

    def _admit(self) -> None:
        while self.waiting and self.state.free_slots:
            request = self.waiting.popleft()
            request.slot = self.state.take_slot()
            first = len(request.prompt) - 1
            self.sampler.start(request.slot, request.sampling, first, request.max_tokens)
            self.running.append(request)

    def _launch(self) -> tuple[list[Request], Arriving] | None:
        """Launch what there is to compute; return who gets a token from it, and the tokens."""
        decodes = [request for request in self.running if request.decodes]
        prefills = list(self._prefills())
        if not decodes and not prefills:
            return None
        rows = [request.row() for request in decodes]
        spans = [request.prefill(count) for request, count in prefills]
        done, ends = self._move_on([*((request, 1) for request in decodes), *prefills])
        sampled = not all(request.sampling.greedy for request in done)
        if spans:
            self._run_mixed(rows, spans, ends, sampled=sampled)
        else:
            self._rows(len(rows), sampled=sampled).run(rows)
        return done, Arriving(self.sampler.last)

    def _prefills(self) -> Iterator[tuple[Request, int]]:
        """Yield (request, tokens) for the prompts that move on in this step."""
        left = self.chunk
        for request in self.running:
            todo = len(request.prompt) - request.computed
            count = todo if todo <= left else left // CHUNK * CHUNK
            if count > 0:
                yield request, count
                left -= count

    def _move_on(self, parts: Sequence[tuple[Request, int]]) -> tuple[list[Request], list[int]]:
        """Count what is computed now; return the requests that get a token, and their rows."""
        done, rows, end = [], [], 0
        for request, count in parts:
            request.computed += count
            end += count
            if request.computed >= len(request.prompt):
                done.append(request)
                rows.append(end - 1)
        return done, rows

    def _run_mixed(
        self, rows: list[Span], prefills: list[Span], ends: list[int], *, sampled: bool
    ) -> None:
        """Run a batch with prompts in it, whose rows `ends` give tokens."""
        batch = Batch.pack(rows, prefills, self.model.device)
        ids = batch.ids[: len(rows)]
        self.sampler.take(batch.slots[: len(rows)], out=ids)
        if not ends:
            hidden_states(self.model, self.pools, batch)
            return
        at = torch.empty(len(ends), dtype=torch.int64, device=self.model.device)
        send(ends, at)
        next_tokens(self.model, self.pools, batch, self.sampler, rows=at, sampled=sampled)

    def _rows(self, count: int, *, sampled: bool) -> DecodeRows:
        key = power_of_two(count), sampled
        if key not in self.decoding:
            self.decoding[key] = DecodeRows(
                self.model,
                self.pools,
                self.sampler,
                key[0],
                sampled=sampled,
                record=self.use_graphs,
            )
        return self.decoding[key]

    def _deliver(self) -> list[tuple[Request, int]]:
        """Wait for what is arriving; append and return it, but for what follows a stop token.

        LogitsError if one of them could not be computed.
        """
        if self.arriving is None:
            return []
        requests, arriving = self.arriving
        last = arriving.values()
        tokens = [(one, last[one.slot]) for one in requests if not one.finished]
        for request, token in tokens:
            check_token(token, len(request.tokens) + 1)
            request.ids.append(token)
        self._retire()
        return tokens

    def _retire(self) -> None:
        for request in self.running:
            if request.finished:
                self.state.give_slot(request.slot)
        self.running = [request for request in self.running if not request.finished]


def generate(
    model: Model,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    stop: frozenset[int] = frozenset(),
    speculate: int = 0,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, one by one, the one of `stop` that ends it included.

    speculate  how many tokens the MTP head drafts in a step: the same text sooner; 0: none

    RequestError if the prompt is empty or strange to the model, or there is no MTP head to draft.
    LogitsError at the first token whose logits are NaN or infinite.
    """
    request = Request(prompt, max_tokens, sampling, stop)
    check_ids(prompt, model)
    if speculate:
        return Speculation(model, request, speculate).run()
    engine = Engine(model, slots=1, max_len=request.longest)
    engine.add(request)
    engine.compile()
    return _run_alone(engine)


def _run_alone(engine: Engine) -> Iterator[int]:
    while engine.busy:
        for _, token in engine.step():
            yield token
