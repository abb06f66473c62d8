"""The loops of Q4_0 Q5_0 Q4_1 Q5_1 with an importance matrix: the scale is searched for.

An error of a column weighs v = importance * sqrt(mean(w^2) + w^2), the mean being its row's.

    *_0   codes of 19 scales near amax / 8 (16), each with the scale of least squares for its codes
    *_1   codes of 37 scales near (max - min) / 15 (31), each with the line of least squares
    the fit that leaves the least sum(v e^2) is stored, its codes as they are

Bytes are those of ggml (`quantize_row_q*_impl`, `make_qx_quants`, `make_qkx3_quants`): every sum
runs over the columns in order, in float32. llama-quantize comes here where a row of a K-quant is no
multiple of 256, which is too rare for more than plain loops.

Arrays: as in `legacy_symmetric`, but weights are bits of float32 alone, so that each loop compiles
once; importance float32 [C, 32], of the C blocks of one row.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.legacy_codes import BLOCK, HALF, store_five_bits
from quant.ggml.stored_scales import store_finite_half
from quant.numba_ops import as_bits, as_float, copy_into, inline, loop

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i32, f32 = np.int32, np.float32

SMALLEST = f32(1e-15)
LARGEST = f32(2.0**32)


@loop
def encode_symmetric(w, importance, most, out):
    """Fill out [B, 18] of Q4_0 (most 8) or [B, 22] of Q5_0 (most 16).

    Return False if a weight is not finite, or a scale is beyond float16.
    """
    num_blocks, per_row = u64(w.shape[0]), u64(importance.shape[0])
    x, v = np.empty((per_row, BLOCK), f32), np.empty((per_row, BLOCK), f32)
    codes, room = np.empty(BLOCK, i32), np.empty(BLOCK, i32)
    for first in range(u64(0), num_blocks, per_row):
        if not _load_row(w, first, importance, x, v):
            return False
        for c in range(per_row):
            b = u64(first + c)
            d = _symmetric(x[c], v[c], most, codes, room)
            if not store_finite_half(out, b, u64(0), d):
                return False
            _store_codes(codes, most == i32(16), out, b, u64(2))
    return True


@loop
def encode_line(w, importance, most, out):
    """Fill out [B, 20] of Q4_1 (most 15) or [B, 24] of Q5_1 (most 31).

    Return False if a weight is not finite, or a scale is beyond float16.
    """
    num_blocks, per_row = u64(w.shape[0]), u64(importance.shape[0])
    x, v = np.empty((per_row, BLOCK), f32), np.empty((per_row, BLOCK), f32)
    codes, room = np.empty(BLOCK, i32), np.empty(BLOCK, i32)
    for first in range(u64(0), num_blocks, per_row):
        if not _load_row(w, first, importance, x, v):
            return False
        for c in range(per_row):
            b = u64(first + c)
            d, m = _line(x[c], v[c], most, codes, room)
            if not (store_finite_half(out, b, u64(0), d) and store_finite_half(out, b, u64(2), m)):
                return False
            _store_codes(codes, most == i32(31), out, b, u64(4))
    return True


@inline
def _load_row(w, first, importance, x, v):
    """Fill in a row's weights and what their errors weigh; return False if one is too large."""
    total, below = f32(0), True
    for c in range(u64(x.shape[0])):
        for j in range(BLOCK):
            x[c, j] = as_float(w[u64(first + c), j])
            total = f32(total + f32(x[c, j] * x[c, j]))
            below = below and abs(x[c, j]) < LARGEST
    mean = f32(total / f32(x.size))
    for c in range(u64(x.shape[0])):
        for j in range(BLOCK):
            v[c, j] = f32(importance[c, j] * np.sqrt(f32(mean + f32(x[c, j] * x[c, j]))))
    return below


@loop
def _symmetric(x, v, most, codes, room):
    """Fill in codes from 0 to 2 * most - 1 and return their scale: `make_qx_quants`."""
    top, peak = f32(0), f32(0)
    for j in range(BLOCK):
        if abs(x[j]) > top:
            top, peak = abs(x[j]), x[j]
    codes[:] = 0
    if top < SMALLEST:
        return f32(0)
    scale, best = f32(0), f32(0)
    for attempt in range(19):
        # The plain scale comes first, and is not tried again.
        step = 0 if attempt == 0 else (attempt - 10 if attempt < 10 else attempt - 9)
        inverse = f32(f32(-f32(f32(most) + f32(f32(0.1) * f32(step)))) / peak)
        dot, square = f32(0), f32(0)
        for j in range(BLOCK):
            code = min(max(_nearest(f32(inverse * x[j])), i32(-most)), i32(most - i32(1)))
            room[j] = i32(code + most)
            dot = f32(dot + f32(f32(v[j] * x[j]) * f32(code)))
            square = f32(square + f32(f32(v[j] * f32(code)) * f32(code)))
        better = square > f32(0) and f32(dot * dot) > f32(best * square)
        if attempt == 0 or better:
            scale = f32(dot / square) if square != f32(0) else f32(0)
            best = f32(scale * dot)
            copy_into(codes, room)
    return scale


@loop
def _line(x, v, most, codes, room):
    """Fill in codes from 0 to most and return their scale and minimum: `make_qkx3_quants`."""
    least, largest, sum_v, sum_x = x[0], x[0], f32(0), f32(0)
    for j in range(BLOCK):
        least, largest = min(least, x[j]), max(largest, x[j])
        sum_v = f32(sum_v + v[j])
        sum_x = f32(sum_x + f32(v[j] * x[j]))
    least = min(least, f32(0))
    codes[:] = 0
    if largest <= least:
        return f32(0), least
    inverse = f32(f32(most) / f32(largest - least))
    scale = f32(f32(1) / inverse)
    for j in range(BLOCK):
        codes[j] = min(max(_nearest(f32(inverse * f32(x[j] - least))), i32(0)), most)
    best = _error(x, v, codes, scale, least)
    for step in range(37):
        up = f32(f32(f32(-0.9) + f32(f32(0.05) * f32(step))) + f32(most))
        inverse = f32(up / f32(largest - least))
        fitted, slope, start = _fit(x, v, sum_v, sum_x, inverse, least, most, room)
        if fitted:
            error = _error(x, v, room, slope, start)
            if error < best:
                best, scale, least = error, slope, start
                copy_into(codes, room)
    return scale, least


@inline
def _fit(x, v, sum_v, sum_x, inverse, least, most, room):
    """Fill in codes; return whether there is a line of least squares for them, its d and its m."""
    sum_l, sum_ll, sum_xl = f32(0), f32(0), f32(0)
    for j in range(BLOCK):
        y = f32(inverse * f32(x[j] - least))
        room[j] = _nearest(min(y, f32(most))) if y > f32(0) else i32(0)
        vl = f32(v[j] * f32(room[j]))
        sum_l = f32(sum_l + vl)
        sum_ll = f32(sum_ll + f32(vl * f32(room[j])))
        sum_xl = f32(sum_xl + f32(vl * x[j]))
    spread = f32(f32(sum_v * sum_ll) - f32(sum_l * sum_l))
    if not spread > f32(0):
        return False, f32(0), f32(0)
    slope = f32(f32(f32(sum_v * sum_xl) - f32(sum_x * sum_l)) / spread)
    start = f32(f32(f32(sum_ll * sum_x) - f32(sum_l * sum_xl)) / spread)
    if start > f32(0):
        slope, start = f32(sum_xl / sum_ll), f32(0)
    return True, slope, start


@inline
def _error(x, v, codes, scale, least):
    """Return sum(v e^2) of a line."""
    total = f32(0)
    for j in range(BLOCK):
        e = f32(f32(f32(scale * f32(codes[j])) + least) - x[j])
        total = f32(total + f32(v[j] * f32(e * e)))
    return total


@inline
def _nearest(x):
    """Return the nearest integer, ties to even, of |x| < 2^22."""
    return i32(i32(u32(as_bits(f32(x + f32(12582912))) & u32(0x7FFFFF))) - i32(0x400000))


@inline
def _store_codes(codes, five, out, b, at):
    """Write 32 codes of five bits or of four."""
    if five:
        store_five_bits(codes, out, b, at)
    else:
        for j in range(HALF):
            out[b, u64(at + j)] = u8(codes[j] | i32(codes[u64(j + HALF)] << i32(4)))
