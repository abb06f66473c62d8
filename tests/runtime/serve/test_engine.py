from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import LogitsError, RequestError
from runtime.kernels.linear.weight import Fp8Weight
from runtime.kernels.sample.draw import draw
from runtime.serve.engine import Engine, generate
from runtime.serve.request import Request
from runtime.serve.sample import GREEDY, Sampling
from runtime.serve.speculation import Speculation
from runtime.state import Batch
from tests.runtime.models import (
    NANO,
    distance,
    full,
    load,
    served,
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
    pools = (
        engine.state.recurrent[2:],
        engine.state.conv[2:],
        engine.state.keys[:, 2:],
        engine.state.values[:, 2:],
    )
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

    def spy(decodes, prefills, device):
        taken.append([(span.start, len(span.ids)) for span in prefills])
        return pack(decodes, prefills, device)

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
    for speculate in (0, 1, 3):
        got = generate(model, ids, 8, stop=frozenset([stop]), speculate=speculate)
        assert list(got) == expected


@settings(max_examples=12)
@given(many=arrivals, every=st.integers(2, 9), slots=st.integers(1, 3))
def test_what_is_computed_after_a_stop_token_is_seen_nowhere(model, many, every, slots):
    """Not in the answer, nor in those beside it, nor in the next one of the same slot."""
    ids, stop = some_ids(200, model), frozenset(range(0, model.config.sizes["V"], every))
    requests = [one.request(ids) for one in many]
    for request in requests:
        request.stop = stop
    engine = Engine(model, slots=slots, max_len=210, chunk=64)
    delivered = served(engine, requests, [one.wait for one in many])
    for one, request, got in zip(many, requests, delivered, strict=True):
        alone = one.request(ids)
        served(Engine(model, slots=1, max_len=210), [alone], [0])
        ends = [i for i, token in enumerate(alone.tokens, start=1) if token in stop]
        assert got == request.tokens == alone.tokens[: min(ends, default=None)]
    assert sorted(engine.state.free_slots) == list(range(slots))


def test_tokens_are_delivered_one_step_behind(model):
    engine, request = Engine(model, slots=2, max_len=100), Request(some_ids(9, model), 3)
    engine.add(request)
    computed, counts = [], []
    while engine.busy:
        counts.append(len(engine.step()))
        computed.append(request.computed)
    assert computed == [9, 10, 11, 11]
    assert counts == [0, 1, 1, 1]
    assert engine.step() == []


def test_no_token_is_run_beyond_those_wanted(model):
    engine = Engine(model, slots=2, max_len=40)
    engine.state.keys.fill_(3)
    many = [Request(some_ids(9, model), 3), Request(some_ids(20, model), 8)]
    served(engine, many, [0, 1])
    for request in many:
        assert request.computed == request.longest
        assert (engine.state.keys[:, request.slot, request.longest :] == 3).all()
        assert (engine.state.keys[:, request.slot, : request.longest] != 3).any(dim=(0, 2, 3)).all()


def test_the_host_sends_the_table_only_when_rows_change(model, monkeypatch):
    """Two join at once and a third later; they end one by one."""
    filled, fill = [], Batch.fill

    def spy(batch, decodes):
        filled.append([row.slot for row in decodes])
        fill(batch, decodes)

    monkeypatch.setattr(Batch, "fill", spy)
    many = [Request(some_ids(9, model), count) for count in (9, 20, 8)]
    served(Engine(model, slots=4, max_len=40), many, [0, 0, 4])
    assert filled == [[0, 1], [0, 1, 2, -1], [1, 2], [1]]
    assert [len(request.tokens) for request in many] == [9, 20, 8]


def chosen_on_the_host(model, prompt, count, sampling):
    """Return the tokens that a loop over whole prefills chooses, one draw for each token."""
    ids, generator = list(prompt), Random(sampling.seed)
    settings_13 = [[sampling.temperature, sampling.top_k or torch.inf, sampling.top_p]]
    for _ in range(count):
        scores = full(model, ids)[-1:]
        token = scores.argmax(-1)
        if sampling.temperature > 0:
            number = torch.tensor([generator.random()], dtype=torch.float64)
            token = draw(scores, torch.tensor(settings_13, dtype=torch.float64), number)
        ids.append(token.item())
    return ids[len(prompt) :]


def test_the_device_chooses_what_the_host_would(trained):
    """Greedy and sampled rows that join and leave, and the same drafted."""
    model, ids = trained
    ways = [GREEDY, Sampling(0.8, seed=3), Sampling(1.5, top_k=7, seed=4), Sampling(1, top_p=0.6)]
    many = [Request(ids[i : 20 + 9 * i], 12 - 2 * i, way) for i, way in enumerate(ways)]
    delivered = served(Engine(model, slots=3, max_len=80), many, [0, 1, 3, 0])
    for request, got in zip(many, delivered, strict=True):
        expected = chosen_on_the_host(model, request.prompt, request.max_tokens, request.sampling)
        again = generate(model, request.prompt, request.max_tokens, sampling=request.sampling)
        drafted, _, _ = speculated(
            model, request.prompt, request.max_tokens, 2, sampling=request.sampling
        )
        assert got == list(again) == drafted.tokens == expected


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
        generate(dataclasses.replace(model, mtp=None), [1], 5, speculate=1)


def speculated(model, prompt, count, drafts, **options):
    """Return (request, what it leaves, the speculation) after running it to the end."""
    request = Request(prompt, count, **options)
    speculation = Speculation(model, request, drafts, chunk=64)
    assert list(speculation.run()) == request.tokens
    state, at, length = speculation.state, speculation.tried.sources[0], computed(speculation)
    kept = [state.recurrent[at], state.conv[at]]
    kept += [pool[:-1, 0, :length] for pool in (state.keys, state.values)]
    return request, kept, speculation


def computed(speculation):
    """Return how many tokens the state holds: after the last step, which may be one too many."""
    return speculation.tried.positions[0].item()


@settings(max_examples=12)
@given(
    length=st.integers(1, 140),
    count=st.integers(1, 16),
    seed=st.none() | st.integers(0, 9),
    drafts=st.integers(1, 4),
)
def test_speculation_changes_neither_tokens_nor_states(trained, length, count, seed, drafts):
    model, ids = trained
    sampling = GREEDY if seed is None else Sampling(temperature=0.7, seed=seed)
    request, kept, speculation = speculated(model, ids[:length], count, drafts, sampling=sampling)
    more = computed(speculation) - request.computed
    assert 0 <= more <= 2 * drafts
    assert request.computed == request.longest
    plain = Request(ids[:length], count + more, sampling)
    (expected,) = states_at_the_end(Engine(model, slots=1, max_len=170), [plain], [0])
    assert request.tokens == plain.tokens[:count]
    if seed is not None and more > 1:  # no numbers are drawn for tokens beyond those wanted
        return
    for ours, theirs in zip(kept, expected, strict=True):
        assert distance(ours, theirs) < FLOAT32


def test_drafts_are_both_accepted_and_rejected(trained):
    """Else the test above proves nothing; a trained head is right more often than not."""
    model, ids = trained
    for drafts in (1, 3):
        seen = Counter()
        for start in (0, 50, 100):
            _, _, speculation = speculated(model, ids[start : start + 100], 30, drafts)
            seen["accepted"] += speculation.accepted
            seen["rejected"] += speculation.drafted - speculation.accepted
        assert seen["accepted"] > seen["rejected"] / drafts > 3


@pytest.mark.parametrize("drafts", [1, 3])
def test_a_stop_token_may_be_any_of_a_drafted_step(trained, drafts):
    model, ids = trained
    tokens = list(generate(model, ids[:100], 20))
    for stop in set(tokens):
        request, _, speculation = speculated(model, ids[:100], 20, drafts, stop=frozenset([stop]))
        assert request.tokens == tokens[: tokens.index(stop) + 1]
        assert request.computed == len(request.ids) - 1
        assert speculation.accepted <= speculation.drafted


def test_a_tied_head_drafts_the_first_tokens_alone(trained, monkeypatch):
    model, ids = trained
    whole, _, before = speculated(model, ids[:100], 40, 2)
    monkeypatch.setattr("runtime.weights.DRAFTED", 200)
    some, _, speculation = speculated(model, ids[:100], 40, 2)
    assert model.head is model.embed
    assert some.tokens == whole.tokens
    assert max(some.tokens) >= 200 > speculation.tried.ids[1:].max()
    assert 0 < speculation.accepted < before.accepted
    untied = dataclasses.replace(model, head=model.embed.clone())
    assert untied.draft_head() is untied.head


def test_drafts_of_a_head_in_fp8_change_no_token(trained, monkeypatch):
    """Codes have 3 mantissa bits: they are off by 2^-4 at most, or by half of 2^-9 of the scale."""
    model, ids = trained
    plain, _, before = speculated(model, ids[:100], 40, 2)
    monkeypatch.setattr("runtime.weights.capability", lambda _: (9, 0))
    drafted, _, speculation = speculated(model, ids[:100], 40, 2)
    head = speculation.head
    assert isinstance(head, Fp8Weight)
    error = (head.codes.float() * head.scale - model.embed).abs()
    assert (error <= torch.maximum(model.embed.abs() * 2**-4, head.scale * 2**-10) * 1.001).all()
    assert drafted.tokens == plain.tokens
    assert speculation.accepted > before.accepted // 2


def test_an_untrained_head_drafts_in_vain_and_harmlessly(sparse):
    ids = some_ids(70, sparse)
    request, _, speculation = speculated(sparse, ids, 10, 2)
    assert request.tokens == list(generate(sparse, ids, 10))
    assert speculation.accepted < speculation.drafted


@pytest.fixture
def poisoned(tmp_path):
    """A model, a prompt, and the tokens before the first whose embedding is NaN."""
    model = load(write(tmp_path / "nan", tie_word_embeddings=False))
    ids = some_ids(70, model)
    tokens = list(generate(model, ids, 6))
    at = next(i for i in range(1, 6) if tokens[i] not in {*ids, *tokens[:i]})
    model.embed[tokens[at]] = torch.nan
    return model, ids, tokens[: at + 1]


@pytest.mark.parametrize("speculate", [0, 1, 3])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.001, seed=3)], ids=["greedy", "sampled"])
def test_the_first_nan_ends_the_text_with_an_error(poisoned, sampling, speculate):
    model, ids, before = poisoned
    tokens = generate(model, ids, 20, sampling=sampling, speculate=speculate)
    assert list(islice(tokens, len(before))) == before
    with pytest.raises(LogitsError, match=f"generated token {len(before) + 1} are NaN"):
        next(tokens)


@pytest.mark.parametrize("speculate", [0, 1, 3])
def test_nan_after_the_prompt_gives_no_token_at_all(tmp_path, speculate):
    model = load(write(tmp_path / "nan"))
    model.norm[0] = torch.nan
    with pytest.raises(LogitsError, match="generated token 1 are NaN"):
        next(iter(generate(model, some_ids(70, model), 5, speculate=speculate)))


def test_nan_beyond_what_is_wanted_does_no_harm(poisoned):
    model, ids, before = poisoned
    assert list(generate(model, ids, len(before))) == before
    stop = frozenset(before[-1:])
    for speculate in (0, 1, 3):
        assert list(generate(model, ids, 20, stop=stop, speculate=speculate)) == before
