"""The loops of four and eight bits, compiled by numba; their definitions stand in `reference`.

    extremes      the least and the largest weight of each group, and 0
    encode_e2m1   w / d -> E2M1 codes, two to a byte, the even column in the low half
    encode_int    w / d + zero -> whole numbers, one to a byte
    decode_*      codes -> float32

Arrays hold bits: a weight is uint16 (bfloat16) or uint32 (float32), [B, g], one group to a row; the
step d is float32 [B]. No loop holds the interpreter's lock or starts a thread.

What makes them fast: inner loops over one group with unsigned counters and every operation cast, as
in `quant.fp8.loops`, so that LLVM turns them into vectors; codes are packed in a second pass.
"""

from __future__ import annotations

import numpy as np

from quant.numba_ops import as_bits, as_float, from_half, inline, loop

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i32, f32 = np.int8, np.int32, np.float32


@loop
def extremes(w, low, high):
    """Fill low [B] and high [B], which hold 0; return False if a weight is not finite.

    As signed numbers bits order the weights that are not negative, as unsigned ones the others.
    """
    uint, finite = w.dtype.type, True
    half = uint(uint(1) << uint(w.itemsize * 8 - 1))
    for b in range(u64(w.shape[0])):
        most, least = uint(half), uint(half)  # moved by half their range: both start at 0
        for j in range(u64(w.shape[1])):
            bits = w[b, j]
            most = max(most, uint(bits ^ half))
            least = max(least, bits)
        top, bottom = as_float(uint(most ^ half)), as_float(least)
        finite = finite and top < f32(np.inf) and bottom > f32(-np.inf)
        low[b], high[b] = bottom, top
    return finite


@loop
def encode_e2m1(w, d, out):
    """Fill out [B, g / 2] with the codes nearest to w / d, ties to the even code."""
    codes = np.empty(w.shape[1], np.uint8)
    for b in range(u64(w.shape[0])):
        step = d[b]
        for j in range(u64(w.shape[1])):
            bits = as_bits(as_float(w[b, j]))
            y = f32(as_float(u32(bits & u32(0x7FFFFFFF))) / step)
            first = u8(u8(y > f32(0.25)) + u8(y >= f32(0.75)))
            second = u8(u8(y > f32(1.25)) + u8(y >= f32(1.75)))
            third = u8(u8(u8(y > f32(2.5)) + u8(y >= f32(3.5))) + u8(y > f32(5)))
            sign = u8(u32(bits >> u32(28)) & u32(8))
            codes[j] = u8(u8(u8(first + second) + third) | sign)
        _pack(codes, b, out)


@loop
def decode_e2m1(packed, d, out):
    """Fill out [B, g] float32 with the values of packed codes [B, g / 2], times d."""
    pairs = u64(packed.shape[1])
    for b in range(u64(packed.shape[0])):
        step = f32(d[b] * f32(2.0**14))
        for j in range(pairs):
            pair = u16(packed[b, j])
            out[b, u64(j * u64(2))] = f32(_e2m1(pair) * step)
            out[b, u64(u64(j * u64(2)) + u64(1))] = f32(_e2m1(u16(pair >> u16(4))) * step)


@loop
def encode_int(w, d, zero, least, most, out):
    """Fill out int8 [B, g] with round(w / d + zero) between least and most, ties to even."""
    magic = f32(1.5 * 2.0**23)  # its last bit is worth 1
    for b in range(u64(w.shape[0])):
        step, shift = d[b], zero[b]
        for j in range(u64(w.shape[1])):
            y = f32(f32(as_float(w[b, j]) / step) + shift)
            y = min(max(y, f32(least)), f32(most))
            out[b, j] = i8(i32(as_bits(f32(y + magic))) - i32(as_bits(magic)))


@loop
def decode_int(codes, d, zero, out):
    """Fill out [B, g] float32 with (codes [B, g] - zero) * d."""
    for b in range(u64(codes.shape[0])):
        step, shift = d[b], zero[b]
        for j in range(u64(codes.shape[1])):
            out[b, j] = f32(f32(f32(codes[b, j]) - shift) * step)


@loop
def pack_int4(codes, out):
    """Fill out uint8 [B, g / 2] with codes [B, g], plus 8."""
    for b in range(u64(codes.shape[0])):
        for j in range(u64(out.shape[1])):
            low = u8(codes[b, u64(j * u64(2))] + i8(8))
            high = u8(codes[b, u64(u64(j * u64(2)) + u64(1))] + i8(8))
            out[b, j] = u8(low | u8(high << u8(4)))


@loop
def unpack_int4(packed, out):
    """Fill out int8 [B, g] with packed codes [B, g / 2], less 8."""
    for b in range(u64(packed.shape[0])):
        for j in range(u64(packed.shape[1])):
            pair = packed[b, j]
            out[b, u64(j * u64(2))] = i8(i8(pair & u8(15)) - i8(8))
            out[b, u64(u64(j * u64(2)) + u64(1))] = i8(i8(pair >> u8(4)) - i8(8))


@inline
def _pack(codes, b, out):
    """Put two codes into each byte of a row."""
    for j in range(u64(out.shape[1])):
        low = codes[u64(j * u64(2))]
        high = codes[u64(u64(j * u64(2)) + u64(1))]
        out[b, j] = u8(low | u8(high << u8(4)))


@inline
def _e2m1(code):
    """Return the value of the lower four bits, an E2M1 code, times 2^-14."""
    # Moved up it is a float16, whose exponent has a bias of 15 instead of 1.
    return from_half(u16(u16(u16(code & u16(7)) << u16(9)) | u16(u16(code & u16(8)) << u16(12))))
