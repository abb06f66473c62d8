from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine import Engine, Request, Speculation, generate
from runtime.sample import GREEDY, RequestError, Sampling
from runtime.state import Batch
from tests.runtime.models import (
    NANO,
    distance,
    full,
    load,
    needs_cuda,
    some_ids,
    state_of,
    text_ids,
    write,
)

FLOAT32 = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("engine") / "dense"))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("engine") / "moe", moe=True, ratio=2))


@pytest.fixture(scope="module")
def trained():
    return load(NANO), text_ids(NANO, 300)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, and how many steps after the one before it arrives."""

    wait: int
    length: int
    max_tokens: int
    seed: int | None

    def request(self, ids):
        sampling = GREEDY if self.seed is None else Sampling(temperature=1.0, seed=self.seed)
        return Request(ids[: self.length], self.max_tokens, sampling)


arrivals = st.lists(
    st.builds(
        Arrival,
        wait=st.integers(0, 4),
        length=st.sampled_from([1, 2, 30, 63, 64, 65, 130, 200]),
        max_tokens=st.integers(1, 5),
        seed=st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)


def states_at_the_end(engine, requests, waits):
    """Run requests that arrive one after another; return what each leaves in its slot."""
    left, queue, clock = {}, list(zip(waits, requests, strict=True)), 0
    while queue or engine.busy:
        while queue and queue[0][0] <= clock:
            engine.add(queue.pop(0)[1])
            clock = 0
        for request, _ in engine.step():
            if request.finished:
                kept = state_of(engine.state, request.slot, request.computed)
                left[requests.index(request)] = [x.clone() for x in kept]
        clock += 1
    return [left[i] for i in range(len(requests))]


@settings(max_examples=12)
@given(many=arrivals, chunk=st.sampled_from([64, 128]), slots=st.integers(1, 3))
def test_a_request_gets_what_it_gets_alone_whatever_runs_beside_it(model, many, chunk, slots):
    ids = some_ids(200, model)
    together = [one.request(ids) for one in many]
    engine = Engine(model, slots=slots, max_len=210, chunk=chunk)
    left = states_at_the_end(engine, together, [one.wait for one in many])
    for one, request, got in zip(many, together, left, strict=True):
        alone = one.request(ids)
        (expected,) = states_at_the_end(Engine(model, slots=1, max_len=210), [alone], [0])
        assert request.tokens == alone.tokens
        for ours, theirs in zip(got, expected, strict=True):
            assert distance(ours, theirs) < FLOAT32


def test_experts_may_be_shared_by_neighbours(sparse):
    ids = some_ids(150, sparse)
    many = [Request(ids[i : 150 - 30 * i], 4) for i in range(4)]
    states_at_the_end(Engine(sparse, slots=3, max_len=210, chunk=64), many, [0, 1, 1, 0])
    for request in many:
        assert request.tokens == list(generate(sparse, request.prompt, 4))


def test_generated_tokens_are_the_likeliest_of_a_full_prefill(model):
    ids = some_ids(70, model)
    tokens = list(generate(model, ids, 6))
    expected = full(model, ids + tokens[:-1])[len(ids) - 1 :].argmax(-1)
    assert tokens == expected.tolist()


def test_a_reused_slot_carries_nothing_over(model):
    ids = some_ids(90, model)
    engine = Engine(model, slots=1, max_len=210)
    first, second = Request(ids, 3), Request(ids[40:], 3)
    _, reused = states_at_the_end(engine, [first, second], [0, 0])
    (fresh,) = states_at_the_end(Engine(model, slots=1, max_len=210), [Request(ids[40:], 3)], [0])
    assert all(torch.equal(a, b) for a, b in zip(reused, fresh, strict=True))


def test_slots_without_a_request_stay_bit_equal(model):
    engine = Engine(model, slots=4, max_len=100, chunk=64)
    pools = (engine.state.recurrent[2:], engine.state.conv[2:],
             engine.state.keys[:, 2:], engine.state.values[:, 2:])  # fmt: skip
    for pool in pools:
        pool.fill_(3)
    for request in (Request(some_ids(80, model), 4), Request(some_ids(9, model), 4)):
        engine.add(request)
    while engine.busy:
        engine.step()
    assert all((pool == 3).all() for pool in pools)


def test_prompts_are_cut_at_multiples_of_64_within_the_budget(model, monkeypatch):
    taken = []
    pack = Batch.pack

    def spy(waves, prefills, device):
        taken.append([(span.start, len(span.ids)) for span in prefills])
        return pack(waves, prefills, device)

    monkeypatch.setattr(Batch, "pack", staticmethod(spy))
    engine = Engine(model, slots=3, max_len=400, chunk=128)
    ids = some_ids(300, model)
    for length in (300, 90, 100):
        engine.add(Request(ids[:length], 1))
    while engine.busy:
        engine.step()
    assert taken == [
        [(0, 128)],
        [(128, 128)],
        [(256, 44), (0, 64)],
        [(64, 26), (0, 100)],
    ]
    assert all(start % 64 == 0 for step in taken for start, _ in step)


def test_a_stop_token_ends_the_answer_and_is_kept(model):
    ids = some_ids(20, model)
    tokens = list(generate(model, ids, 8))
    stop = tokens[2]
    expected = tokens[: tokens.index(stop) + 1]
    for speculate in (False, True):
        got = generate(model, ids, 8, stop=frozenset([stop]), speculate=speculate)
        assert list(got) == expected


def test_what_cannot_be_run_is_refused(model):
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        generate(model, [], 5)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        generate(model, [1], 0)
    with pytest.raises(RequestError, match="token 300 is not in a vocabulary of 300"):
        generate(model, [5, 300], 5)
    with pytest.raises(RequestError, match="chunk is 100, expected a multiple of 64"):
        Engine(model, chunk=100)
    with pytest.raises(RequestError, match="need 12 places, expected at most 11"):
        Engine(model, max_len=11).add(Request([1] * 3, 10))
    with pytest.raises(RequestError, match="no MTP head"):
        generate(dataclasses.replace(model, mtp=None), [1], 5, speculate=True)


def speculated(model, prompt, count, **options):
    """Return (request, what it leaves, the speculation) after running it to the end."""
    request = Request(prompt, count, **options)
    speculation = Speculation(model, request, chunk=64)
    assert list(speculation.run()) == request.tokens
    state, at, length = speculation.state, speculation.tried.states[0], computed(speculation)
    kept = [state.recurrent[at], state.conv[at]]
    kept += [pool[:-1, 0, :length] for pool in (state.keys, state.values)]
    return request, kept, speculation


def computed(speculation):
    """Return how many tokens the state holds: after the last step, which may be one too many."""
    return speculation.tried.positions[0].item()


@settings(max_examples=8)
@given(length=st.integers(1, 140), count=st.integers(1, 12), seed=st.none() | st.integers(0, 9))
def test_speculation_changes_neither_tokens_nor_states(trained, length, count, seed):
    model, ids = trained
    sampling = GREEDY if seed is None else Sampling(temperature=0.7, seed=seed)
    request, kept, speculation = speculated(model, ids[:length], count, sampling=sampling)
    more = computed(speculation) - request.computed
    assert 0 <= more <= 2
    assert request.computed == request.longest
    plain = Request(ids[:length], count + more, sampling)
    (expected,) = states_at_the_end(Engine(model, slots=1, max_len=160), [plain], [0])
    assert request.tokens == plain.tokens[:count]
    for ours, theirs in zip(kept, expected, strict=True):
        assert distance(ours, theirs) < FLOAT32


def test_drafts_are_both_accepted_and_rejected(trained):
    """Else the test above proves nothing; a trained head is right more often than not."""
    model, ids = trained
    seen = Counter()
    for start in (0, 50, 100):
        _, _, speculation = speculated(model, ids[start : start + 100], 30)
        seen["accepted"] += speculation.accepted
        seen["rejected"] += speculation.drafted - speculation.accepted
    assert seen["accepted"] > seen["rejected"] > 3


def test_an_untrained_head_drafts_in_vain_and_harmlessly(sparse):
    ids = some_ids(70, sparse)
    request, _, speculation = speculated(sparse, ids, 10)
    assert request.tokens == list(generate(sparse, ids, 10))
    assert speculation.accepted < speculation.drafted


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_graphs_decode_what_single_launches_decode(tmp_path, is_moe):
    """Three sequences in a graph of four rows, then two, then one; untouched slots stay."""
    on_gpu = load(write(tmp_path, moe=is_moe), device="cuda")
    ids = some_ids(90, on_gpu)
    answers = []
    for graphs in (False, True):
        many = [Request(ids[i : 90 - 20 * i], 4 + 3 * i) for i in range(3)]
        engine = Engine(on_gpu, slots=5, max_len=210, graphs=graphs)
        engine.state.recurrent[3:] = 3
        engine.state.keys[:, 3:] = 3
        states_at_the_end(engine, many, [0, 0, 0])
        answers.append([request.tokens for request in many])
        assert bool(engine.graphs) == graphs
        assert (engine.state.recurrent[3:] == 3).all()
        assert (engine.state.keys[:, 3:] == 3).all()
    assert answers[0] == answers[1]


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_speculates_without_changing_tokens(tmp_path):
    """Of four tokens in all, an untrained head guesses some."""
    on_gpu = load(write(tmp_path, vocab_size=4), device="cuda")
    ids, sampling = some_ids(70, on_gpu), Sampling(temperature=1.0, seed=7)
    request = Request(ids, 30, sampling)
    speculation = Speculation(on_gpu, request)
    assert list(speculation.run()) == list(generate(on_gpu, ids, 30, sampling=sampling))
    assert 0 < speculation.accepted < speculation.drafted
