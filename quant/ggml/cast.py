"""Casts to float32, bfloat16 and float16, to nearest, ties to even, that also look at every weight.

Arrays hold bits: w [N, K] is uint16 (bfloat16) or uint32 (float32), out the type's own.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.stored_scales import INFINITE, to_half
from quant.numba_ops import as_bits, as_float, loop, to_bfloat16

u16, u32, u64 = np.uint16, np.uint32, np.uint64


@loop
def all_below(w, largest):
    """Return whether every magnitude is below a float32; a NaN is not."""
    uint = w.dtype.type
    magnitude, top = uint(uint(~uint(0)) >> uint(1)), uint(0)
    for r in range(u64(w.shape[0])):
        for j in range(u64(w.shape[1])):
            top = max(top, uint(w[r, j] & magnitude))
    return as_float(top) < largest


@loop
def cast_f32(w, out):
    """Fill out, uint32, with the float32 bits of w; return False if one is not finite."""
    top = u32(0)
    for r in range(u64(w.shape[0])):
        for j in range(u64(w.shape[1])):
            bits = as_bits(as_float(w[r, j]))
            top = max(top, u32(bits & u32(0x7FFFFFFF)))
            out[r, j] = bits
    return top < u32(0x7F800000)


@loop
def cast_bf16(w, out):
    """Fill out, uint16, with the nearest bfloat16 bits of w; return False if one is not finite."""
    top = u16(0)
    for r in range(u64(w.shape[0])):
        for j in range(u64(w.shape[1])):
            bits = w[r, j] if w.itemsize == 2 else to_bfloat16(as_float(w[r, j]))
            top = max(top, u16(bits & u16(0x7FFF)))
            out[r, j] = bits
    return top < u16(0x7F80)


@loop
def cast_f16(w, out):
    """Fill out, uint16, with the nearest float16 bits of w; return False if one is not finite."""
    top = u16(0)
    for r in range(u64(w.shape[0])):
        for j in range(u64(w.shape[1])):
            bits = to_half(as_float(w[r, j]))
            top = max(top, u16(bits & u16(0x7FFF)))
            out[r, j] = bits
    return top < INFINITE
