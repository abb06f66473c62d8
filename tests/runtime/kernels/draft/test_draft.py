from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.kernels.draft.inputs import draft_inputs, draft_inputs_reference, draft_linear
from runtime.kernels.draft.settle import Places, Turns, settle, settle_reference
from runtime.kernels.draft.token import draft_token, draft_token_reference
from tests.runtime.kernels.linear.stored import STORED, normal, weight

# A sum of H squares in any order, one rsqrt and three products: a few units of 2^-24.
FLOAT32 = 1e-6
in_the_interpreter = settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("hidden", "outputs"), [(37, 5), (64, 257)])
def test_a_few_rows_are_normed_within_the_first_product(tokens, hidden, outputs, interpreter):
    ids, fc = torch.tensor([5, 0, 10])[:tokens], normal(outputs, 2 * hidden, seed=4)
    norms = normal(hidden, seed=1), normal(hidden, seed=3)
    args = normal(11, hidden), norms[0], normal(tokens, hidden, seed=2), norms[1], 1e-6
    for last in range(tokens):
        row = None if tokens == 1 else torch.tensor([last])
        got, alone = draft_linear(ids, *args, fc, row)
        expected = draft_inputs_reference(ids, *args) @ fc.T
        # sums of up to 128 products more
        assert (got - expected).abs().max() < 3 * FLOAT32 * expected.abs().max()
        assert torch.equal(alone, got[last : last + 1])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("size", "hidden"), [(140, 70), (9, 1030), (9, 2100)])
def test_the_kernels_find_the_token_and_norm_the_row(size, hidden, stored, interpreter):
    x, norm, head = normal(1, hidden) * 3, normal(hidden, seed=2), weight(size, hidden, stored)
    results, tokens = [], torch.zeros(2, 1, dtype=torch.int64)
    for function, token in zip((draft_token, draft_token_reference), tokens, strict=True):
        results.append(function(x, norm, 1e-6, head, token))
    got, expected = results
    assert (got - expected).abs().max() < FLOAT32 * expected.abs().max()
    assert torch.equal(*tokens)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_kernel_makes_the_inputs_of_the_reference(tokens, interpreter):
    ids = torch.tensor([5, 0, 10])[:tokens]
    args = normal(11, 37), normal(37, seed=1), normal(tokens, 37, seed=2), normal(37, seed=3), 1e-6
    got, expected = draft_inputs(ids, *args), draft_inputs_reference(ids, *args)
    assert (got - expected).abs().max() < FLOAT32 * expected.abs().max()


def places(ids, first, each):
    positions = torch.tensor([at + i for at in first for i in range(each)])
    return Places(torch.tensor(ids), positions, positions + 1)


def turns(rows):
    return Turns(*torch.zeros(2, rows, 3), torch.tensor([1.0, 0.1, 0.01]), 1.5)


cases = st.integers(1, 3).flatmap(
    lambda sequences: st.integers(2, 5).flatmap(
        lambda each: st.tuples(
            st.just(sequences),
            st.just(each),
            *[
                st.lists(st.integers(low, 1), min_size=n, max_size=n)
                for low, n in ((0, sequences * each), (-2, sequences * each))
            ],
        )
    )
)


@in_the_interpreter
@given(case=cases)
def test_the_kernel_settles_what_the_reference_does(case, interpreter):
    """Tokens 0 and 1, so that drafts are often right; a row may have no token."""
    sequences, each, ids, tokens = case
    results = []
    for function in (settle, settle_reference):
        rows, after = (
            places(ids, range(7, 7 + 9 * sequences, 9), each),
            places(ids, [0] * sequences, each),
        )
        states, sources = (
            torch.arange(sequences * each) * 3,
            torch.arange(sequences) * 3 + 1,
        )
        angles = turns(len(ids))
        returned = function(torch.tensor(tokens), rows, states, sources, after, angles)
        first = rows.ids.view(sequences, each)[:, 0]
        results.append([*returned, first, *rows[1:], states, sources, *after, *angles[:2]])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        assert (got - expected).abs().max() <= FLOAT32 * got.is_floating_point()


def test_drafts_count_up_to_the_first_wrong_one():
    """Two sequences: one draft of three right, although the third is too; all of them."""
    rows, after = places([9, 5, 4, 3, 9, 6, 7, 8], [20, 30], 4), places([0] * 8, [0, 0], 4)
    sources, tokens = torch.tensor([8, 9]), torch.tensor([5, 2, 3, 1, 6, 7, 8, -2])
    states = torch.arange(8)
    angles = turns(8)
    new, last = settle(tokens, rows, states, sources, after, angles)
    assert new.tolist() == [5, 2, -1, -1, 6, 7, 8, -2]
    assert last.tolist() == [1, 7]
    assert sources.tolist() == [1, 7]
    assert states.tolist() == [0, 8, 2, 3, 4, 5, 6, 9]
    assert rows.ids[[0, 4]].tolist() == [2, 0]
    assert rows.positions.tolist() == [22, 23, 24, 25, 34, 35, 36, 37]
    assert rows.lengths.tolist() == [23, 24, 25, 26, 35, 36, 37, 38]
    assert after.ids.tolist() == [5, 2, 3, 1, 6, 7, 8, 0]
    assert after.positions.tolist() == [20, 21, 22, 23, 30, 31, 32, 33]
    assert after.lengths.tolist() == [21, 22, 23, 24, 31, 32, 33, 34]
    angle = rows.positions[:, None] * angles.frequency_r
    assert torch.equal(angles.cos, angle.cos() * 1.5)
    assert torch.equal(angles.sin, angle.sin() * 1.5)
