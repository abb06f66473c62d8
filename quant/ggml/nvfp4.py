"""The loops of ggml's NVFP4: E2M1 codes, and one unsigned E4M3 scale to 16 columns.

    block of 64 columns: 4 scales, 32 pairs of codes        w ~ scale * (0 .5 1 1.5 2 3 4 6, signed)

Byte j of the 8 of a group has column j in its low half and column j + 8 in its high one. Bytes are
those of ggml's `quantize_row_nvfp4_ref`, which knows no scale over the blocks: that is a tensor of
its own (`quant.fourbit.ggml_nvfp4`). Ties go to the smaller magnitude. ggml rounds scales half up,
and takes 448 for all of 256 and above; 0x7F is read as 0.

Arrays are as in `mxfp4`; stored blocks are uint8 [B, 36].
"""

from __future__ import annotations

import numpy as np

from quant.ggml.mxfp4 import twice_e2m1, upper_bits
from quant.numba_ops import as_bits, as_float, inline, loop

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i32, f32 = np.int32, np.float32

GROUPS = u64(4)
GROUP = u64(16)
EIGHT = u64(8)
LARGEST = u8(0x7E)
NAN = u8(0x7F)


@loop
def encode_nvfp4(w, out):
    """Fill out [B, 36] from w [B, 64]; return False if a weight is not finite."""
    for b in range(u64(w.shape[0])):
        for g in range(GROUPS):
            amax = _group_amax(w, b, g)
            if not amax < f32(np.inf):
                return False
            scale = nearest_scale(f32(amax / f32(6)))
            out[b, g] = scale
            d = scale_value(scale)
            for j in range(EIGHT):
                at = u64(g * GROUP + j)
                low, high = _code(w, b, at, d), _code(w, b, u64(at + EIGHT), d)
                out[b, u64(GROUPS + g * EIGHT + j)] = u8(low | u8(high << u8(4)))
    return True


@loop
def decode_nvfp4(data, out):
    """Fill out [B, 64] float32 with the values of data [B, 36]."""
    for b in range(u64(data.shape[0])):
        for g in range(GROUPS):
            half = f32(scale_value(data[b, g]) * f32(0.5))
            for j in range(EIGHT):
                pair, at = data[b, u64(GROUPS + g * EIGHT + j)], u64(g * GROUP + j)
                out[b, at] = f32(twice_e2m1(u8(pair & u8(15))) * half)
                out[b, u64(at + EIGHT)] = f32(twice_e2m1(u8(pair >> u8(4))) * half)


@inline
def _group_amax(w, b, g):
    """Return max |w| of a group; NaN and infinity are above all."""
    uint = w.dtype.type
    magnitude, top = uint(uint(~uint(0)) >> uint(1)), uint(0)
    for j in range(GROUP):
        top = max(top, uint(w[b, u64(g * GROUP + j)] & magnitude))
    return as_float(top)


@inline
def _code(w, b, at, d):
    """Return the code nearest to w / d; 0 if d is 0."""
    uint = w.dtype.type
    magnitude, sign_shift = uint(uint(~uint(0)) >> uint(1)), uint(w.itemsize * 8 - 4)
    bits = w[b, at]
    x = uint(bits & magnitude)
    # Exact in bfloat16 too: d has four digits.
    code = u8(
        u8(u8(x > upper_bits(w, f32(d * f32(0.25)))) + u8(x > upper_bits(w, f32(d * f32(0.75)))))
        + u8(u8(x > upper_bits(w, f32(d * f32(1.25)))) + u8(x > upper_bits(w, f32(d * f32(1.75)))))
        + u8(u8(x > upper_bits(w, f32(d * f32(2.5)))) + u8(x > upper_bits(w, f32(d * f32(3.5)))))
        + u8(x > upper_bits(w, f32(d * f32(5))))
    )
    sign = u8(uint(bits >> sign_shift) & uint(8))
    return u8(code | sign) if code > u8(0) and d > f32(0) else u8(0)


@inline
def nearest_scale(x):
    """Return the unsigned E4M3 that ggml takes for a number that is not negative."""
    bits = as_bits(x)
    exponent = i32(i32(bits >> u32(23)) - i32(120))
    if exponent <= i32(0):
        return u8(f32(x * f32(512) + f32(0.5))) if x * f32(512) < f32(7) else u8(7)
    if exponent >= i32(15):
        return LARGEST
    code = i32(i32(exponent << i32(3)) + i32(u32(u32(bits >> u32(20)) & u32(7))))
    code = i32(code + i32(u32(u32(bits >> u32(19)) & u32(1))))
    return LARGEST if code >= i32(15 << 3) else u8(code)


@inline
def scale_value(scale):
    """Return the number of an unsigned E4M3, whatever its sign bit; 0 of 0x7F."""
    if scale == NAN:
        return f32(0)
    code = u8(scale & NAN)
    if code < u8(8):
        return f32(f32(code) * f32(2.0**-9))
    # Moved up, exponent and fraction are float32's, but for the bias.
    return as_float(u32(u32(u32(code) << u32(20)) + u32(120 << 23)))
