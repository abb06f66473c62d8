"""Which scales round a block's weights to its codes: the loop behind `quant.fp8.judge`.

A weight w has the code c under the scale s if |w| / s lies between the ties on both sides of c, so
the scales that explain c are an interval, and those that explain a whole block are the intersection

    low = max |w| / tie above c        high = min |w| / tie below c

with no tie below 0 and none above 448, where encoders saturate. low > high: there is no such scale.

Each of 128 lanes keeps its own bounds, as bits: positive floats order as integers do.

Shape letters: N rows, K columns, R x C grid of blocks; in the loop r is a row, j a column.
"""

from __future__ import annotations

import numpy as np

from quant.numba_ops import as_bits, as_float, inline, loop, to_bfloat16

u8, u32, u64, f32 = np.uint8, np.uint32, np.uint64, np.float32

LANES = u64(128)
INFINITE = u32(0x7F800000)


@loop
def find(w, codes, block_rows, block_cols, low, high, top, signs):
    """Fill in low, high, max |w| and the number of wrong signs of each block, all [R, C].

    signs  codes that are not zero and have the other sign, and -0 for a weight that is not negative
    """
    num_rows, num_cols = u64(w.shape[0]), u64(w.shape[1])
    lows, highs = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
    tops = np.empty(LANES, np.uint32)
    for i in range(u64(low.shape[0])):
        for k in range(u64(low.shape[1])):
            lows[:], highs[:], tops[:] = 0, INFINITE, 0
            last = min(u64(u64(i + u64(1)) * block_rows), num_rows)
            stop = min(u64(u64(k + u64(1)) * block_cols), num_cols)
            wrong = 0
            for r in range(u64(i * block_rows), last):
                for c in range(u64(k * block_cols), stop, LANES):
                    end = min(u64(c + LANES), stop)
                    _narrow(w, codes, r, c, end, lows, highs, tops)
                    wrong += _wrong_signs(w, codes, r, c, end)
            low[i, k], high[i, k], top[i, k] = _together(lows, highs, tops)
            signs[i, k] = wrong


@loop
def differ_in_bfloat16(w, codes, scale, block_rows, block_cols, counts):
    """Fill in how many codes of each block are not those of w / scale rounded to bfloat16."""
    num_cols = u64(w.shape[1])
    counts[:] = 0
    for r in range(u64(w.shape[0])):
        for c in range(u64(0), num_cols, LANES):
            i, k = u64(r // block_rows), u64(c // block_cols)
            counts[i, k] += _differ(w, codes, r, c, min(u64(c + LANES), num_cols), scale[i, k])


@loop
def count_ties(w, codes, scale, block_rows, block_cols, counts):
    """Fill in the ties of each block, [R, C, 5]: those whose code is odd, and by direction.

    A tie is a weight that lies as near to another code. Directions are positive ones down and up,
    negative ones down and up in magnitude.
    """
    num_cols = u64(w.shape[1])
    counts[:] = 0
    for r in range(u64(w.shape[0])):
        for c in range(u64(0), num_cols, LANES):
            i, k = u64(r // block_rows), u64(c // block_cols)
            stop = min(u64(c + LANES), num_cols)
            odd, down, up, minus_down, minus_up = _ties_of(w, codes, r, c, stop, scale[i, k])
            counts[i, k, 0] += odd
            counts[i, k, 1] += down
            counts[i, k, 2] += up
            counts[i, k, 3] += minus_down
            counts[i, k, 4] += minus_up


@inline
def _ties_of(w, codes, r, start, stop, scale):
    """Return the counts of a segment."""
    odd, down, up, minus_down, minus_up = u8(0), u8(0), u8(0), u8(0), u8(0)
    for j in range(start, stop):
        ratio = f32(as_float(w[r, j]) / scale)
        size, code = abs(ratio), u32(codes[r, j] & u8(0x7F))
        above, below = _ties(code)
        minus = u8(ratio < f32(0))
        plus = u8(ratio > f32(0))
        lower, upper = u8(size == above), u8(size == below)
        odd = u8(odd + u8(u8(lower | upper) & u8(code & u32(1))))
        down, up = u8(down + u8(lower & plus)), u8(up + u8(upper & plus))
        minus_down, minus_up = u8(minus_down + u8(lower & minus)), u8(minus_up + u8(upper & minus))
    return odd, down, up, minus_down, minus_up


@inline
def _differ(w, codes, r, start, stop, scale):
    """Return how many codes of a segment are not the nearest, of two the even one."""
    count = u8(0)
    for j in range(start, stop):
        ratio = as_float(u32(u32(to_bfloat16(f32(as_float(w[r, j]) / scale))) << u32(16)))
        size, code = abs(ratio), u32(codes[r, j] & u8(0x7F))
        above, below = _ties(code)
        tie = u8(u8(size == above) | u8(size == below)) & u8(code & u32(1))
        count = u8(count + u8(u8(size > above) | u8(size < below) | tie))
    return count


@inline
def _narrow(w, codes, r, start, stop, lows, highs, tops):
    """Intersect the lanes with the intervals of a segment."""
    for j in range(start, stop):
        size = u32(as_bits(as_float(w[r, j])) & u32(0x7FFFFFFF))
        code, lane = u32(codes[r, j] & u8(0x7F)), u64(j - start)
        above, below = _ties(code)
        least, most = f32(as_float(size) / above), f32(as_float(size) / below)
        lows[lane] = max(lows[lane], as_bits(least))
        # 0 / 0 is NaN; without its sign it is above all numbers
        highs[lane] = min(highs[lane], u32(as_bits(most) & u32(0x7FFFFFFF)))
        tops[lane] = max(tops[lane], size)


@inline
def _together(lows, highs, tops):
    """Return the bounds of all lanes; arrays' own `max` would take a second to compile."""
    low, high, top = u32(0), INFINITE, u32(0)
    for i in range(LANES):
        low, high, top = max(low, lows[i]), min(high, highs[i]), max(top, tops[i])
    return as_float(low), as_float(high), as_float(top)


@inline
def _ties(code):
    """Return the ties above and below a magnitude."""
    twice = u32(code << u32(1))
    above = _tie(u32(twice + u32(1))) if code < u32(0x7E) else f32(np.inf)
    below = _tie(u32(twice - u32(1))) if code > u32(0) else f32(0)
    return above, below


@inline
def _tie(odd):
    """Return the tie at code odd / 2: the value of E4M4, which has one more bit of mantissa."""
    normal = as_float(u32(u32(odd << u32(19)) + u32(120 << 23)))
    return f32(f32(odd) * f32(2.0**-10)) if odd < u32(16) else normal


@inline
def _wrong_signs(w, codes, r, start, stop):
    """Return how many codes of a segment have a sign that their weight has not."""
    wrong = u8(0)
    for j in range(start, stop):
        code = codes[r, j]
        minus = u8(code >> u8(7))
        negative = u8(as_bits(as_float(w[r, j])) >> u32(31))
        some = u8(u8(code & u8(0x7F)) != u8(0))
        wrong = u8(wrong + u8(u8(minus ^ negative) & u8(some | minus)))
    return wrong
