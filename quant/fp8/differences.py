"""The loop that compares FP8 with its weight: sums and counts of `quant.measure.Error`.

    e = w - codes * scale

Its arrays and what makes it fast are those of `loops`. The sums depend on neither machine nor
threads: each of 128 lanes adds its columns of one row in float32, rows are added in float64, and
nothing allows the compiler to reassociate.

Shape letters: N rows, K columns, R x C grid of blocks; in a loop r is a row, j a column.
"""

from __future__ import annotations

import numpy as np

from quant.fp8.loops import LANES, amax_bits, shrunk
from quant.measure import HALF_STEP, HALF_SUBNORMAL, ROUNDING, SUBNORMAL_SLACK
from quant.numba_ops import as_bits, as_float, inline, loop

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i32, f32, f64 = np.int32, np.float32, np.float64


@loop
def compare(w, codes, scale, block_rows, block_cols, sums, counts):
    """Fill sums [4] and counts [4]; return False where only the definition can tell.

    sums    (w - q)^2, w^2, q^2 and the largest |w - q|
    counts  saturated, zeros, zero_rows, outside
    False   a weight, code or scale is not finite, or a weight so large that codes * scale is not
    """
    num_cols = u64(w.shape[1])
    lanes, totals = np.zeros(3 * LANES, np.float32), np.zeros(3 * LANES)
    for r in range(u64(w.shape[0])):
        amax = _row_amax(w, r)
        if not amax < f32(2.0**127):
            return False
        unit = _power_below(amax)
        inverse, worst, num_zero, num_lost = f32(1 / unit), u32(0), 0, 0
        for c in range(u64(0), num_cols, LANES):
            stop, s = min(u64(c + LANES), num_cols), scale[r // block_rows, c // block_cols]
            zero, largest, nan = _census(codes, r, c, stop)
            if nan > 0 or not abs(s) < np.inf:
                return False
            if zero > 0:
                num_lost += _lost(w, codes, r, c, stop)
            error, outside = _differ(w, codes, r, c, stop, inverse, f32(s * inverse), lanes)
            worst = max(worst, error)
            num_zero += zero
            counts[0] += largest
            counts[3] += outside
        counts[1] += num_lost
        counts[2] += num_lost > 0 and num_zero == num_cols
        sums[3] = max(sums[3], as_float(worst) * unit)
        _flush(lanes, unit * unit, totals)
    for i in range(totals.size):
        sums[i // LANES] += totals[i]
    return True


@inline
def _row_amax(w, r):
    """Return max |w| of a row as float32, NaN or infinity if it holds one."""
    num_cols, top = u64(w.shape[1]), w.dtype.type(0)
    for c in range(u64(0), num_cols, LANES):
        top = amax_bits(w, r, c, min(u64(c + LANES), num_cols), top)
    return as_float(top)


@inline
def _census(codes, r, start, stop):
    """Return how many codes of a segment are zero, are +-448, are NaN: few enough for 8 bits."""
    zero, largest, nan = u8(0), u8(0), u8(0)
    for j in range(start, stop):
        magnitude = u8(codes[r, j] & u8(0x7F))
        zero = u8(zero + u8(magnitude == u8(0)))
        largest = u8(largest + u8(magnitude == u8(0x7E)))
        nan = u8(nan + u8(magnitude == u8(0x7F)))
    return zero, largest, nan


@inline
def _lost(w, codes, r, start, stop):
    """Return how many weights of a segment are not zero and have code zero."""
    lost = 0
    for j in range(start, stop):
        lost += (codes[r, j] & 0x7F) == 0 and as_float(w[r, j]) != 0
    return lost


@inline
def _power_below(amax):
    """Return the power of two at or below amax, in float64; 1 for 0."""
    exponent = max(as_bits(amax) & 0x7F800000, 1 << 23)
    return 1.0 if amax == f32(0) else f64(as_float(u32(exponent)))


@inline
def _flush(lanes, unit, totals):
    """Move the lanes' sums, counted in `unit`, to the totals."""
    for i in range(lanes.size):
        totals[i] += lanes[i] * unit
        lanes[i] = f32(0)


# The factors of `measure.bound` squared, as it is squares that are at hand.
_SQUARE_STEP = f32((HALF_STEP * ROUNDING) ** 2)
_SUBNORMAL = f32(HALF_SUBNORMAL * ROUNDING)
_SLACK = f32(SUBNORMAL_SLACK * ROUNDING)


@inline
def _differ(w, codes, r, start, stop, inverse, scale, lanes):
    """Add (w - q)^2, w^2, q^2 to the lanes; return the largest |w - q| in bits, and num outside.

    All in units of 1 / inverse, a power of two near the row's amax, so that squares stay within
    float32; errors below 2^-50 of it are never outside.
    """
    factor = min(f32(scale * f32(256)), f32(2.0**127))
    least = max(f32(abs(scale) * _SUBNORMAL), f32(2.0**-50))
    worst, outside = u32(0), i32(0)
    for j in range(start, stop):
        x = f32(as_float(w[r, j]) * inverse)
        q = f32(shrunk(codes[r, j]) * factor)
        e = f32(x - q)
        square_e, square_x = f32(e * e), f32(x * x)
        lane = u64(j - start)
        lanes[lane] += square_e
        lanes[u64(lane + LANES)] += square_x
        lanes[u64(lane + u64(2 * LANES))] += f32(q * q)
        worst = max(worst, u32(as_bits(e) & u32(0x7FFFFFFF)))
        subnormal = f32(least + f32(abs(x) * _SLACK))
        limit = max(f32(square_x * _SQUARE_STEP), f32(subnormal * subnormal))
        outside = i32(outside + i32(not square_e <= limit))
    return worst, outside
