"""The loops of ggml's blocks of one scale, around zero: Q8_0 Q4_0 Q5_0.

A row is cut into blocks of 32 columns; a block stores a float16 scale d and one code q per column:

    Q8_0         d = amax / 127               w ~ q d             q in -127..127
    Q4_0, Q5_0   d = w of amax / -8, / -16    w ~ (q - 8) d       the other end clips

Bytes are those of ggml's reference loops in C (`quantize_row_*_ref`), which llama-quantize runs:
the same operations in the same order, each rounded to float32. Its traits that show: codes are
taken with the scale before it is rounded to float16; halves go up (Q8_0: away from zero); a block
of zeros has the scale -0 in Q4_0 and Q5_0; a scale so small that 1 / d overflows has codes 0. With
an importance matrix Q4_0 and Q5_0 are searched: `weighted`.

Arrays hold bits: a weight is uint16 (bfloat16) or uint32 (float32), [B, 32]; stored blocks are
uint8 [B, bytes], see `legacy_codes`. Encoders return False if a weight is not finite, or a scale is
beyond float16; in a loop b is a block, j a column.
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
    top_magnitude,
)
from quant.ggml.stored_scales import load_half, load_word, store_finite_half
from quant.numba_ops import as_bits, as_float, inline, loop

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i8, i32, f32 = np.int8, np.int32, np.float32

# The largest float32 below one half: adding one half itself would round 0.49999997 up.
BELOW_HALF = f32(0.49999997)


@loop
def encode_q8_0(w, out):
    """Fill out [B, 34]: d, 32 codes."""
    for b in range(u64(w.shape[0])):
        amax = _amax(w, b)
        d = f32(amax / f32(127))
        if not store_finite_half(out, b, u64(0), d):
            return False
        slope = inverse(d)
        for j in range(BLOCK):
            x = f32(as_float(w[b, j]) * slope)
            out[b, u64(j + u64(2))] = u8(i32(f32(x + _with_sign(BELOW_HALF, x))))
    return True


@loop
def decode_q8_0(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 34]."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        for j in range(BLOCK):
            out[b, j] = f32(f32(i8(data[b, u64(j + u64(2))])) * d)


@loop
def encode_q4_0(w, out):
    """Fill out [B, 18]: d, 16 pairs of codes."""
    for b in range(u64(w.shape[0])):
        d = f32(_signed_amax(w, b) / f32(-8))
        if not store_finite_half(out, b, u64(0), d):
            return False
        slope, offset = _inverse_and_offset(d, f32(8.5))
        for j in range(HALF):
            low = code(as_float(w[b, j]), f32(0), slope, offset, i32(15))
            high = code(as_float(w[b, u64(j + HALF)]), f32(0), slope, offset, i32(15))
            out[b, u64(j + u64(2))] = u8(low | i32(high << i32(4)))
    return True


@loop
def decode_q4_0(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 18]."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        for j in range(HALF):
            pair = data[b, u64(j + u64(2))]
            out[b, j] = f32(f32(i32(i32(pair & u8(15)) - i32(8))) * d)
            out[b, u64(j + HALF)] = f32(f32(i32(i32(pair >> u8(4)) - i32(8))) * d)


@loop
def encode_q5_0(w, out):
    """Fill out [B, 22]: d, fifth bits, 16 pairs of codes."""
    codes = np.empty(BLOCK, np.int32)
    for b in range(u64(w.shape[0])):
        d = f32(_signed_amax(w, b) / f32(-16))
        if not store_finite_half(out, b, u64(0), d):
            return False
        slope, offset = _inverse_and_offset(d, f32(16.5))
        for j in range(BLOCK):
            codes[j] = code(as_float(w[b, j]), f32(0), slope, offset, i32(31))
        store_five_bits(codes, out, b, u64(2))
    return True


@loop
def decode_q5_0(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 22]."""
    for b in range(u64(data.shape[0])):
        d, fifth = load_half(data, b, u64(0)), load_word(data, b, u64(2))
        for j in range(HALF):
            low, high = load_five_bits(data[b, u64(j + u64(6))], fifth, j)
            out[b, j] = f32(f32(i32(low - i32(16))) * d)
            out[b, u64(j + HALF)] = f32(f32(i32(high - i32(16))) * d)


@inline
def _amax(w, b):
    """Return max |w| of a block."""
    return as_float(top_magnitude(w, b))


@inline
def _signed_amax(w, b):
    """Return the first weight whose magnitude is the block's largest; 0 if all are zeros."""
    uint = w.dtype.type
    sign = uint(uint(1) << uint(w.itemsize * 8 - 1))
    # Bits with the sign flipped put positive numbers on top, plain ones put negative numbers there.
    positive, negative = uint(0), uint(0)
    for j in range(BLOCK):
        positive = max(positive, uint(w[b, j] ^ sign))
        negative = max(negative, w[b, j])
    positive = uint(positive ^ sign) if positive >= sign else uint(0)
    negative = uint(negative ^ sign) if negative >= sign else uint(0)
    if positive == negative and positive > uint(0):
        for j in range(BLOCK):
            if uint(w[b, j] | sign) == uint(positive | sign):
                return as_float(w[b, j])
    return as_float(positive if positive >= negative else uint(negative | sign))


@inline
def _inverse_and_offset(d, offset):
    """Return 1 / d and what a code is rounded with; codes are 0 where only 1 / d overflows."""
    overflows = d != f32(0) and not abs(f32(f32(1) / d)) < f32(np.inf)
    return inverse(d), (f32(0) if overflows else offset)


@inline
def _with_sign(x, of):
    """Return x >= 0 with the sign of the other."""
    return as_float(u32(as_bits(x) | u32(as_bits(of) & u32(0x80000000))))
