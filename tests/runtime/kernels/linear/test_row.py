from __future__ import annotations

import pytest
import torch

from runtime.kernels.linear import row
from runtime.kernels.linear.row import (
    added_linear,
    norm_row_linear,
    norm_row_linear_reference,
    normed_and_linear,
    row_linear,
    row_linear_reference,
)
from runtime.kernels.linear.row_gated import row_gated, row_gated_reference
from runtime.kernels.norm.gated import scaled_reference
from runtime.kernels.norm.rms import rmsnorm_reference
from tests.runtime.kernels.linear.stored import STORED, distance, normal, unscaled, weight

# Sums of up to 2100 products in another order: sqrt(2100) * 2^-24.
FLOAT32 = 3e-6
EPS = 1e-6
# within two parts of the columns and over a block of rows; beyond both parts; a short third one
SHAPES = [(140, 70), (9, 2100), (3, 1030)]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """Leave the rows together that a GPU's multiprocessors would share."""
    monkeypatch.setattr(row, "_FEWEST_PROGRAMS", 4)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_is_multiplied_and_added_as_in_the_reference(n, k, stored, interpreter):
    x, w, residual = normal(1, k), weight(n, k, stored, seed=1), normal(1, n, seed=3)
    for r in (None, residual):
        assert distance(row_linear(x, w, r), row_linear_reference(x, w, r)) < FLOAT32


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_is_normed_within_the_product(n, k, stored, interpreter):
    """For one weight, and for two that need not be stored alike."""
    x, norm = normal(1, k) * 3, normal(k, seed=2) * 0.1
    weights = weight(n, k, stored, seed=1), weight(7, k, "plain", seed=5)
    for some in (weights[:1], weights):
        got = norm_row_linear(x, norm, EPS, *some)
        expected = norm_row_linear_reference(x, norm, EPS, *some)
        assert len(got) == len(some)
        for ours, theirs in zip(got, expected, strict=True):
            assert distance(ours, theirs) < FLOAT32


@pytest.mark.parametrize(
    ("rows", "n", "k", "stored"),
    [(2, 140, 70, "block"), (2, 9, 2100, "plain"), (2, 9, 70, "plain"), (2, 9, 70, "channel")],
)
def test_a_few_rows_are_what_each_of_them_is(rows, n, k, stored, interpreter):
    """Added, normed for two weights, normed and gated."""
    x, w, residual = normal(rows, k) * 3, weight(2 * n, k, stored, seed=1), normal(rows, 2 * n)
    norm, small = normal(k, seed=2) * 0.1, weight(7, k, "plain", seed=5)
    assert distance(row_linear(x, w, residual), row_linear_reference(x, w, residual)) < FLOAT32
    got, expected = (
        f(x, norm, EPS, w, small) for f in (norm_row_linear, norm_row_linear_reference)
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert distance(ours, theirs) < FLOAT32
    assert distance(row_gated(x, w, norm, EPS), row_gated_reference(x, w, norm, EPS)) < FLOAT32


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("heads", "d"), [(6, 24), (5, 8)])
def test_heads_of_a_few_rows_are_scaled_within_the_product(rows, heads, d, interpreter):
    """Within two parts of the columns, over their end."""
    x, w, residual = unscaled(rows, heads, d), weight(13, heads * d, "plain"), normal(rows, 13)
    expected = residual.double() + scaled_reference(x).double() @ w.double().T
    assert distance(added_linear(x, w, residual), expected) < FLOAT32


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("k", [70, 2100])
def test_the_normed_row_is_kept_for_others(k, apart, interpreter, thresholds):
    """Within two parts of the columns and beyond, by the first tile or a kernel of its own."""
    if apart:
        thresholds(WIDE_ROW=k, LARGE_WEIGHT=0)
    x, norm, w = normal(1, k) * 3, normal(k, seed=2) * 0.1, weight(9, k, "block", seed=1)
    normed, y = normed_and_linear(x, norm, EPS, w)
    assert distance(normed, rmsnorm_reference(x, norm, EPS)) < FLOAT32
    assert distance(y, norm_row_linear_reference(x, norm, EPS, w)[0]) < FLOAT32


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("f", "k"), [(9, 70), (8, 2100)])
def test_gate_and_up_meet_within_the_kernel(f, k, stored, interpreter):
    gate_and_up_are_near(f, k, stored)


def test_up_may_begin_within_a_block_of_scales(interpreter):
    """65 rows of each half: at a row that nothing divides."""
    gate_and_up_are_near(65, 70, "block")


def gate_and_up_are_near(f, k, stored):
    x, norm, gate_up = normal(1, k), normal(k, seed=2) * 0.1, weight(2 * f, k, stored, seed=1)
    for some in ((), (norm, EPS)):
        got, expected = row_gated(x, gate_up, *some), row_gated_reference(x, gate_up, *some)
        assert distance(got, expected) < FLOAT32


@pytest.mark.parametrize("stored", STORED)
def test_a_wide_row_is_normed_apart(stored, interpreter, thresholds):
    thresholds(WIDE_ROW=70, LARGE_WEIGHT=0, WIDEST_STRIP=69)
    two_normed_products_are_near(10, 70, stored, stored)
    x, norm, weights = normal(1, 70) * 3, normal(70, seed=2) * 0.1, weight(10, 70, stored, seed=1)
    gated = row_gated(x, weights, norm, EPS)
    assert distance(gated, row_gated_reference(x, weights, norm, EPS)) < FLOAT32


@pytest.mark.parametrize("second", STORED)
@pytest.mark.parametrize("stored", ["block", "channel"])
def test_a_row_is_normed_once_for_a_strip_of_rows(stored, second, interpreter, thresholds):
    """Strips over a block of scales and one that ends early; a second weight, or none."""
    thresholds(WIDE_ROW=70, LARGE_WEIGHT=0)
    two_normed_products_are_near(150, 190, stored, second)
    x, norm, w = normal(1, 70) * 3, normal(70, seed=2) * 0.1, weight(33, 70, stored, seed=1)
    (got,) = norm_row_linear(x, norm, EPS, w)
    assert distance(got, norm_row_linear_reference(x, norm, EPS, w)[0]) < FLOAT32


def two_normed_products_are_near(n, k, stored, second):
    x, norm = normal(1, k) * 3, normal(k, seed=2) * 0.1
    weights = weight(n, k, stored, seed=1), weight(7, k, second, seed=5)
    got = norm_row_linear(x, norm, EPS, *weights)
    expected = norm_row_linear_reference(x, norm, EPS, *weights)
    for ours, theirs in zip(got, expected, strict=True):
        assert distance(ours, theirs) < FLOAT32


def test_without_a_norm_the_row_is_taken_as_it_is(interpreter):
    x, w, norm = normal(1, 70) * 3, weight(45, 70, "plain"), torch.zeros(70)
    assert distance(norm_row_linear(x, norm, EPS, w)[0], row_linear(x, w)) > 0.5


def test_more_rows_than_two_are_refused(interpreter):
    with pytest.raises(AssertionError, match="for 2 rows or fewer"):
        row_linear(normal(3, 40), normal(8, 40))
