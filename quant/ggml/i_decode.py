"""The loops that decode IQ2 and IQ3; `i_store` has the layouts.

    w = +-(d (l + 1/2) / 4) g     IQ2
    w = +-(d (l + 1/2) / 2) g     IQ3_XXS
    w = +-(d (2 l + 1)) g         IQ3_S

Each operation is rounded to float32, in this order, as in ggml's C (`dequantize_row_iq*`).

Arrays: data uint8 [B, bytes], grid float32 [points, columns], out float32 [B, 256]. In loops b is a
super-block, k a point.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.stored_scales import load_half, load_word
from quant.numba_ops import inline, loop

u8, u32, u64, f32 = np.uint8, np.uint32, np.uint64, np.float32


@loop
def decode_xxs(data, grid, out):
    """Fill in rows of 66 bytes, IQ2_XXS, or of 98, IQ3_XXS."""
    three = data.shape[1] == 98
    group, unit = (u64(4), f32(0.5)) if three else (u64(8), f32(0.25))
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        for s in range(u64(8)):
            at = u64(u64(2) + u64(s * u64(8)))
            place = u64(u64(66) + u64(s * u64(4))) if three else u64(at + u64(4))
            word = load_word(data, b, place)
            step = _step(d, u32(word >> u32(28)), unit)
            for k in range(u64(u64(32) // group)):
                j = u64(k * group)
                minus = _even(u32(u32(word >> u32(u64(7) * u64(j // u64(8)))) & u32(127)))
                minus = u32(minus >> u32(j % u64(8)))
                point = u64(data[b, u64(at + k)])
                _fill(grid, point, step, minus, out, b, u64(u64(s * u64(32)) + j))


@loop
def decode_xs(data, grid, out):
    """Fill in rows of 74 bytes, IQ2_XS."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        for k in range(u64(32)):
            step = _step(d, _level(data, b, u64(66), u64(k // u64(2))), f32(0.25))
            at = u64(u64(2) + u64(k * u64(2)))
            pair = u32(u32(data[b, at]) | u32(u32(data[b, u64(at + u64(1))]) << u32(8)))
            minus = _even(u32(pair >> u32(9)))
            _fill(grid, u64(pair & u32(511)), step, minus, out, b, u64(k * u64(8)))


@loop
def decode_s(data, grid, out):
    """Fill in rows of 82 bytes, IQ2_S, or of 110, IQ3_S."""
    three = data.shape[1] == 110
    columns, group, width = (u64(32), u64(4), u64(1)) if three else (u64(16), u64(8), u64(2))
    signs_at, levels_at = (u64(74), u64(106)) if three else (u64(34), u64(74))
    in_a_byte, ones = u64(u64(8) // width), u32(u32(u32(1) << u32(width)) - u32(1))
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        for k in range(u64(u64(256) // group)):
            j = u64(k * group)
            level = _level(data, b, levels_at, u64(j // columns))
            odd = f32(d * f32(u32(u32(u32(2) * level) + u32(1))))
            step = odd if three else _step(d, level, f32(0.25))
            byte = u32(data[b, u64(u64(66) + u64(k // in_a_byte))])
            high = u32(u32(byte >> u32(width * u64(k % in_a_byte))) & ones)
            point = u32(u32(data[b, u64(u64(2) + k)]) | u32(high << u32(8)))
            minus = u32(data[b, u64(signs_at + u64(j // u64(8)))]) >> u32(j % u64(8))
            _fill(grid, u64(point), step, minus, out, b, j)


@inline
def _step(d, level, unit):
    """Return what a level of the grid is worth."""
    return f32(f32(d * f32(f32(0.5) + f32(level))) * unit)


@inline
def _fill(grid, point, step, minus, out, b, at):
    """Fill in the columns of a point; bit j of `minus` is the sign of column j."""
    for j in range(u64(grid.shape[1])):
        value = f32(step * grid[point, j])
        negative = u32(u32(minus >> u32(j)) & u32(1)) == u32(1)
        out[b, u64(at + j)] = f32(-value) if negative else value


@inline
def _even(seven):
    """Return seven signs with the eighth, which makes their number even."""
    odd = u32(seven ^ u32(seven >> u32(4)))
    odd = u32(odd ^ u32(odd >> u32(2)))
    odd = u32(u32(odd ^ u32(odd >> u32(1))) & u32(1))
    return u32(seven | u32(odd << u32(7)))


@inline
def _level(data, b, at, s):
    """Return the four bits of a block."""
    return u32(u32(data[b, u64(at + u64(s // u64(2)))]) >> u32(u64(4) * u64(s % u64(2)))) & u32(15)
