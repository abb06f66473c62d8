"""The loops that fit scales for Q3_K and Q6_K: one signed scale for each block of 16 columns.

    w ~ d l q        Q3_K: q in -4..3, l in -32..31; Q6_K: q in -32..31, l in -128..127; d float16

`fit` tries the scales w_max / -(n + t / 10), t = -9..9, w_max being the weight of largest
magnitude, takes the codes of each, and keeps the one whose scale of least squares leaves the least
sum(v (w - s q)^2). Q3_K without an importance (`fit_by_moves`) takes the codes of t = 0 and moves
one after the other to where the others want it, if less is lost.

    v = w^2                          without an importance
    v = g                            Q6_K
    v = g sqrt(2 mean(w^2) + w^2)    Q3_K; the mean is the super-block's

`levels` rounds s to d l by the largest of the super-block; `weighted_levels`, for Q3_K with an
importance, searches d as scales were searched, weighed by the sums of v.

Bytes are those of ggml's C (`make_qx_quants`, `make_q3_quants`): the same float32 operations in the
same order. What makes them fast: each lane of a vector has a block, or a super-block, of its own.

Arrays: as in `k_lines`; fits float32 [3, 16 B]: scale, slope of the search's codes, sum of v.
kept float32 [B, 256]: codes of `fit_by_moves`, plus 4.
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
    splat,
    store,
    whole,
)
from quant.numba_ops import as_bits, inline, loop

u32, u64, i8, i32, f32 = np.uint32, np.uint64, np.int8, np.int32, np.float32

W = u64(LANES)
COLUMNS = u64(16)
SIZE = u64(COLUMNS * W)
SMALLEST = f32(1e-15)


@loop
def fit(w, importance, first, most, fits):
    """Fill in the fits of super-blocks, the first of which is number `first` of its matrix.

    most  32: Q6_K; 4: Q3_K with an importance
    """
    flat, num_blocks = w.reshape(-1), u64(fits.shape[1])
    out = fits.reshape(-1)
    weighted, by_spread = importance.shape[0] > 0, most < f32(32)
    spread = np.zeros(w.shape[0], f32)
    x, v, vx = np.empty(SIZE, f32), np.empty(SIZE, f32), np.empty(SIZE, f32)
    if by_spread:
        mean_squares(flat, f32(2), spread)
    for block in range(u64(0), num_blocks, W):
        _turn(flat, block, x)
        if weighted:
            sigma = lay_importance(importance, spread, first, block, COLUMNS, v)
            if by_spread:
                times_root(x, sigma, SIZE, v)
        else:
            for j in range(u64(0), SIZE, W):
                store(v, j, load(x, j) * load(x, j))
        total = splat(f32(0))
        for j in range(u64(0), SIZE, W):
            total = total + load(v, j)
            store(vx, j, load(v, j) * load(x, j))
        scale, slope = _search(x, v, vx, most)
        store(out, block, scale)
        store(out, block + num_blocks, slope)
        store(out, block + u64(2) * num_blocks, total)


@inline
def _turn(flat, block, x):
    """Lay LANES blocks side by side."""
    for j in range(COLUMNS):
        store(x, j * W, gather(flat, block * COLUMNS + j, COLUMNS))


@inline
def _peak(x):
    """Return the largest magnitude of each block, and the first value that has it."""
    top, peak = splat(f32(0)), splat(f32(0))
    for j in range(u64(0), SIZE, W):
        a = load(x, j)
        above = abs(a) > top
        top, peak = choose(above, abs(a), top), choose(above, a, peak)
    return top, peak


@inline
def _search(x, v, vx, most):
    """Return the scale of LANES blocks and the slope of its codes, zeros for a block of zeros."""
    zero = splat(f32(0))
    top, peak = _peak(x)
    slope, scale, best = splat(f32(-most)) / peak, zero, zero
    for t in range(-10, 10):  # -10: the plain scale, which comes first and is not tried again
        if t != 0:
            step = f32(0) if t == -10 else f32(f32(0.1) * f32(t))
            new = splat(f32(-f32(most + step))) / peak
            dot, square = _sums(x, v, vx, new, most)
            better = square != zero
            if t > -10:
                better = (square > zero) & (dot * dot > best * square)
            scale, slope = choose(better, dot / square, scale), choose(better, new, slope)
            best = choose(better, scale * dot, best)
    some = splat(SMALLEST) <= top
    return choose(some, scale, zero), choose(some, slope, zero)


@inline
def _sums(x, v, vx, slope, most):
    """Return sum(v w q) and sum(v q^2) of one slope's codes."""
    low, high = splat(f32(-most)), splat(f32(most - f32(1)))
    dot, square = splat(f32(0)), splat(f32(0))
    for j in range(u64(0), SIZE, W):
        q = whole(clamp(slope * load(x, j), low, high))
        dot, square = dot + load(vx, j) * q, square + load(v, j) * q * q
    return dot, square


@loop
def fit_by_moves(w, fits, kept):
    """Fill in the scales of Q3_K and the codes that the search ends with; no slope, no sum."""
    flat, out, codes = w.reshape(-1), fits.reshape(-1), kept.reshape(-1)
    x, q = np.empty(SIZE, f32), np.empty(SIZE, f32)
    zero, low, high = splat(f32(0)), splat(f32(-4)), splat(f32(3))
    for block in range(u64(0), u64(fits.shape[1]), W):
        _turn(flat, block, x)
        top, peak = _peak(x)
        slope = low / peak
        dot, square = zero, zero
        for j in range(u64(0), SIZE, W):
            a = load(x, j)
            code = whole(clamp(slope * a, low, high))
            dot, square = dot + a * a * a * code, square + a * a * code * code
            store(q, j, code)
        for _ in range(5):
            dot, square, settled = _move(x, q, dot, square)
            if everywhere(settled):
                break
        some = splat(SMALLEST) <= top
        store(out, block, choose(some & (square > zero), dot / square, zero))
        for j in range(u64(0), SIZE, W):
            store(q, j, choose(some, load(q, j) - low, zero))
        for i in range(W):
            for j in range(COLUMNS):
                codes[(block + i) * COLUMNS + j] = q[j * W + i]


@inline
def _move(x, q, dot, square):
    """Move each code to where the others want it, if less is lost.

    Return the sums, and in which blocks nothing moved.
    """
    zero, low, high = splat(f32(0)), splat(f32(-4)), splat(f32(3))
    settled = low < high
    for j in range(u64(0), SIZE, W):
        a, code = load(x, j), load(q, j)
        v = a * a
        rest, rest_square = dot - v * a * code, square - v * code * code
        moved = clamp(floats(nearest(a * rest_square / rest)), low, high)
        new, new_square = rest + v * a * moved, rest_square + v * moved * moved
        better = (rest > zero) & (moved != code) & (new_square > zero)
        better = better & (new * new * square > dot * dot * new_square)
        settled = choose(better, low > high, settled)
        store(q, j, choose(better, moved, code))
        dot, square = choose(better, new, dot), choose(better, new_square, square)
    return dot, square, settled


@loop
def levels(scales, most, out, unit):
    """Fill in levels [16 B] int32, -most..most - 1, of scales [16 B], and their unit [B]."""
    for b in range(u64(unit.size)):
        top, peak = f32(0), f32(0)
        for k in range(b * COLUMNS, (b + u64(1)) * COLUMNS):
            above = abs(scales[k]) > top
            top, peak = (abs(scales[k]), scales[k]) if above else (top, peak)
        inverse = f32(f32(-most) / peak)
        some = top >= SMALLEST if most > f32(32) else top > f32(0)
        unit[b] = f32(f32(1) / inverse) if some else f32(0)
        empty = i32(0) if most > f32(32) else i32(-32)
        for k in range(b * COLUMNS, (b + u64(1)) * COLUMNS):
            rounded = as_bits(f32(f32(inverse * scales[k]) + f32(12582912)))
            level = i32(i32(rounded & u32(0x7FFFFF)) - i32(0x400000))
            # ggml has put Q3_K's into a byte by now.
            level = level if most > f32(32) else i32(i8(level))
            level = min(max(level, i32(-most)), i32(most - f32(1)))
            out[k] = level if some else empty


@loop
def weighted_levels(scales, sums, out, unit):
    """Fill in levels [16 B] int32, -32..31, of scales [16 B] weighed by sums [16 B]; units [B]."""
    x, v, vx = np.empty(SIZE, f32), np.empty(SIZE, f32), np.empty(SIZE, f32)
    low, high = splat(f32(-32)), splat(f32(31))
    for b in range(u64(0), u64(unit.size), W):
        for j in range(COLUMNS):
            store(x, j * W, gather(scales, b * COLUMNS + j, COLUMNS))
            store(v, j * W, gather(sums, b * COLUMNS + j, COLUMNS))
        for j in range(u64(0), SIZE, W):
            store(vx, j, load(v, j) * load(x, j))
        top, _ = _peak(x)
        scale, slope = _search(x, v, vx, f32(32))
        store(unit, b, scale)
        some = splat(SMALLEST) <= top
        for j in range(u64(0), SIZE, W):
            q = whole(clamp(slope * load(x, j), low, high))
            store(vx, j, choose(some, q, low))
        for i in range(W):
            for j in range(COLUMNS):
                out[(b + i) * COLUMNS + j] = i32(vx[j * W + i])
