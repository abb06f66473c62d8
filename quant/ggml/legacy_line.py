"""The loops of ggml's blocks of a scale and a minimum: Q4_1 Q5_1.

    d = (max - min) / 15, / 31    m = min    w ~ q d + m

Arrays, bytes and traits: see `legacy_symmetric`. A block stores d, m, both float16, then its codes.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.legacy_codes import (
    BLOCK,
    HALF,
    code,
    inverse,
    load_five_bits,
    store_five_bits,
)
from quant.ggml.stored_scales import load_half, load_word, store_finite_half
from quant.numba_ops import as_float, inline, loop

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i16, i32, f32 = np.int16, np.int32, np.float32


@loop
def encode_q4_1(w, out):
    """Fill out [B, 20]: d, m, 16 pairs of codes."""
    for b in range(u64(w.shape[0])):
        least, most = _range(w, b)
        d = f32(f32(most - least) / f32(15))
        if not (store_finite_half(out, b, u64(0), d) and store_finite_half(out, b, u64(2), least)):
            return False
        slope = inverse(d)
        for j in range(HALF):
            low = code(as_float(w[b, j]), least, slope, f32(0.5), i32(15))
            high = code(as_float(w[b, u64(j + HALF)]), least, slope, f32(0.5), i32(15))
            out[b, u64(j + u64(4))] = u8(low | i32(high << i32(4)))
    return True


@loop
def decode_q4_1(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 20]."""
    for b in range(u64(data.shape[0])):
        d, m = load_half(data, b, u64(0)), load_half(data, b, u64(2))
        for j in range(HALF):
            pair = data[b, u64(j + u64(4))]
            out[b, j] = f32(f32(f32(i32(pair & u8(15))) * d) + m)
            out[b, u64(j + HALF)] = f32(f32(f32(i32(pair >> u8(4))) * d) + m)


@loop
def encode_q5_1(w, out):
    """Fill out [B, 24]: d, m, fifth bits, 16 pairs of codes."""
    codes = np.empty(BLOCK, np.int32)
    for b in range(u64(w.shape[0])):
        least, most = _range(w, b)
        d = f32(f32(most - least) / f32(31))
        if not (store_finite_half(out, b, u64(0), d) and store_finite_half(out, b, u64(2), least)):
            return False
        slope = inverse(d)
        for j in range(BLOCK):
            codes[j] = code(as_float(w[b, j]), least, slope, f32(0.5), i32(31))
        store_five_bits(codes, out, b, u64(4))
    return True


@loop
def decode_q5_1(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 24]."""
    for b in range(u64(data.shape[0])):
        d, m = load_half(data, b, u64(0)), load_half(data, b, u64(2))
        fifth = load_word(data, b, u64(4))
        for j in range(HALF):
            low, high = load_five_bits(data[b, u64(j + u64(8))], fifth, j)
            out[b, j] = f32(f32(f32(low) * d) + m)
            out[b, u64(j + HALF)] = f32(f32(f32(high) * d) + m)


@inline
def _range(w, b):
    """Return the least and the largest weight of a block, the first of zeros; or NaN for both."""
    # With the magnitude of negative numbers flipped, bits order as numbers do, -0 below 0.
    low, high = _ordered(w, b, u64(0)), _ordered(w, b, u64(0))
    for j in range(BLOCK):
        key = _ordered(w, b, j)
        low, high = min(low, key), max(high, key)
    least, most = _from_ordered(w, low), _from_ordered(w, high)
    if not (abs(least) < f32(np.inf) and abs(most) < f32(np.inf)):
        return f32(np.nan), f32(np.nan)
    if least == f32(0):
        for j in range(BLOCK):
            if as_float(w[b, j]) == f32(0):
                return as_float(w[b, j]), most
    return least, most


@inline
def _ordered(w, b, j):
    """Return a weight's bits as a signed integer that orders as the numbers do."""
    if w.itemsize == 2:
        return i16(i16(w[b, j]) ^ i16(i16(i16(w[b, j]) >> i16(15)) & i16(0x7FFF)))
    return i32(i32(w[b, j]) ^ i32(i32(i32(w[b, j]) >> i32(31)) & i32(0x7FFFFFFF)))


@inline
def _from_ordered(w, key):
    """Return the weight of such an integer."""
    if w.itemsize == 2:
        return as_float(u16(i16(key ^ i16(i16(key >> i16(15)) & i16(0x7FFF)))))
    return as_float(u32(i32(key ^ i32(i32(key >> i32(31)) & i32(0x7FFFFFFF)))))
