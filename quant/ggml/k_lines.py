"""The loops that fit lines for Q2_K, Q4_K and Q5_K: a scale and a minimum for each block.

    w ~ d l q - e m        q in 0..n, n = 3, 15, 31; l and m in 0..15 or 0..63; d, e float16

`fit` searches the line s q - m of each block of 16 or 32 columns: it tries slopes near
n / (max - min), takes the codes of each, fits the line of least sum(v (w - s q + m)^2) to them, and
keeps the one that leaves the least error (Q2_K: sum(v |e|)). Codes of the next slope start at the
minimum of the best so far, so that slopes depend on each other.

    v = |w|                          Q2_K
    v = rms of the block + |w|       Q4_K, Q5_K
    v = g sqrt(c mean(w^2) + w^2)    with an importance g; the mean is the super-block's

`k_levels` then rounds s to d l and m to e m.

Bytes are those of ggml's C (`make_qkx2_quants`, `make_qkx3_quants`): the same
float32 operations in the same order. What makes them fast: each lane of a vector has a block of its
own, so that its sums keep their order.

Arrays: w float32 [B, 256], B super-blocks, a multiple of LANES; importance float32 [C, 256], of the
C super-blocks of a row, or [0, 256] for none; fits float32 [5, B n], n blocks each: slope,
minimum, slope and start of the search's codes, sum of v. In loops j counts columns.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.k_weights import lay_importance, mean_squares, times_root
from quant.ggml.lane_types import LANES
from quant.ggml.lanes import (
    choose,
    clamp,
    everywhere,
    floats,
    gather,
    load,
    nearest,
    root,
    splat,
    store,
    whole,
)
from quant.numba_ops import inline, loop

u64, i32, f32 = np.uint64, np.int32, np.float32

W = u64(LANES)
EXACT = f32(2.0**22)  # up to here the bit trick of `nearest` rounds
INFINITE = f32(np.inf)


@loop
def fit(w, importance, first, columns, most, slopes, fits):
    """Fill in the fits of super-blocks, the first of which is number `first` of its matrix.

    slopes  float32 [3]: the first slope is (slopes[0] + most) / (max - min), each further one
            has slopes[1] more; their number
    """
    flat, num_blocks, size = w.reshape(-1), u64(fits.shape[1]), columns * W
    weighted = importance.shape[0] > 0
    spread = np.empty(w.shape[0], f32)
    x, v, q = np.empty(32 * W, f32), np.empty(32 * W, f32), np.empty(32 * W, f32)
    if weighted:
        mean_squares(flat, f32(1) if columns == u64(16) else f32(2), spread)
    for block in range(u64(0), num_blocks, W):
        for j in range(columns):
            store(x, j * W, gather(flat, block * columns + j, columns))
        if weighted:
            sigma = lay_importance(importance, spread, first, block, columns, v)
            times_root(x, sigma, size, v)
        elif columns == u64(32):
            _weigh_by_rms(x, v)
        else:
            for j in range(u64(0), size, W):
                store(v, j, abs(load(x, j)))
        _search(x, v, q, size, most, slopes, weighted, block, fits)


@inline
def _weigh_by_rms(x, v):
    """Fill in the root of the mean square of a block's 32 columns, plus |w|."""
    total = splat(f32(0))
    for j in range(u64(0), u64(32) * W, W):
        total = total + load(x, j) * load(x, j)
    rms = root(total / splat(f32(32)))
    for j in range(u64(0), u64(32) * W, W):
        store(v, j, rms + abs(load(x, j)))


@inline
def _search(x, v, q, size, most, slopes, weighted, block, fits):
    """Fill in the fits of LANES blocks."""
    zero, n = splat(f32(0)), splat(most)
    least = load(x, u64(0))
    high, sum_v, sum_vx = least, load(v, u64(0)), load(v, u64(0)) * least
    for j in range(W, size, W):
        a, b = load(x, j), load(v, j)
        least, high = choose(a < least, a, least), choose(a > high, a, high)
        sum_v, sum_vx = sum_v + b, sum_vx + b * a
    low = choose(least > zero, zero, least)
    flat = high <= low
    absolute = size < u64(32) * W and not weighted
    one, scale, minimum, best = splat(f32(1)), zero, low, zero
    code_slope, code_start = zero, low
    for t in range(-1, i32(slopes[2])):  # -1: the plain line, from which the search starts
        step = f32(0) if t < 0 else f32(slopes[0] + f32(slopes[1] * f32(t)))
        slope = splat(f32(step + most)) / (high - minimum)
        _codes(x, q, size, slope, minimum, least, high, flat, n, weighted and t >= 0)
        if t < 0:
            new_scale, new_minimum, better = one / slope, low, zero < one
        else:
            new_scale, new_minimum, better = _line(x, v, q, size, sum_v, sum_vx)
        error = _error(x, v, q, size, new_scale, new_minimum, absolute)
        if t < 0:  # no code but 0 follows from an infinite slope
            slope = choose(flat | (abs(slope) == splat(INFINITE)), zero, slope)
        else:
            better = better & (error < best)
        code_slope = choose(better, slope, code_slope)
        code_start = choose(better, minimum, code_start)
        best = choose(better, error, best)
        scale = choose(better, new_scale, scale)
        minimum = choose(better, new_minimum, minimum)
    num_blocks = u64(fits.shape[1])
    out = fits.reshape(-1)
    store(out, block, choose(flat, zero, scale))
    store(out, block + num_blocks, zero - choose(flat, low, minimum))
    store(out, block + u64(2) * num_blocks, choose(flat, zero, code_slope))
    store(out, block + u64(3) * num_blocks, choose(flat, zero, code_start))
    store(out, block + u64(4) * num_blocks, sum_v)


@inline
def _codes(x, q, size, slope, start, least, high, flat, n, guarded):
    """Fill in the codes of one slope, clamped to 0..n; if `guarded`, before they are rounded.

    It matters beyond 2^22 only, where a fit starts within an ulp or so of the largest weight: with
    an importance ggml guards since build b11434, and older builds have other bytes there.
    """
    zero = splat(f32(0))
    limit = splat(EXACT)
    inside = (abs(slope * (least - start)) < limit) & (abs(slope * (high - start)) < limit)
    if guarded or everywhere(flat | inside):
        for j in range(u64(0), size, W):
            store(q, j, whole(clamp(slope * (load(x, j) - start), zero, n)))
    else:
        for j in range(u64(0), size, W):
            store(q, j, clamp(floats(nearest(slope * (load(x, j) - start))), zero, n))


@inline
def _line(x, v, q, size, sum_v, sum_vx):
    """Return scale and minimum of least squares for these codes, and where there is one."""
    zero = splat(f32(0))
    sum_q, sum_qq, sum_qx = zero, zero, zero
    for j in range(u64(0), size, W):
        code = load(q, j)
        vq = load(v, j) * code
        sum_q, sum_qq, sum_qx = sum_q + vq, sum_qq + vq * code, sum_qx + vq * load(x, j)
    determinant = sum_v * sum_qq - sum_q * sum_q
    scale = (sum_v * sum_qx - sum_vx * sum_q) / determinant
    minimum = (sum_qq * sum_vx - sum_q * sum_qx) / determinant
    above = minimum > zero
    scale, minimum = choose(above, sum_qx / sum_qq, scale), choose(above, zero, minimum)
    return scale, minimum, determinant > zero


@inline
def _error(x, v, q, size, scale, minimum, absolute):
    """Return the sum of v times the errors' squares, or magnitudes."""
    total = splat(f32(0))
    if absolute:
        for j in range(u64(0), size, W):
            e = scale * load(q, j) + minimum - load(x, j)
            total = total + load(v, j) * abs(e)
    else:
        for j in range(u64(0), size, W):
            e = scale * load(q, j) + minimum - load(x, j)
            total = total + load(v, j) * (e * e)
    return total
