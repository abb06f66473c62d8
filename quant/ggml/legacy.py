"""The loops of ggml's blocks of one scale: Q8_0 Q4_0 Q4_1 Q5_0 Q5_1.

A row is cut into blocks of 32 columns; a block stores a float16 scale d, in *_1 also a float16
minimum m, and one code q per column:

    Q8_0         d = amax / 127               w ~ q d             q in -127..127
    Q4_0, Q5_0   d = w of amax / -8, / -16    w ~ (q - 8) d       the other end clips
    Q4_1, Q5_1   d = (max - min) / 15, / 31   w ~ q d + m

Bytes are those of ggml's reference loops in C (`quantize_row_*_ref`), which llama-quantize runs:
the same operations in the same order, each rounded to float32. Its traits that show: codes are
taken with the scale before it is rounded to float16; halves go up (Q8_0: away from zero); a block
of zeros has the scale -0 in Q4_0 and Q5_0; a scale so small that 1 / d overflows has codes 0. With
an importance matrix these types are searched: `weighted`.

The first half of a block's columns are the low nibbles, the second half the high ones; Q5's fifth
bits follow the scale as one little-endian word.

Arrays hold bits: a weight is uint16 (bfloat16) or uint32 (float32), [B, 32]; stored blocks are
uint8 [B, bytes]. Encoders return False if a weight is not finite, or a scale is
beyond float16; in a loop b is a block, j a column.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.stored_scales import load_half, load_word, store_finite_half
from quant.numba_ops import as_bits, as_float, inline, loop

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, f32 = np.int8, np.int16, np.int32, np.float32

BLOCK = u64(32)
HALF = u64(16)
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
        inverse = _inverse(d)
        for j in range(BLOCK):
            x = f32(as_float(w[b, j]) * inverse)
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
        inverse, offset = _inverse_and_offset(d, f32(8.5))
        for j in range(HALF):
            low = _code(as_float(w[b, j]), f32(0), inverse, offset, i32(15))
            high = _code(as_float(w[b, u64(j + HALF)]), f32(0), inverse, offset, i32(15))
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
def encode_q4_1(w, out):
    """Fill out [B, 20]: d, m, 16 pairs of codes."""
    for b in range(u64(w.shape[0])):
        least, most = _range(w, b)
        d = f32(f32(most - least) / f32(15))
        if not (store_finite_half(out, b, u64(0), d) and store_finite_half(out, b, u64(2), least)):
            return False
        inverse = _inverse(d)
        for j in range(HALF):
            low = _code(as_float(w[b, j]), least, inverse, f32(0.5), i32(15))
            high = _code(as_float(w[b, u64(j + HALF)]), least, inverse, f32(0.5), i32(15))
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
def encode_q5_0(w, out):
    """Fill out [B, 22]: d, fifth bits, 16 pairs of codes."""
    codes = np.empty(BLOCK, np.int32)
    for b in range(u64(w.shape[0])):
        d = f32(_signed_amax(w, b) / f32(-16))
        if not store_finite_half(out, b, u64(0), d):
            return False
        inverse, offset = _inverse_and_offset(d, f32(16.5))
        for j in range(BLOCK):
            codes[j] = _code(as_float(w[b, j]), f32(0), inverse, offset, i32(31))
        store_five_bits(codes, out, b, u64(2))
    return True


@loop
def decode_q5_0(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 22]."""
    for b in range(u64(data.shape[0])):
        d, fifth = load_half(data, b, u64(0)), load_word(data, b, u64(2))
        for j in range(HALF):
            low, high = _load_five_bits(data[b, u64(j + u64(6))], fifth, j)
            out[b, j] = f32(f32(i32(low - i32(16))) * d)
            out[b, u64(j + HALF)] = f32(f32(i32(high - i32(16))) * d)


@loop
def encode_q5_1(w, out):
    """Fill out [B, 24]: d, m, fifth bits, 16 pairs of codes."""
    codes = np.empty(BLOCK, np.int32)
    for b in range(u64(w.shape[0])):
        least, most = _range(w, b)
        d = f32(f32(most - least) / f32(31))
        if not (store_finite_half(out, b, u64(0), d) and store_finite_half(out, b, u64(2), least)):
            return False
        inverse = _inverse(d)
        for j in range(BLOCK):
            codes[j] = _code(as_float(w[b, j]), least, inverse, f32(0.5), i32(31))
        store_five_bits(codes, out, b, u64(4))
    return True


@loop
def decode_q5_1(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 24]."""
    for b in range(u64(data.shape[0])):
        d, m = load_half(data, b, u64(0)), load_half(data, b, u64(2))
        fifth = load_word(data, b, u64(4))
        for j in range(HALF):
            low, high = _load_five_bits(data[b, u64(j + u64(8))], fifth, j)
            out[b, j] = f32(f32(f32(low) * d) + m)
            out[b, u64(j + HALF)] = f32(f32(f32(high) * d) + m)


@inline
def top_magnitude(w, b):
    """Return max |w| of a block in bits: as integers they order as numbers do, NaN above all."""
    uint = w.dtype.type
    magnitude, top = uint(uint(~uint(0)) >> uint(1)), uint(0)
    for j in range(BLOCK):
        top = max(top, uint(w[b, j] & magnitude))
    return top


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


@inline
def _inverse(d):
    """Return 1 / d, and 0 for a scale whose codes are all 0."""
    inverse = f32(f32(1) / d)
    return inverse if abs(inverse) < f32(np.inf) else f32(0)


@inline
def _inverse_and_offset(d, offset):
    """Return 1 / d and what a code is rounded with; codes are 0 where only 1 / d overflows."""
    overflows = d != f32(0) and not abs(f32(f32(1) / d)) < f32(np.inf)
    return _inverse(d), (f32(0) if overflows else offset)


@inline
def _code(x, least, inverse, offset, top):
    """Return (x - least) / d + offset without its fraction, at most `top`."""
    return min(i32(f32(f32(f32(x - least) * inverse) + offset)), top)


@inline
def _with_sign(x, of):
    """Return x >= 0 with the sign of the other."""
    return as_float(u32(as_bits(x) | u32(as_bits(of) & u32(0x80000000))))


@inline
def store_five_bits(codes, out, b, at):
    """Write the fifth bits of 32 codes, then their nibbles in pairs."""
    fifth = u32(0)
    for j in range(BLOCK):
        fifth = u32(fifth | u32(u32(u32(codes[j]) >> u32(4)) << u32(j)))
    for i in range(u64(4)):
        out[b, u64(at + i)] = u8(fifth >> u32(u64(8) * i))
    for j in range(HALF):
        high = i32(codes[u64(j + HALF)] << i32(4))
        out[b, u64(u64(at + u64(4)) + j)] = u8(i32(codes[j] & i32(15)) | i32(high & i32(0xF0)))


@inline
def _load_five_bits(pair, fifth, j):
    """Return the codes of columns j and j + 16."""
    low = u32(u32(u32(fifth >> u32(j)) & u32(1)) << u32(4))
    high = u32(u32(u32(fifth >> u32(j + HALF)) & u32(1)) << u32(4))
    return i32(u32(pair & u8(15)) | low), i32(u32(pair >> u8(4)) | high)
