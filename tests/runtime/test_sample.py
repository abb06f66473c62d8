from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.sample import GREEDY, RequestError, Sampling, draw, sample

rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 99),
)


def draw_one(logits, sampling, number):
    return draw(torch.tensor([logits]), [sampling], [number]).item()


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
    assert sample(torch.tensor([logits]), [GREEDY], [Random(0)]) == [best]


def test_draws_have_the_probabilities_of_the_softmax():
    """4000 draws: each frequency is within 5 standard deviations of its probability."""
    logits, count = torch.tensor([1.0, 0.0, 2.0, -1.0]), 4000
    sampling = Sampling(temperature=1.5, seed=5)
    generator = sampling.generator()
    drawn = torch.tensor(
        [t for _ in range(count) for t in sample(logits[None], [sampling], [generator])]
    )
    p = (logits / 1.5).softmax(0)
    frequency = drawn.bincount(minlength=4) / count
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / count).sqrt()).all()


@given(st.lists(samplings, min_size=1, max_size=6), st.integers(0, 99))
def test_a_row_does_not_depend_on_its_neighbours(many, seed):
    logits = torch.randn(len(many), 30, generator=torch.Generator().manual_seed(seed))
    together = sample(logits, many, [one.generator() for one in many])
    alone = [sample(logits[i : i + 1], [one], [one.generator()])[0] for i, one in enumerate(many)]
    assert together == alone


def test_greedy_rows_take_no_draw():
    generators = [Random(1), Random(1)]
    sample(torch.randn(2, 9), [GREEDY, Sampling(1.0)], generators)
    assert generators[0].random() == Random(1).random()
    assert generators[1].random() != Random(1).random()


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
