"""The loops that decode Q2_K to Q6_K, and bfloat16; `k_store` has the layouts.

    Q2_K, Q4_K, Q5_K   w = (d l) q - (e m)
    Q3_K, Q6_K         w = (d l) q

Each operation is rounded to float32, in this order, as in ggml's C (`dequantize_row_q*_K`).

Arrays: data uint8 [B, bytes], out float32 [B, 256]. In loops b is a super-block, s a block of 16 or
32 columns, j a column.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.stored_scales import load_half, load_six_bits
from quant.numba_ops import as_float, inline, loop

u8, u16, u64, i8, i32, f32 = np.uint8, np.uint16, np.uint64, np.int8, np.int32, np.float32

SIXTEEN, THIRTY_TWO = u64(16), u64(32)


@loop
def widen(bits, out):
    """Fill in the first rows of out with bits [B, 256] of bfloat16 (uint16) or float32 (uint32)."""
    for b in range(u64(bits.shape[0])):
        for j in range(u64(bits.shape[1])):
            out[b, j] = as_float(bits[b, j])


@loop
def decode_q2_k(data, out):
    """Fill in rows of 84 bytes."""
    for b in range(u64(data.shape[0])):
        d, e = load_half(data, b, u64(80)), load_half(data, b, u64(82))
        for s in range(SIXTEEN):
            pair = data[b, s]
            step, offset = f32(d * f32(pair & u8(15))), f32(e * f32(pair >> u8(4)))
            at, shift = _low_bits(u64(16), s)
            first = s * SIXTEEN
            for j in range(SIXTEEN):
                q = u8(u8(data[b, at + j] >> shift) & u8(3))
                out[b, first + j] = f32(f32(step * f32(q)) - offset)


@loop
def decode_q3_k(data, out):
    """Fill in rows of 110 bytes."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(108))
        for s in range(SIXTEEN):
            low = u8(data[b, u64(96) + s % u64(8)] >> u8(u64(4) * (s // u64(8))))
            high = u8(data[b, u64(104) + s % u64(4)] >> u8(u64(2) * (s // u64(4))))
            level = i32(u8(low & u8(15)) | u8(u8(high & u8(3)) << u8(4)))
            step = f32(d * f32(i32(level - i32(32))))
            at, shift = _low_bits(THIRTY_TWO, s)
            first, third, which = s * SIXTEEN, (s % u64(2)) * SIXTEEN, u8(s // u64(2))
            for j in range(SIXTEEN):
                q = i32(u8(u8(data[b, at + j] >> shift) & u8(3)))
                bit = i32(u8(u8(data[b, third + j] >> which) & u8(1)))
                out[b, first + j] = f32(step * f32(i32(i32(q + i32(bit << i32(2))) - i32(4))))


@loop
def decode_q4_k(data, out):
    """Fill in rows of 144 bytes, or of 176, Q5_K."""
    five = data.shape[1] == 176
    for b in range(u64(data.shape[0])):
        d, e = load_half(data, b, u64(0)), load_half(data, b, u64(2))
        for s in range(u64(8)):
            level, minimum = load_six_bits(data, b, s)
            step, offset = f32(d * f32(level)), f32(e * f32(minimum))
            first, shift = s * THIRTY_TWO, u8(u64(4) * (s % u64(2)))
            at = u64(16) + (s // u64(2)) * THIRTY_TWO
            for j in range(THIRTY_TWO):
                if five:
                    q = u8(u8(data[b, at + THIRTY_TWO + j] >> shift) & u8(15))
                    fifth = u8(u8(data[b, SIXTEEN + j] >> u8(s)) & u8(1))
                    q = u8(q | u8(fifth << u8(4)))
                else:
                    q = u8(u8(data[b, at + j] >> shift) & u8(15))
                out[b, first + j] = f32(f32(step * f32(q)) - offset)


@loop
def decode_q6_k(data, out):
    """Fill in rows of 210 bytes."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(208))
        for s in range(SIXTEEN):
            step = f32(d * f32(i8(data[b, u64(192) + s])))
            half, part = s // u64(8), (s % u64(8)) // u64(2)
            column = (s % u64(2)) * SIXTEEN
            low = half * u64(64) + (part % u64(2)) * THIRTY_TWO + column
            high = u64(128) + half * THIRTY_TWO + column
            first, four, two = s * SIXTEEN, u8(u64(4) * (part // u64(2))), u8(u64(2) * part)
            for j in range(SIXTEEN):
                q = u8(u8(data[b, low + j] >> four) & u8(15))
                top = u8(u8(data[b, high + j] >> two) & u8(3))
                code = i32(i32(u8(q | u8(top << u8(4)))) - i32(32))
                out[b, first + j] = f32(step * f32(code))


@inline
def _low_bits(at, s):
    """Return the first byte that has low bits of a block of 16, and their place in it."""
    half, part = s // u64(8), (s % u64(8)) // u64(2)
    column = (s % u64(2)) * SIXTEEN
    return at + half * THIRTY_TWO + column, u8(u64(2) * part)
