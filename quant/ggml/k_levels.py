"""The loops that round what scales the blocks of a super-block: s ~ d l, with l in 0..n, d float16.

By the largest of the super-block, or, with an importance, by a search for the d that leaves the
least sum(V (s - d l)^2), V being the sum of v of the block: see `k_lines`.

Bytes are those of ggml's C (`make_qp_quants`): the same float32 operations in the same order. Each
lane of a vector has a super-block of its own. Their number is a multiple of LANES.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.lane_types import LANES
from quant.ggml.lanes import choose, floats, gather, load, nearest, splat, store
from quant.numba_ops import as_bits, inline, loop

u32, u64, i32, f32 = np.uint32, np.uint64, np.int32, np.float32

W = u64(LANES)
SMALLEST = f32(1e-15)


@loop
def levels(values, most, out, unit):
    """Fill in levels [B n] int32 of values [B n], and what a level is worth, float32 [B].

    A level is what ggml keeps of it in a byte: a negative value, which hardly any search returns,
    wraps. Levels beyond `most` are left to `k_store`.
    """
    num_super = u64(unit.size)
    n = u64(values.size) // num_super
    for b in range(num_super):
        top = f32(0)
        for k in range(b * n, (b + u64(1)) * n):
            top = max(top, values[k])
        inverse = f32(most / top) if top > f32(0) else f32(0)
        unit[b] = f32(top / most)
        for k in range(b * n, (b + u64(1)) * n):
            rounded = as_bits(f32(f32(inverse * values[k]) + f32(12582912)))
            out[k] = i32(rounded & u32(0xFF))


@loop
def weighted_levels(values, sums, most, out, unit):
    """Fill in levels [B n] int32 of values [B n] weighed by sums [B n], and their unit [B]."""
    num_super = u64(unit.size)
    n = u64(values.size) // num_super
    x, v, q = np.empty(32 * W, f32), np.empty(32 * W, f32), np.empty(32 * W, f32)
    for b in range(u64(0), num_super, W):
        for k in range(n):
            store(x, k * W, gather(values, b * n + k, n))
            store(v, k * W, gather(sums, b * n + k, n))
        store(unit, b, _search_levels(x, v, q, n * W, splat(most)))
        for k in range(n):
            for i in range(W):
                out[(b + i) * n + k] = i32(q[k * W + i])


@inline
def _search_levels(x, v, q, size, n):
    """Fill in the levels q of LANES super-blocks; return what one is worth."""
    zero, one = splat(f32(0)), splat(f32(1))
    top = zero
    for j in range(u64(0), size, W):
        top = choose(top > load(x, j), top, load(x, j))
    some = splat(SMALLEST) <= top
    inverse = n / top
    best = _level_error(x, v, size, inverse, one / inverse, n, first=True)
    for t in range(-4, 5):
        if t != 0:
            slope = (splat(f32(f32(0.1) * f32(t))) + n) / top
            error = _level_error(x, v, size, slope, one / slope, n, first=False)
            inverse, best = choose(error < best, slope, inverse), choose(error < best, error, best)
    dot, square = zero, zero
    for j in range(u64(0), size, W):
        level = _level(inverse * load(x, j), n)
        dot = dot + load(v, j) * load(x, j) * level
        square = square + load(v, j) * level * level
        store(q, j, _wrap(level))
    for _ in range(5):
        dot, square = _move_levels(x, v, q, size, n, dot, square)
    for j in range(u64(0), size, W):
        store(q, j, choose(some, load(q, j), zero))
    return choose(some & (square > zero), dot / square, zero)


@inline
def _level(y, n):
    """Return the nearest whole number up to n."""
    level = floats(nearest(y))
    return choose(n < level, n, level)


@inline
def _wrap(level):
    """Return what a byte keeps of a level."""
    return floats(nearest(level) & splat(i32(255)))


@inline
def _level_error(x, v, size, inverse, scale, n, first):
    """Return what rounding with one scale loses; ggml does not clip the levels of the first."""
    total = splat(f32(0))
    for j in range(u64(0), size, W):
        y = inverse * load(x, j)
        e = load(x, j) - scale * (_wrap(y) if first else _level(y, n))
        total = total + load(v, j) * e * e
    return total


@inline
def _move_levels(x, v, q, size, n, dot, square):
    """Move each level to where the others want it, if less is lost; return the sums."""
    zero = splat(f32(0))
    for j in range(u64(0), size, W):
        a, b, level = load(x, j), load(v, j), load(q, j)
        rest, rest_square = dot - b * a * level, square - b * level * level
        moved = _level(a * rest_square / rest, n)
        new, new_square = rest + b * a * moved, rest_square + b * moved * moved
        better = (rest > zero) & (rest_square > zero) & (moved != level)
        better = better & (new * new * square > dot * dot * new_square)
        store(q, j, choose(better, _wrap(moved), level))
        dot, square = choose(better, new, dot), choose(better, new_square, square)
    return dot, square
