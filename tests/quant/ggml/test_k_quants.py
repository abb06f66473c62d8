"""The K-quants' compiled loops against ggml's own C, to the byte, and decoders against `gguf`'s."""

import gguf
import libgguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.ggml.k_quants import decode_rows, encode_rows

NAMES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def normal(n, k, draw):
    return draw.standard_normal((n, k)) * 0.02


def heavy_tailed(n, k, draw):
    return draw.standard_t(2, (n, k)) * 0.02


def one_outlier(n, k, draw):
    w = normal(n, k, draw)
    w[:, draw.integers(k)] *= 1000
    return w


def zeros(n, k, draw):
    return normal(n, k, draw) * 0


def constant(n, k, draw):
    """Of both signs: a line through positive weights starts at 0, else at the smallest."""
    return np.full((n, k), 0.37 * (-1) ** draw.integers(2))


def sparse(n, k, draw):
    return normal(n, k, draw) * (draw.random((n, k)) < 0.05)


def one_sided(n, k, draw):
    return np.abs(normal(n, k, draw)) * (-1) ** draw.integers(2)


def far_from_zero(n, k, draw):
    return normal(n, k, draw) + (-1) ** draw.integers(2)


def nearly_constant(n, k, draw):
    return np.where(draw.random((n, k)) < 0.03, normal(n, k, draw), -0.5)


def integers(n, k, draw):
    """Ties everywhere."""
    return draw.integers(-8, 9, (n, k))


def tiny(n, k, draw):
    """From float16's smallest scales to float32's subnormal numbers, where 1 / s overflows."""
    return normal(n, k, draw) * 2.0 ** -draw.integers(0, 140, (n, 1))


def uneven_blocks(n, k, draw):
    """Blocks whose scales round to zero beside others: their codes are those of the search."""
    return normal(n, k, draw) * np.repeat(2.0 ** draw.integers(-40, 9, (n, k // 16)), 16, 1)


KINDS = (
    normal,
    heavy_tailed,
    one_outlier,
    zeros,
    constant,
    sparse,
    one_sided,
    far_from_zero,
    nearly_constant,
    integers,
    tiny,
    uneven_blocks,
)


def importance(k, draw):
    """Mean squares that differ by orders of magnitude, some of them zero."""
    values = draw.standard_normal(k) ** 2 * 2.0 ** (3 * draw.standard_normal(k))
    return np.where(draw.random(k) < 0.1, 0, values).astype(np.float32)


def bfloat16(w):
    """Return the upper halves of float32's bits."""
    return (w.view(np.uint32) >> 16).astype(np.uint16)


def widened(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def row_bytes(name, k):
    columns, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return k // columns * size


def encoded(name, w, weights=None):
    out = np.full((w.shape[0], row_bytes(name, w.shape[1])), 0xA5, np.uint8)
    encode_rows(name, w, weights, out)
    return out


def by_ggml(name, w, weights=None):
    return libgguf.quantize_rows(w, GGMLQuantizationType[name].value, imatrix=weights)


@settings(max_examples=120)
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
    weights = importance(k, draw) if weighted else None
    bits = bfloat16(w)
    expected = by_ggml(name, widened(bits) if halves else w, weights)
    assert np.array_equal(encoded(name, bits if halves else w, weights), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_more_super_blocks_than_are_in_hand_at_a_time(name, weighted):
    """Rows of 20 super-blocks, so that 128 of them end inside a row."""
    draw = np.random.default_rng(1)
    w = normal(13, 5120, draw).astype(np.float32)
    weights = importance(5120, draw) if weighted else None
    assert np.array_equal(encoded(name, w, weights), by_ggml(name, w, weights))


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K"])
def test_fits_of_one_scale_too_small_to_invert(name):
    """Two values 2^-24 apart: a fit may start at the largest weight, and slopes become infinite."""
    draw = np.random.default_rng(2)
    w = draw.choice(np.float32([-1, -0.9999999, 1e-7, 0]), (64, 512))
    assert np.array_equal(encoded(name, w), by_ggml(name, w))


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_gguf_package(name):
    """Of any bytes, but scales that are finite."""
    draw = np.random.default_rng(3)
    data = draw.integers(0, 256, (5, 3 * row_bytes(name, 256)), np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0, 2))
    for at in scales:
        data.reshape(15, -1)[:, at + 1] &= 0xBF
    out = np.full((5, 768), np.nan, np.float32)
    decode_rows(name, data, out)
    assert np.array_equal(out, dequantize(data, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_no_bytes(name):
    none = np.empty((0, 512), np.float32)
    assert encoded(name, none).size == 0
    decode_rows(name, np.empty((0, row_bytes(name, 512)), np.uint8), none)


def test_rows_that_are_no_super_blocks_are_refused():
    with pytest.raises(AssertionError, match="rows of 288"):
        encode_rows("Q4_K", np.zeros((2, 288), np.float32), None, np.empty((2, 162), np.uint8))
