"""The FP8 loops, compiled by numba for the machine they run on. `quant.fp8.cpu` is their front.

    quantize    weight -> amax of each block -> scale -> codes
    dequantize  codes * scale -> float32 or bfloat16

Arrays hold bits: a weight is uint16 (bfloat16) or uint32 (float32), codes are uint8, scales are
float32. No loop holds the interpreter's lock or starts a thread: callers bring threads.

What makes them fast: a power-of-two scale only moves the exponent, so bfloat16 is rounded in
16-bit integers, sixteen to an AVX2 register. Every inner loop runs over a segment, up to 128
columns of one row under one scale, which LLVM turns into vectors. The traps: numba computes small
integers in 64 bits, and one bare `+` halves the speed of such a loop; it counts references to
slices; it tests signed indices for being negative. Hence the casts, (r, start, stop) in place of
slices, and unsigned counters.

Shape letters: N rows, K columns, R x C grid of blocks; in a loop r is a row, j a column.
"""

from __future__ import annotations

import numpy as np

from quant.numba_ops import as_bits, as_float, from_half, inline, loop, to_bfloat16

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, f32 = np.int8, np.int16, np.int32, np.float32

LANES = u64(128)
FLOAT32, BFLOAT16, POW2 = 0, 1, 2


@loop
def quantize(w, block_rows, block_cols, mode, codes, scale):
    """Fill codes [N, K] and scale [R, C]; return False if w [N, K] is not all finite."""
    num_rows, num_cols = u64(w.shape[0]), u64(w.shape[1])
    top = np.empty(scale.shape[1], w.dtype)
    for block in range(u64(scale.shape[0])):
        first = u64(block * block_rows)
        last = min(u64(first + block_rows), num_rows)
        top[:] = 0
        for r in range(first, last):
            for c in range(u64(0), num_cols, LANES):
                stop = min(u64(c + LANES), num_cols)
                top[c // block_cols] = amax_bits(w, r, c, stop, top[c // block_cols])
        for i in range(top.size):
            amax = as_float(top[i])
            if not amax < np.inf:
                return False
            scale[block, i] = _round_scale(amax, mode)
        for r in range(first, last):
            for c in range(u64(0), num_cols, LANES):
                stop = min(u64(c + LANES), num_cols)
                _encode(w, r, c, stop, scale[block, c // block_cols], codes)
    return True


@loop
def dequantize(codes, scale, block_rows, block_cols, out):
    """Fill out [N, K], bits of float32 or bfloat16, with codes [N, K] * scale [R, C]."""
    num_cols = u64(codes.shape[1])
    for r in range(u64(codes.shape[0])):
        for c in range(u64(0), num_cols, LANES):
            s = scale[r // block_rows, c // block_cols]
            _decode(codes, r, c, min(u64(c + LANES), num_cols), s, out)


@inline
def amax_bits(w, r, start, stop, top):
    """Return max(|w|, top) in bits: as integers they order as numbers do, NaN above all."""
    uint = w.dtype.type
    magnitude = uint(uint(~uint(0)) >> uint(1))
    for j in range(start, stop):
        top = max(top, uint(w[r, j] & magnitude))
    return top


@inline
def _round_scale(amax, mode):
    """Return the scale of a block: `fp8.round_scale`."""
    if amax == f32(0):
        return f32(1)
    if mode == POW2:
        exponent = ((as_bits(amax) + 0x1FFFFF) >> 23) - 8
        return as_float(u32(max(exponent, 1) << 23))
    scale = max(f32(amax / f32(448)), f32(2.0**-126))
    return as_float(to_bfloat16(scale)) if mode == BFLOAT16 else scale


@inline
def _encode(w, r, start, stop, scale, codes):
    """Round a segment, in 16-bit integers where weight and scale allow it: twice as fast."""
    bits = as_bits(scale)
    exponent = i32(bits >> u32(23))
    # With a scale below 2^-110 a subnormal bfloat16 could have a normal code.
    if w.itemsize == 2 and (bits & 0x7FFFFF) == 0 and exponent >= 17:
        _encode_pow2(w, r, start, stop, i16((exponent - 7) << 7), codes)
    else:
        _encode_any(w, r, start, stop, scale, codes)


# |w| / scale has the subnormal code k < 8 if it has passed k of the ties (i + 1/2) * 2^-9. Here are
# the ties in bfloat16 bits, counted from 2^-7, whose exponent is that of codes 0 to 7; those with
# odd i less 1, because they go up themselves, to the even code.
_TIES = tuple(map(i16, (-384, -193, -96, -33, 16, 47, 80, 111)))


@inline
def _encode_pow2(w, r, start, stop, shift, codes):
    """Round bfloat16 to E4M3; `shift` takes the scale and the types' biases off the exponent."""
    for j in range(start, stop):
        y = i16(i16(w[r, j] & u16(0x7FFF)) - shift)
        odd = i16(i16(y >> i16(4)) & i16(1))
        normal = i16(i16(i16(y + i16(7)) + odd) >> i16(4))
        subnormal = i16(
            i16(y > _TIES[0])
            + i16(y > _TIES[1])
            + i16(y > _TIES[2])
            + i16(y > _TIES[3])
            + i16(y > _TIES[4])
            + i16(y > _TIES[5])
            + i16(y > _TIES[6])
            + i16(y > _TIES[7])
        )
        # Below 2^-6 `normal` falls to zero too early, above it `subnormal` stays at 8.
        code = u16(min(max(normal, subnormal), i16(0x7E)))
        codes[r, j] = u8(code | u16(u16(w[r, j] >> u16(8)) & u16(0x80)))


@inline
def _encode_any(w, r, start, stop, scale, codes):
    """Round w / scale to E4M3 in float32."""
    magic = f32(2.0**14)  # its last bit is worth 2^-9, the step of subnormal codes
    for j in range(start, stop):
        bits = as_bits(as_float(w[r, j]))
        y = f32(as_float(u32(bits & u32(0x7FFFFFFF))) / scale)
        z = as_bits(y)
        odd = u32(u32(z >> u32(20)) & u32(1))
        normal = u32(u32(u32(u32(z + u32(0x7FFFF)) + odd) >> u32(20)) - u32(120 << 3))
        subnormal = u32(as_bits(f32(y + magic)) - as_bits(magic))
        code = min(subnormal if y < f32(2.0**-6) else normal, u32(0x7E))
        codes[r, j] = u8(code | u32(u32(bits >> u32(24)) & u32(0x80)))


@inline
def _decode(codes, r, start, stop, scale, out):
    """Write a segment of codes * scale, as bits of bfloat16 or float32."""
    if out.itemsize == 2:
        for j in range(start, stop):
            out[r, j] = to_bfloat16(f32(_value(codes[r, j]) * scale))
    else:
        for j in range(start, stop):
            out[r, j] = as_bits(f32(_value(codes[r, j]) * scale))


@inline
def _value(code):
    """Return the value of an E4M3 code."""
    nan = u8(code & u8(0x7F)) == u8(0x7F)
    return f32(np.nan) if nan else f32(shrunk(code) * f32(256))


@inline
def shrunk(code):
    """Return the value of an E4M3 code times 2^-8, 480 * 2^-8 for NaN."""
    # Moved up by 7 it is a float16, whose exponent has a bias of 15 instead of 7. The sign bit
    # comes twice, and once is masked.
    return from_half(u16(u16(i16(i8(code)) << i16(7)) & u16(0xBFFF)))
