"""The loops that store super-blocks of IQ2 and IQ3: scales of blocks, and where bits go.

    IQ2_XXS   66 bytes   d, 8 of (4 points, 4 of 7 signs, l)
    IQ2_XS    74 bytes   d, 32 of 9 bits of a point and 7 signs, 16 l
    IQ2_S     82 bytes   d, 32 points' low bits, 32 of 8 signs, 32 of 2 high bits, 16 l
    IQ3_XXS   98 bytes   d, 64 points, 8 of (4 of 7 signs, l)
    IQ3_S    110 bytes   d, 64 points' low bits, 64 high bits, 32 of 8 signs, 8 l

A scale s is stored as d (2 l + 1), l in 0..15 of 4 bits, d = max(s) / 31 in float16 and times a
factor that ggml found to help. The eighth of seven signs makes their number even.

Difference from ggml: in IQ3_S, where 32 weights are all 0, it puts the points and signs of what
follows them in the super-block one place too far to the front; here they are where they are read.

Arrays: scales float32 [n] and words int32 [points of a block, n] as `i_fit` leaves them; signs
uint8 [B, 32]; number int32 as in `i_grids`; out uint8 [B', bytes], B' <= B. In loops b is a
super-block, s a block of it, k a point, e eight columns.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.stored_scales import store_half
from quant.numba_ops import as_bits, inline, loop

u8, u16, u32, u64, i32, f32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.float32

SEVEN, EIGHT = u32(127), u32(255)


@loop
def store_xxs(scales, words, signs, number, factor, out):
    """Write rows of 66 bytes, IQ2_XXS, or of 98, IQ3_XXS."""
    levels, three = np.empty(8, u32), out.shape[1] == 98
    group = u64(4) if three else u64(8)
    for b in range(u64(out.shape[0])):
        _store_scale(scales, b, u64(8), factor, levels, out)
        for s in range(u64(8)):
            at = u64(u64(2) + u64(s * u64(8)))
            for k in range(u64(u64(32) // group)):
                out[b, u64(at + k)] = u8(_point(words, number, b, u64(8), s, k, group))
            word = _packed_signs(scales, signs, b, s, levels)
            place = u64(u64(66) + u64(s * u64(4))) if three else u64(at + u64(4))
            _store_word(word, out, b, place)


@loop
def store_xs(scales, words, signs, number, factor, out):
    """Write rows of 74 bytes, IQ2_XS."""
    levels = np.empty(16, u32)
    for b in range(u64(out.shape[0])):
        _store_scale(scales, b, u64(16), factor, levels, out)
        for s in range(u64(16)):
            for k in range(u64(2)):
                c = u64(u64(s * u64(2)) + k)
                point = _point(words, number, b, u64(16), s, k, u64(8))
                minus = _signs(scales, signs, b, u64(16), c, SEVEN)
                at = u64(u64(2) + u64(c * u64(2)))
                pair = u32(point | u32(minus << u32(9)))
                out[b, at], out[b, u64(at + u64(1))] = u8(pair & u32(255)), u8(pair >> u32(8))
        _store_levels(levels, out, b, u64(66))


@loop
def store_s(scales, words, signs, number, factor, out):
    """Write rows of 82 bytes, IQ2_S, or of 110, IQ3_S."""
    three = out.shape[1] == 110
    num_blocks, group, width = (u64(8), u64(4), u64(1)) if three else (u64(16), u64(8), u64(2))
    points, in_a_byte = u64(u64(u64(256) // group) // num_blocks), u64(u64(8) // width)
    signs_at, levels_at = (u64(74), u64(106)) if three else (u64(34), u64(74))
    levels = np.empty(num_blocks, u32)
    for b in range(u64(out.shape[0])):
        _store_scale(scales, b, num_blocks, factor, levels, out)
        out[b, 66:74] = 0
        for s in range(num_blocks):
            for k in range(points):
                c = u64(u64(s * points) + k)
                point = _point(words, number, b, num_blocks, s, k, group)
                out[b, u64(u64(2) + c)] = u8(point & u32(255))
                high = u8(u32(point >> u32(8)) << u32(width * u64(c % in_a_byte)))
                out[b, u64(u64(66) + u64(c // in_a_byte))] |= high
        for e in range(u64(32)):
            out[b, u64(signs_at + e)] = u8(_signs(scales, signs, b, num_blocks, e, EIGHT))
        _store_levels(levels, out, b, levels_at)


@inline
def _store_scale(scales, b, num_blocks, factor, levels, out):
    """Write d; fill in the l of each block."""
    largest = f32(0)
    for s in range(num_blocks):
        largest = max(largest, abs(scales[u64(u64(b * num_blocks) + s)]))
    d = f32(largest / f32(31))
    store_half(out, b, u64(0), f32(d * factor))
    inverse = f32(f32(1) / d)
    for s in range(num_blocks):
        scale = abs(scales[u64(u64(b * num_blocks) + s)])
        y = f32(f32(0.5) * f32(f32(inverse * scale) - f32(1)))
        rounded = as_bits(f32(y + f32(12582912)))
        level = i32(i32(rounded & u32(0x7FFFFF)) - i32(0x400000))
        levels[s] = u32(min(max(level, i32(0)), i32(15))) if largest > f32(0) else u32(0)


@inline
def _point(words, number, b, num_blocks, s, k, group):
    """Return the number of a point."""
    word, place, power = u32(words[k, u64(u64(b * num_blocks) + s)]), u32(0), u32(1)
    three = group == u64(4)
    width, base = (u32(4), u32(8)) if three else (u32(3), u32(3))
    for _ in range(group):
        level = u32(word & u32(u32(u32(1) << width) - u32(1)))
        place = u32(place + u32(u32(level >> u32(1)) * power))
        power, word = u32(power * base), u32(word >> width)
    return u32(number[place])


@inline
def _signs(scales, signs, b, num_blocks, c, ones):
    """Return the signs of eight columns, inverted where the scale is negative."""
    s = u64(u64(c * num_blocks) // u64(32))
    minus = u32(signs[b, c])
    return u32(minus ^ ones) if scales[u64(u64(b * num_blocks) + s)] < f32(0) else minus


@inline
def _packed_signs(scales, signs, b, s, levels):
    """Return the signs of 32 columns, seven of each eight, and l."""
    word = u32(levels[s] << u32(28))
    for k in range(u64(4)):
        minus = _signs(scales, signs, b, u64(8), u64(u64(s * u64(4)) + k), SEVEN)
        word = u32(word | u32(minus << u32(u64(7) * k)))
    return word


@inline
def _store_word(word, out, b, at):
    """Write 32 bits, the lowest first."""
    for k in range(u64(4)):
        out[b, u64(at + k)] = u8(u32(word >> u32(u64(8) * k)) & u32(255))


@inline
def _store_levels(levels, out, b, at):
    """Write two l in a byte."""
    for s in range(u64(levels.size // 2)):
        low, high = levels[u64(s * u64(2))], levels[u64(u64(s * u64(2)) + u64(1))]
        out[b, u64(at + s)] = u8(low | u32(high << u32(4)))
