"""The loops of IQ4_NL and IQ4_XS: 4-bit codes into a table of 16 unequal steps, searched scales.

    IQ4_NL   w ~ d T[q]            one float16 d per 32 columns
    IQ4_XS   w ~ d (l - 32) T[q]   one float16 d per 256 columns, one 6-bit l per 32

`iq4_search` finds the scales. At last the codes are taken again with the scale that is stored,
before float16 rounds it. Bytes are those of ggml (`quantize_iq4_nl`, `quantize_iq4_xs`).

Arrays hold bits: a weight is uint16 (bfloat16) or uint32 (float32), [B, 32] blocks; stored blocks
are uint8. Importance is float32 [C, 32], of the C blocks of one row, or [0, 32] for none. Encoders
return False if a weight is not finite, or a scale is beyond float16. In loops j is a column, i a
lane, b a block, s a super-block of eight.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.iq4_search import (
    BLOCK,
    LANES,
    PLANES,
    VALUES,
    V,
    load,
    nearest_codes,
    place,
    search,
    weigh,
)
from quant.ggml.stored_scales import load_half, store_finite_half
from quant.numba_ops import as_bits, inline, loop

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i32, f32 = np.int32, np.float32

HALF, EIGHT = u64(16), u64(8)


@loop
def encode_iq4_nl(w, importance, out):
    """Fill out [B, 18]: d, 16 pairs of codes."""
    plane = np.zeros(PLANES, f32)
    top, peak = np.zeros(LANES, f32), np.zeros(LANES, f32)
    num_blocks = u64(w.shape[0])
    for first in range(u64(0), num_blocks, LANES):
        count = min(LANES, u64(num_blocks - first))
        if not load(w, first, count, plane, top, peak):
            return False
        if not _encode_lanes_nl(plane, top, peak, importance, first, count, out):
            return False
    return True


@loop
def encode_iq4_xs(w, importance, out):
    """Fill out [B / 8, 136]: d, the high bits of eight l, their low bits, 128 pairs of codes."""
    plane = np.zeros(PLANES, f32)
    top, peak = np.zeros(LANES, f32), np.zeros(LANES, f32)
    num_blocks = u64(w.shape[0])
    for first in range(u64(0), num_blocks, LANES):
        count = min(LANES, u64(num_blocks - first))
        if not load(w, first, count, plane, top, peak):
            return False
        if not _encode_lanes_xs(plane, top, peak, importance, first, count, out):
            return False
    return True


@loop
def decode_iq4_nl(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 18]."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        for j in range(HALF):
            pair = data[b, u64(j + u64(2))]
            out[b, j] = f32(d * VALUES[pair & u8(15)])
            out[b, u64(j + HALF)] = f32(d * VALUES[pair >> u8(4)])


@loop
def decode_iq4_xs(data, out):
    """Fill out [B, 256] float32 with the values of data [B, 136]."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        high = u32(u32(data[b, 2]) | u32(u32(data[b, 3]) << u32(8)))
        for s in range(EIGHT):
            low = u32(data[b, u64(u64(4) + u64(s // u64(2)))]) >> u32(u64(4) * u64(s % u64(2)))
            bits = u32(u32(high >> u32(u64(2) * s)) & u32(3)) << u32(4)
            step = f32(d * f32(i32(i32(u32(low & u32(15)) | u32(bits)) - i32(32))))
            for j in range(HALF):
                pair = data[b, u64(u64(u64(8) + u64(HALF * s)) + j)]
                out[b, u64(u64(BLOCK * s) + j)] = f32(step * VALUES[pair & u8(15)])
                out[b, u64(u64(u64(BLOCK * s) + HALF) + j)] = f32(step * VALUES[pair >> u8(4)])


@loop
def _encode_lanes_nl(plane, top, peak, importance, first, count, out):
    """Write `count` blocks; return False if a scale is infinite."""
    scale, inverse = np.empty(LANES, f32), np.empty(LANES, f32)
    codes = np.empty(V, i32)
    weigh(importance, first, u64(1), plane)
    search(plane, top, peak, scale)
    for i in range(LANES):
        inverse[i] = f32(f32(1) / scale[i]) if scale[i] != f32(0) else f32(0)
    nearest_codes(plane, inverse, codes)
    for i in range(count):
        if not store_finite_half(out, u64(first + i), u64(0), scale[i]):
            return False
        _store_pairs(codes, i, out, u64(first + i), u64(2))
    return True


@loop
def _encode_lanes_xs(plane, top, peak, importance, first, count, out):
    """Write `count` blocks, in super-blocks; return False if a scale is infinite."""
    scale, inverse = np.empty(LANES, f32), np.zeros(LANES, f32)
    codes = np.empty(V, i32)
    weigh(importance, first, EIGHT, plane)
    search(plane, top, peak, scale)
    for i in range(u64(0), count, EIGHT):
        if not _store_scales(scale, i, inverse, out, u64(u64(first + i) // EIGHT)):
            return False
    nearest_codes(plane, inverse, codes)
    for i in range(count):
        b = u64(first + i)
        _store_pairs(codes, i, out, u64(b // EIGHT), u64(u64(8) + u64(HALF * u64(b % EIGHT))))
    return True


@inline
def _store_scales(scale, i, inverse, out, s):
    """Write d and eight l of a super-block; fill in 1 / (d l). Return False if d is infinite."""
    top, peak = f32(0), f32(0)
    for k in range(i, u64(i + EIGHT)):
        if abs(scale[k]) > top:
            top, peak = abs(scale[k]), scale[k]
    d = f32(-peak / f32(32))
    per_d = f32(f32(1) / d) if d != f32(0) else f32(0)
    high = u32(0)
    out[s, 4:8] = 0
    for k in range(EIGHT):
        rounded = as_bits(f32(f32(per_d * scale[u64(i + k)]) + f32(12582912)))
        level = min(max(i32(i32(rounded & u32(0x7FFFFF)) - i32(0x400000)), i32(-32)), i32(31))
        step = f32(d * f32(level))
        inverse[u64(i + k)] = f32(f32(1) / step) if step != f32(0) else f32(0)
        bits = u32(level + i32(32))
        low = u8(u32(bits & u32(15)) << u32(u64(4) * u64(k % u64(2))))
        out[s, u64(u64(4) + u64(k // u64(2)))] |= low
        high = u32(high | u32(u32(bits >> u32(4)) << u32(u64(2) * k)))
    out[s, 2], out[s, 3] = u8(high & u32(0xFF)), u8(high >> u32(8))
    return store_finite_half(out, s, u64(0), d)


@inline
def _store_pairs(codes, i, out, b, at):
    """Write the 32 codes of a lane, the first half in the low nibbles."""
    for j in range(HALF):
        low, high = u32(codes[place(j, i)]), u32(codes[place(u64(j + HALF), i)])
        out[b, u64(at + j)] = u8(low | u32(high << u32(4)))
