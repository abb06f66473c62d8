"""Requests in, tokens out: continuous batching over slots, prompts prefilled in chunks.

Each step runs one batch: first a row for every sequence that is being decoded, then the next parts
of prompts. A prompt is cut at multiples of 64 tokens only, where the chunked delta rule is cut
anyway: the rule then computes the same, whatever a sequence shared its batches with.

`generate` is for one prompt. With `speculate` the MTP head drafts one token more, and both are run
as two rows of one step, the second from a copy of the first one's state: whichever state turns out
to be the accepted prefix is kept, and nothing is recomputed. A draft is accepted if it is the very
token that would have been chosen, so the tokens are the same, sampled ones too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from runtime.kernels.delta_rule import CHUNK
from runtime.kernels.launch import power_of_two
from runtime.model import Model, draft_states, hidden_states, logits
from runtime.sample import GREEDY, RequestError, Sampling, sample
from runtime.state import PADDING, Batch, Pools, Room, Span, State


@dataclass(eq=False)
class Request:
    """A prompt, what is wanted, and what has been generated so far.

    ids       the prompt, then the generated tokens
    computed  how many of them have passed through the model
    stop      tokens that end the answer; the one that does is kept
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()
    slot: int = -1
    computed: int = 0
    ids: list[int] = field(init=False)
    generator: Random = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt has no tokens")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}, expected at least 1")
        self.ids = list(self.prompt)
        self.generator = self.sampling.generator()

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

    def span(self, count: int) -> Span:
        """Return the next `count` tokens to compute."""
        ids = self.ids[self.computed : self.computed + count]
        return Span(ids, self.computed, self.slot, self.slot)


class Engine:
    """Runs requests together.

    slots    how many sequences run at once; the others wait
    max_len  tokens a slot has room for
    chunk    how many prompt tokens one step takes, a multiple of 64
    graphs   steps that only decode are CUDA graphs, recorded once for each power of two of rows
    """

    def __init__(
        self, model: Model, *, slots: int = 8, max_len: int = 4096, chunk: int = 512,
        recurrent_dtype: torch.dtype = torch.float32, graphs: bool = True,
    ) -> None:  # fmt: skip
        if chunk < CHUNK or chunk % CHUNK:
            raise RequestError(f"chunk is {chunk}, expected a multiple of {CHUNK}")
        self.model = model
        self.max_len = max_len
        self.chunk = chunk
        self.state = State.allocate(
            model.config, Room(slots, max_len), device=model.device, dtype=model.dtype,
            recurrent_dtype=recurrent_dtype,
        )  # fmt: skip
        self.pools = self.state.pools()
        self.graphs: dict[int, DecodeGraph] = {}
        self.use_graphs = graphs and model.device.type == "cuda"
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request. RequestError if it can never be run."""
        check_ids(request.prompt, self.model)
        if request.longest > self.max_len:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} more need "
                f"{request.longest} places, expected at most {self.max_len}"
            )
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """Return whether requests are waiting or running."""
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """Run one batch; return the tokens it gave, with their requests."""
        self._admit()
        decodes = [(r, 1) for r in self.running if r.computed >= len(r.prompt)]
        parts = decodes + list(self._prefills())
        if not parts:
            return []
        spans = [request.span(count) for request, count in parts]
        done, rows = self._move_on(parts)
        scores = self._scores(spans[: len(decodes)], spans[len(decodes) :], rows)
        tokens = choose(scores, done)
        self._retire()
        return list(zip(done, tokens, strict=True))

    def _scores(self, decodes: list[Span], prefills: list[Span], rows: list[int]) -> Tensor:
        """Run the batch; return the logits [rows, V] of some of its rows."""
        if self.use_graphs and not prefills:
            return self._graph(len(decodes)).run(decodes)
        batch = Batch.pack([decodes] if decodes else [], prefills, self.model.device)
        hidden = hidden_states(self.model, self.pools, batch)
        if not rows:
            return hidden[:0]
        return logits(self.model, hidden if len(rows) == len(hidden) else hidden[rows])

    def _graph(self, num_rows: int) -> DecodeGraph:
        size = power_of_two(num_rows)
        if size not in self.graphs:
            self.graphs[size] = DecodeGraph(self.model, self.pools, size)
        return self.graphs[size]

    def _admit(self) -> None:
        while self.waiting and self.state.free_slots:
            request = self.waiting.popleft()
            request.slot = self.state.take_slot()
            self.running.append(request)

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
        """Count what was computed; return the requests that now get a token, and their rows."""
        done, rows, end = [], [], 0
        for request, count in parts:
            request.computed += count
            end += count
            if request.computed == len(request.ids):
                done.append(request)
                rows.append(end - 1)
        return done, rows

    def _retire(self) -> None:
        for request in self.running:
            if request.finished:
                self.state.give_slot(request.slot)
        self.running = [request for request in self.running if not request.finished]


class DecodeGraph:
    """One token for each of up to `size` sequences, as a CUDA graph: one launch for hundreds.

    Rows that are not needed are padding. Before recording, the batch runs on padding alone, so that
    kernels are compiled and tuned and no state is touched.
    """

    def __init__(self, model: Model, pools: Sequence[Pools], size: int) -> None:
        self.size = size
        self.batch = Batch.pack([[PADDING] * size], [], model.device)
        logits(model, hidden_states(model, pools, self.batch))
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.scores = logits(model, hidden_states(model, pools, self.batch))

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Return the logits [rows, V]; they are overwritten by the next run."""
        padding = [PADDING] * (self.size - len(spans))
        filled = Batch.pack([[*spans, *padding]], [], torch.device("cpu"))
        self.batch.packed.copy_(filled.packed)
        self.graph.replay()
        return self.scores[: len(spans)]


def check_ids(ids: Sequence[int], model: Model) -> None:
    """Raise RequestError for a token that the vocabulary does not have."""
    for token in ids:
        if not 0 <= token < model.config.sizes["V"]:
            raise RequestError(f"token {token} is not in a vocabulary of {model.config.sizes['V']}")


def choose(scores: Tensor, requests: Sequence[Request]) -> list[int]:
    """Choose and append the next token of each request from its row of logits."""
    tokens = sample(scores, [r.sampling for r in requests], [r.generator for r in requests])
    for request, token in zip(requests, tokens, strict=True):
        request.ids.append(token)
    return tokens


def generate(
    model: Model, prompt: Sequence[int], max_tokens: int, *, sampling: Sampling = GREEDY,
    stop: frozenset[int] = frozenset(), speculate: bool = False,
) -> Iterator[int]:  # fmt: skip
    """Yield the tokens that follow a prompt, one by one, the one of `stop` that ends it included.

    speculate  draft with the MTP head: the same tokens sooner

    RequestError if the prompt is empty or strange to the model, or there is no MTP head to draft.
    """
    request = Request(prompt, max_tokens, sampling, stop)
    check_ids(prompt, model)
    if speculate:
        return Speculation(model, request).run()
    engine = Engine(model, slots=1, max_len=request.longest)
    engine.add(request)
    return _run_alone(engine)


def _run_alone(engine: Engine) -> Iterator[int]:
    while engine.busy:
        for _, token in engine.step():
            yield token


class Speculation:
    """One sequence with a drafted token in every step.

    Its keys and values stay in slot 0. Its recurrent state moves between states 0 and 1: a step
    leaves in one the state after its sure token, in the other the state after the draft as well.

    drafted, accepted  how many drafts were tried, and how many were right
    """

    def __init__(self, model: Model, request: Request, chunk: int = 512) -> None:
        if model.mtp is None:
            raise RequestError("the checkpoint has no MTP head to draft tokens with")
        self.model = model
        self.request = request
        self.chunk = chunk
        room = Room(1, request.longest + 1, spares=1, mtp_layers=1)
        self.state = State.allocate(model.config, room, device=model.device, dtype=model.dtype)
        self.pools = self.state.pools()
        self.request.slot = self.state.take_slot()
        self.current, self.spare = 0, 1
        self.paired = 0
        self.drafted = self.accepted = 0

    @torch.inference_mode()
    def run(self) -> Iterator[int]:
        """Yield the tokens."""
        request = self.request
        draft = self._prefill()
        yield request.ids[-1]
        while not request.finished:
            hidden = self._try(draft)
            scores = logits(self.model, hidden)
            self.drafted += 1
            tokens = choose(scores[:1], [request])
            yield tokens[0]
            if tokens[0] == draft and not request.finished:
                self.accepted += 1
                self.current, self.spare = self.spare, self.current
                tokens += choose(scores[1:], [request])
                yield tokens[1]
            request.computed += len(tokens)
            if not request.finished:
                draft = self._draft(hidden[: len(tokens)], tokens)

    def _prefill(self) -> int:
        """Compute the prompt in chunks, choose a token, and return the draft of the next."""
        request, draft = self.request, -1
        while request.computed < len(request.prompt):
            span = request.span(min(len(request.prompt) - request.computed, self.chunk))
            batch = Batch.pack([], [span], self.model.device)
            hidden = hidden_states(self.model, self.pools, batch)
            request.computed += len(span.ids)
            if request.computed == len(request.prompt):
                choose(logits(self.model, hidden[-1:]), [request])
            draft = self._draft(hidden, request.ids[span.start + 1 : request.computed + 1])
        return draft

    def _try(self, draft: int) -> Tensor:
        """Return the hidden states [2, H] of the last token and of the draft after it."""
        last = self.request.computed
        sure = Span(self.request.ids[last:], last, 0, self.current)
        tried = Span([draft], last + 1, 0, self.spare)
        batch = Batch.pack([[sure], [tried]], [], self.model.device)
        return hidden_states(self.model, self.pools, batch)

    def _draft(self, hidden: Tensor, following: Sequence[int]) -> int:
        """Give the MTP head hidden states and the tokens after them; return its next token."""
        span = Span(following, self.paired, 0, 0)
        batch = Batch.pack([], [span], self.model.device)
        drafted = draft_states(self.model, self.state.mtp_pools(), batch, hidden)
        self.paired += len(following)
        return int(logits(self.model, drafted[-1:]).argmax())
