"""The loops of MXFP4: E2M1 codes, and one byte per 32 columns for a scale that is a power of two.

    d = 2^(floor(log2 amax) - 2)        w ~ d * (0 .5 1 1.5 2 3 4 6, with a sign)

Bytes are those of ggml's `quantize_row_mxfp4_ref`. Ties go to the smaller magnitude, and above 6 d
weights are clipped: amax / d reaches 8. ggml rounds the logarithm to float32, so that just below a
power of two the scale is the next one's; and below 2^-125 its exponent wraps around, where all
codes are 0.

Arrays hold bits: a weight is uint16 (bfloat16) or uint32 (float32), [B, 32]; stored blocks are
uint8 [B, 17]. The encoder returns False if a weight is not finite.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.legacy_codes import HALF, top_magnitude
from quant.numba_ops import as_bits, as_float, inline, loop

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i32, f32, f64 = np.int32, np.float32, np.float64


@loop
def encode_mxfp4(w, out):
    """Fill out [B, 17]: the exponent of d, 16 pairs of codes."""
    uint = w.dtype.type
    magnitude, sign_shift = uint(uint(~uint(0)) >> uint(1)), uint(w.itemsize * 8 - 4)
    for b in range(u64(w.shape[0])):
        top = top_magnitude(w, b)
        amax = as_float(top)
        if not amax < f32(np.inf):
            return False
        exponent = _mxfp4_exponent(amax)
        out[b, 0] = exponent
        d = _mxfp4_scale(exponent)
        # Exact in bfloat16 too. Codes stand for twice their value; a tie goes to the smaller one.
        t0, t1 = upper_bits(w, f32(f32(0.5) * d)), upper_bits(w, f32(f32(1.5) * d))
        t2, t3 = upper_bits(w, f32(f32(2.5) * d)), upper_bits(w, f32(f32(3.5) * d))
        t4, t5, t6 = (
            upper_bits(w, f32(f32(5) * d)),
            upper_bits(w, f32(f32(7) * d)),
            upper_bits(w, f32(f32(10) * d)),
        )
        for j in range(HALF):
            pair = u8(0)
            for half in range(u64(2)):
                bits = w[b, u64(j + u64(half * HALF))]
                x = uint(bits & magnitude)
                code = uint(
                    uint(uint(uint(x > t0) + uint(x > t1)) + uint(uint(x > t2) + uint(x > t3)))
                    + uint(uint(uint(x > t4) + uint(x > t5)) + uint(x > t6))
                )
                sign = uint(uint(bits >> sign_shift) & uint(8))
                code = uint(code | (sign if code > uint(0) else uint(0)))
                pair = u8(pair | u8(code << uint(4 * half)))
            out[b, u64(j + u64(1))] = pair
    return True


@loop
def decode_mxfp4(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 17]."""
    for b in range(u64(data.shape[0])):
        d = _mxfp4_scale(data[b, 0])
        for j in range(HALF):
            pair = data[b, u64(j + u64(1))]
            out[b, j] = f32(twice_e2m1(u8(pair & u8(15))) * d)
            out[b, u64(j + HALF)] = f32(twice_e2m1(u8(pair >> u8(4))) * d)


@inline
def upper_bits(w, x):
    """Return the bits of x that a weight of w has: all of them or the upper ones."""
    return u16(as_bits(x) >> u32(16)) if w.itemsize == 2 else as_bits(x)


@inline
def _mxfp4_exponent(amax):
    """Return floor(log2 amax) - 2, biased by 127, in the eight bits that are left of it."""
    if amax == f32(0):
        return u8(0)
    bits = as_bits(amax)
    # ggml rounds the logarithm to float32: just below a power of two that is the next integer.
    if bits < u32(0x800000) or u32(bits & u32(0x7FFFFF)) >= u32(0x7FFF00):
        return u8(i32(np.floor(f32(np.log2(f64(amax))))) + i32(125))
    return u8(u32(u32(bits >> u32(23)) - u32(2)))


@inline
def _mxfp4_scale(exponent):
    """Return half of the power of two that this byte stands for."""
    if exponent < u8(2):
        return as_float(u32(u32(0x200000) << u32(exponent)))
    return as_float(u32(u32(u32(exponent) - u32(1)) << u32(23)))


@inline
def twice_e2m1(code):
    """Return twice the value of an E2M1 code: 0 1 2 3 4 6 8 12 and their negatives."""
    x = u32(code & u8(7))
    # Moved up, exponent and fraction are float32's, but for the bias: 1 for 127.
    bits = u32(u32(x << u32(22)) + u32(127 << 23))
    value = f32(f32(0) if x == u32(0) else (f32(1) if x == u32(1) else as_float(bits)))
    return f32(-value) if code > u8(8) else value
