"""Levels 0..n of values that are not negative, and what one is worth, on the GPU.

Chosen for: IQ2_XXS, by i_fit.

`quant.ggml.k_levels` has the search (ggml's `make_qp_quants`), whose operations these are, in their
order. One thread has the values in its registers.
"""

from __future__ import annotations

from runtime.kernels.encode.k_parts import inverse, nearest
from runtime.kernels.launch import jit, tl


@jit
def search_levels(x, v, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Return what a level is worth, and the levels, of values weighed by v."""
    top = tl.full(x[0].shape, 0.0, tl.float32)
    for j in tl.static_range(COLUMNS):
        top = tl.where(top > x[j], top, x[j])
    some = top >= 1e-15
    slope = tl.div_rn(tl.full(top.shape, N, tl.float32), top)
    best, t = _first_error(x, v, slope, COLUMNS), tl.full(top.shape, -4.0, tl.float32)
    for _ in range(9):
        new = tl.div_rn(t * 0.1 + N, top)
        error = _error(x, v, new, N, COLUMNS)
        better = (error < best) & (t != 0.0)
        slope, best = tl.where(better, new, slope), tl.where(better, error, best)
        t += 1.0
    dot, square, q = top * 0.0, top * 0.0, ()
    for j in tl.static_range(COLUMNS):
        level = _level(slope * x[j], N)
        dot, square = dot + v[j] * x[j] * level, square + v[j] * level * level
        q += (_wrapped(level),)  # type: ignore[assignment]
    for _ in range(5):
        dot, square, q = _move(x, v, q, dot, square, N, COLUMNS)
    levels = ()
    for j in tl.static_range(COLUMNS):
        levels += (tl.where(some, q[j], 0.0),)  # type: ignore[assignment]
    return tl.where(some & (square > 0), tl.div_rn(dot, square), 0.0), levels


@jit
def _level(y, N: tl.constexpr):
    """Return the nearest whole number up to N."""
    return tl.minimum(nearest(y).to(tl.float32), N)


@jit
def _wrapped(level):
    """Return what a byte keeps of a level."""
    return (nearest(level) & 255).to(tl.float32)


@jit
def _first_error(x, v, slope, COLUMNS: tl.constexpr):
    """Return what rounding with the first slope loses, whose levels ggml does not clip."""
    total, scale = slope * 0.0, inverse(slope)
    for j in tl.static_range(COLUMNS):
        e = x[j] - scale * _wrapped(slope * x[j])
        total += v[j] * e * e
    return total


@jit
def _error(x, v, slope, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Return what rounding with one slope loses."""
    total, scale = slope * 0.0, inverse(slope)
    for j in tl.static_range(COLUMNS):
        e = x[j] - scale * _level(slope * x[j], N)
        total += v[j] * e * e
    return total


@jit
def _move(x, v, q, dot, square, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Move each level to where the others want it, if less is lost; return sums and levels."""
    moved_q = ()
    for j in tl.static_range(COLUMNS):
        rest = dot - v[j] * x[j] * q[j]
        rest_square = square - v[j] * q[j] * q[j]
        moved = _level(tl.div_rn(x[j] * rest_square, rest), N)
        new, new_square = rest + v[j] * x[j] * moved, rest_square + v[j] * moved * moved
        better = (rest > 0) & (rest_square > 0) & (moved != q[j])
        better = better & (new * new * square > dot * dot * new_square)
        moved_q += (tl.where(better, _wrapped(moved), q[j]),)  # type: ignore[assignment]
        dot, square = tl.where(better, new, dot), tl.where(better, new_square, square)
    return dot, square, moved_q
