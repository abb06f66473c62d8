from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import LogitsError, RequestError
from runtime.kernels.sample.draw import NO_TOKEN, draw
from runtime.serve.sample import GREEDY, Sampler, Sampling, check_token

rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 99),
)


def draw_one(logits, sampling, number):
    settings = [[sampling.temperature, sampling.top_k or torch.inf, sampling.top_p]]
    exact = torch.tensor(settings, dtype=torch.float64), torch.tensor([number], dtype=torch.float64)
    return draw(torch.tensor([logits]), *exact).item()


def sample(logits, many, place=0, padding=0):
    """Return the token of each row [R, V] as the one that follows `place` of its own slot."""
    sampler = Sampler.allocate(len(many), place + 3, logits.device)
    for slot, sampling in enumerate(many):
        sampler.start(slot, sampling, place, 2)
    slots = torch.tensor([*range(len(many)), *[-1] * padding])
    rows = torch.cat([logits, torch.zeros(padding, logits.shape[1])])
    sampled = not all(sampling.greedy for sampling in many)
    return sampler.choose(rows, slots, slots * 0 + place, sampled=sampled).tolist()[: len(many)]


def allowed(logits, sampling):
    """Return (token, probability) of the tokens that may be drawn, likeliest first."""
    weights = (torch.tensor(logits, dtype=torch.float64) / sampling.temperature).softmax(0)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: sampling.top_k or None]
    mass = sum(weights[token].item() for token in order)
    kept, reached = [], 0.0
    for token in order:
        if reached >= sampling.top_p:
            break
        kept.append((token, weights[token].item() / mass))
        reached += weights[token].item() / mass
    return kept


@given(logits=rows, sampling=samplings, number=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_token_at_its_place_among_those_allowed(logits, sampling, number):
    kept = allowed(logits, sampling)
    at = number * sum(p for _, p in kept)
    below, possible = 0.0, set()
    for token, p in kept:
        # at an edge, either side: sums in another order differ in their last bits
        if below - 1e-9 <= at <= below + p + 1e-9:
            possible.add(token)
        below += p
    edge = allowed(
        logits, Sampling(sampling.temperature, sampling.top_k, min(1, sampling.top_p + 1e-9))
    )
    possible |= {token for token, _ in edge[len(kept) :]} if at > below - 1e-6 else set()
    assert draw_one(logits, sampling, number) in possible


@given(logits=rows, number=st.floats(0, 1, exclude_max=True))
def test_one_likeliest_token_and_a_tiny_temperature_are_greedy(logits, number):
    best = logits.index(max(logits))
    assert draw_one(logits, Sampling(1, top_k=1), number) == best
    assert draw_one(logits, Sampling(1, top_p=1e-9), number) == best
    assert draw_one(logits, Sampling(1e-300), number) in {
        token for token, value in enumerate(logits) if value == max(logits)
    }
    assert sample(torch.tensor([logits]), [GREEDY]) == [best]


def test_draws_have_the_probabilities_of_the_softmax():
    """4000 draws: each frequency is within 5 standard deviations of its probability."""
    logits, count = torch.tensor([1.0, 0.0, 2.0, -1.0]), 4000
    sampler = Sampler.allocate(1, count, logits.device)
    sampler.start(0, Sampling(temperature=1.5, seed=5), 0, count)
    slots, places = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    drawn = sampler.choose(logits.expand(count, -1), slots, places, sampled=True)
    p = (logits / 1.5).softmax(0)
    frequency = drawn.bincount(minlength=4) / count
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / count).sqrt()).all()


mixed = st.lists(samplings | st.just(GREEDY), min_size=1, max_size=6)


@given(mixed, st.integers(0, 99), st.integers(0, 2))
def test_a_row_does_not_depend_on_its_neighbours(many, seed, padding):
    logits = torch.randn(len(many), 30, generator=torch.Generator().manual_seed(seed))
    together = sample(logits, many, padding=padding)
    alone = [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(many)]
    assert together == alone


@given(mixed, st.integers(0, 99))
def test_a_greedy_row_among_sampled_ones_takes_its_likeliest_token(many, seed):
    """Ties included, which few distinct logits have: the first of them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (len(many) + 1, 30), generator=generator).float()
    got = sample(logits, [Sampling(1.0), *many])
    for row, sampling in enumerate(many, start=1):
        if sampling.greedy:
            assert got[row] == logits[row].argmax().item()


@given(samplings, st.integers(0, 99), st.integers(0, 5))
def test_each_token_of_a_request_takes_one_draw_of_its_generator(sampling, seed, first):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed))
    sampler, generator = Sampler.allocate(2, 9, logits.device), Random(sampling.seed)
    sampler.start(1, sampling, first, 3)
    for place in range(first, first + 3):
        at = torch.tensor([1]), torch.tensor([place])
        expected = draw_one(logits[0].tolist(), sampling, generator.random())
        assert sampler.choose(logits, *at, sampled=True).tolist() == [expected]


def test_a_slot_forgets_how_its_last_request_was_sampled():
    logits = torch.tensor([[0.0, 0.1, 0.2]])
    sampler, at = Sampler.allocate(1, 50, logits.device), torch.zeros(50, dtype=torch.int64)
    sampler.start(0, Sampling(5.0), 0, 50)
    wild = sampler.choose(logits.expand(50, -1), at, torch.arange(50), sampled=True)
    sampler.start(0, GREEDY, 0, 50)
    tame = sampler.choose(logits.expand(50, -1), at, torch.arange(50), sampled=True)
    assert len(wild.unique()) == 3
    assert tame.unique().tolist() == [2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(0.7, top_k=3, top_p=0.9)])
def test_a_row_with_nan_has_no_token_and_its_neighbours_have_theirs(sampling, bad):
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    expected = sample(logits, [sampling] * 3)
    logits[1, 17] = bad
    assert sample(logits, [sampling] * 3) == [expected[0], NO_TOKEN, expected[2]]
    logits[1] = bad
    assert sample(logits, [sampling] * 3) == [expected[0], NO_TOKEN, expected[2]]


def test_a_missing_token_can_be_embedded_and_is_refused_by_the_host():
    sampler, out = Sampler.allocate(2, 9, torch.device("cpu")), torch.empty(3, dtype=torch.int64)
    sampler.last[:] = torch.tensor([5, NO_TOKEN, 0])
    sampler.take(torch.tensor([0, 1, -1]), out=out)
    assert out.tolist() == [5, 0, 0]
    check_token(0, 1)
    with pytest.raises(LogitsError, match="generated token 7 are NaN or infinite") as refused:
        check_token(NO_TOKEN, 7)
    assert refused.value.exit_code == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_impossible_settings_are_refused(wrong, says):
    with pytest.raises(RequestError, match=says):
        Sampling(**wrong)
