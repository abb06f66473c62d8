"""How loops write and read the scales of a block: float16, words, and pairs of six bits.

In all of them b is a block, `at` the byte of it where the scale begins.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from quant.numba_ops import from_half, inline, intrinsic

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64

INFINITE = u16(0x7C00)


@intrinsic
def to_half(_context, x):
    """Return the bits of the nearest float16, ties to even."""

    def generate(_context, builder, _signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(x), generate


@inline
def store_half(out, b, at, x):
    """Write a float32 as float16; return what was written."""
    bits = to_half(x)
    out[b, at], out[b, at + u64(1)] = u8(bits & u16(0xFF)), u8(bits >> u16(8))
    return from_half(bits)


@inline
def store_finite_half(out, b, at, x):
    """Write a float32 as float16; return False if that is not finite."""
    bits = to_half(x)
    out[b, at], out[b, at + u64(1)] = u8(bits & u16(0xFF)), u8(bits >> u16(8))
    return u16(bits & u16(0x7FFF)) < INFINITE


@inline
def load_half(data, b, at):
    """Return the float16 at this place as float32."""
    return from_half(u16(u16(data[b, at]) | u16(u16(data[b, at + u64(1)]) << u16(8))))


@inline
def load_word(data, b, at):
    """Return the four bytes at this place as a little-endian word."""
    word = u32(0)
    for i in range(u64(4)):
        word = u32(word | u32(u32(data[b, u64(at + i)]) << u32(u64(8) * i)))
    return word


@inline
def load_six_bits(data, b, s):
    """Return l and m of a block of Q4_K or Q5_K."""
    if s < u64(4):
        return u8(data[b, s + u64(4)] & u8(63)), u8(data[b, s + u64(8)] & u8(63))
    low = data[b, s + u64(8)]
    return (
        u8(u8(low & u8(15)) | u8(u8(data[b, s] >> u8(6)) << u8(4))),
        u8(u8(low >> u8(4)) | u8(u8(data[b, s + u64(4)] >> u8(6)) << u8(4))),
    )
