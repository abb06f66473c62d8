"""What the loops of ggml's blocks of one scale share: rounding to codes, and their five bits.

The first half of a block's columns are the low nibbles, the second half the high ones; Q5's fifth
bits come before them as one little-endian word. In all loops b is a block, j a column, `at` the
byte of a block where something begins.
"""

from __future__ import annotations

import numpy as np

from quant.numba_ops import inline

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i32, f32 = np.int32, np.float32

BLOCK = u64(32)
HALF = u64(16)


@inline
def top_magnitude(w, b):
    """Return max |w| of a block in bits: as integers they order as numbers do, NaN above all."""
    uint = w.dtype.type
    magnitude, top = uint(uint(~uint(0)) >> uint(1)), uint(0)
    for j in range(BLOCK):
        top = max(top, uint(w[b, j] & magnitude))
    return top


@inline
def inverse(d):
    """Return 1 / d, and 0 for a scale whose codes are all 0."""
    slope = f32(f32(1) / d)
    return slope if abs(slope) < f32(np.inf) else f32(0)


@inline
def code(x, least, slope, offset, top):
    """Return (x - least) * slope + offset without its fraction, at most `top`."""
    return min(i32(f32(f32(f32(x - least) * slope) + offset)), top)


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
def load_five_bits(pair, fifth, j):
    """Return the codes of columns j and j + 16."""
    low = u32(u32(u32(fifth >> u32(j)) & u32(1)) << u32(4))
    high = u32(u32(u32(fifth >> u32(j + HALF)) & u32(1)) << u32(4))
    return i32(u32(pair & u8(15)) | low), i32(u32(pair >> u8(4)) | high)
