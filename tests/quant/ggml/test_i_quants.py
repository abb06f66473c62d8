"""The I-quants' compiled loops against ggml's own C, to the byte, and decoders against `gguf`'s."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.ggml import i_grids, i_quants
from quant.ggml.kinds import I_QUANTS, WEIGHTED_ONLY
from tests.quant.ggml.test_k_quants import (
    KINDS,
    bfloat16,
    by_ggml,
    importance,
    normal,
    row_bytes,
    sparse,
    widened,
)

# One worker: ggml fills its tables of IQ2 at their first use, for 13 seconds of a process.
pytestmark = pytest.mark.xdist_group("ggml")
NAMES = tuple(I_QUANTS)


def encoded(name, w, weights=None):
    out = np.full((w.shape[0], row_bytes(name, w.shape[1])), 0xA5, np.uint8)
    i_quants.encode_rows(name, w, weights, out)
    return out


def values(name, data, k):
    out = np.full((data.shape[0], k), np.nan, np.float32)
    i_quants.decode_rows(name, data, out)
    return out


def blank(w):
    """Return which super-blocks have 32 zeros side by side: ggml misplaces what follows them."""
    return (w.reshape(-1, 8, 32) == 0).all(2).any(1)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 9),
    k=st.sampled_from([256, 512, 768]),
    seed=st.integers(0, 2**16),
    weighted=st.booleans(),
    halves=st.booleans(),
)
def test_bytes_are_those_of_ggml(name, kind, n, k, seed, weighted, halves):
    draw = np.random.default_rng(seed)
    w = kind(n, k, draw).astype(np.float32)
    weights = importance(k, draw) if weighted or name in WEIGHTED_ONLY else None
    bits = bfloat16(w)
    w = widened(bits) if halves else w
    size = row_bytes(name, 256)
    found = encoded(name, bits if halves else w, weights).reshape(-1, size)
    expected = by_ggml(name, w, weights).reshape(-1, size)
    same = ~blank(w) if name == "IQ3_S" else slice(None)
    assert np.array_equal(found[same], expected[same])


@pytest.mark.parametrize("name", NAMES)
def test_more_super_blocks_than_are_in_hand_at_a_time(name):
    """Rows of 20 super-blocks, so that 128 of them end inside a row."""
    draw = np.random.default_rng(1)
    w, weights = normal(13, 5120, draw).astype(np.float32), importance(5120, draw)
    assert np.array_equal(encoded(name, w, weights), by_ggml(name, w, weights))


@pytest.mark.parametrize("name", sorted(WEIGHTED_ONLY))
def test_without_an_importance_columns_weigh_alike(name):
    w = normal(3, 512, np.random.default_rng(2)).astype(np.float32)
    assert np.array_equal(encoded(name, w), encoded(name, w, np.ones(512, np.float32)))


def test_what_follows_zeros_is_where_it_is_read():
    """IQ3_S of ggml puts it 32 columns too far to the front."""
    draw = np.random.default_rng(3)
    w = normal(9, 256, draw).astype(np.float32)
    w[:, 32:64] = 0
    ours, theirs = (
        np.square(values("IQ3_S", encode("IQ3_S", w), 256) - w).sum(1)
        for encode in (encoded, by_ggml)
    )
    energy = np.square(w).sum(1)
    assert (ours < 0.05 * energy).all()
    assert (theirs > energy).all()
    w = sparse(9, 768, draw).astype(np.float32)
    ours = np.square(values("IQ3_S", encoded("IQ3_S", w), 768) - w).sum(1)
    assert (ours < np.square(w).sum(1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_gguf_package(name):
    """Of any bytes, but scales that are finite."""
    draw = np.random.default_rng(4)
    data = draw.integers(0, 256, (5, 3 * row_bytes(name, 256)), np.uint8)
    data.reshape(15, -1)[:, 1] &= 0xBF
    assert np.array_equal(values(name, data, 768), dequantize(data, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_no_bytes(name):
    none = np.empty((0, 512), np.float32)
    assert encoded(name, none).size == 0
    assert values(name, np.empty((0, row_bytes(name, 512)), np.uint8), 512).size == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_neighbour_is_among_those_that_are_looked_at(name):
    """Every place is a point of the grid, or has the nearest points of it first."""
    grid = i_grids.neighbours(name)
    levels = i_grids.levels(name)
    columns, base = levels.shape[1], len(np.unique(levels))
    bits = 16 // columns if columns == 4 else 3
    assert (grid.number >= 0).sum() == len(levels)
    for place in range(0, len(grid.number), 97):
        rows = grid.words[grid.first[place] : grid.first[place + 1]].reshape(-1)
        assert (grid.number[place] >= 0) == (rows.size == 0)
        codes = place // base ** np.arange(columns) % base
        found = (rows[:, None] >> bits * np.arange(columns) & (2**bits - 1)) // 2
        far = np.square(found - codes).sum(1)
        assert all(far[:1] == far.min(initial=99))
