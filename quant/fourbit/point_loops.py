"""The loops that choose points and signs of IQ2 and IQ3 by GPTQ, eight columns at a time.

    walk_points    GPTQ within a block of columns: the best points, what they lose moved on
    settle_points  the points of each eight again, given all other columns, and levels near theirs

The metric of an eight is what its errors cost when the columns behind it make up for them, or when
all others stay. q = base (2 l + 1) u for the units u that are searched for.

Sums run over columns in order, each product rounded by itself or once with its sum, whichever rows
come together, as in `walk`.

Arrays: w [N, K], upper [K, K] in the order of the factor; metric [E, 8, 8] of all eights; steps
[N, E]; points int32 [N, E * 8 / C], signs uint8 [N, E]; others as in `point_search`. In loops g is
an eight, e one of those that share a level, r a row, i and k columns.
"""

from __future__ import annotations

import numpy as np

from quant.fourbit.point_search import EIGHT, is_minus, search, tables
from quant.numba_ops import copy_into, fma, inline, loop

u8, u32, u64, i32, f32 = np.uint8, np.uint32, np.uint64, np.int32, np.float32

SUPER, MOST = u64(256), i32(15)


@loop
def walk_points(w, upper, metric, steps, grid, even, first, points, signs, missed):
    """Take the best points of the columns from `first` on, given that the ones behind make up.

    missed  [N, b], what each column lost, over the factor's diagonal
    """
    size, parts = u64(missed.shape[1]), u64(EIGHT // u64(grid.shape[0]))
    table, made, c, u = tables(grid, u64(1))
    for start in range(u64(0), size, EIGHT):
        at = u64(first + start)
        g = u64(at // EIGHT)
        made[:] = False
        for r in range(u64(w.shape[0])):
            step, own = steps[r, g], points[r, g * parts : (g + u64(1)) * parts]
            u[:] = f32(0)
            if step > f32(0):
                minus = _begin(w[r], at, metric[g], step, even, c, u)
                signs[r, g] = search(metric[g], grid, even, table[0], made[0], c, u, own, minus)
            for i in range(EIGHT):
                j = u64(at + i)
                error = f32(f32(w[r, j] - f32(u[i] * step)) / upper[j, j])
                missed[r, u64(start + i)] = error
                for k in range(u64(j + u64(1)), u64(first + size)):
                    w[r, k] = fma(f32(-error), upper[j, k], w[r, k])


@inline
def _begin(w, at, metric, step, even, c, u):
    """Fill in c, and for units the weights over the step; return the signs to begin with."""
    minus, count, least, wrong = u32(0), u32(0), f32(np.inf), u32(0)
    for i in range(EIGHT):
        u[i] = f32(w[u64(at + i)] / step)
    for i in range(EIGHT):
        c[i] = _times(metric, u, i, f32(0))
        negative = u32(u[i] < f32(0))
        minus, count = u32(minus | u32(negative << u32(i))), u32(count + negative)
        loss = f32(f32(metric[i, i] * u[i]) * u[i])
        if loss < least:
            least, wrong = loss, u32(i)
    if even and count % u32(2) == u32(1):
        minus = u32(minus ^ u32(u32(1) << wrong))
    return u8(minus)


@inline
def _times(metric, x, i, total):
    """Return the sum and a row of the metric times x."""
    for k in range(EIGHT):
        total = fma(metric[i, k], x[k], total)
    return total


@loop
def settle_points(
    pull, hessian, added, metric, base, level, shifts, grid, even, first, points, signs, moved
):
    """Improve the points of the columns from `first` on, and their levels.

    pull    [N, b], the slopes (w - q) H of these columns, which follow; H [K, K]
    base    [N, K / 256], of super-blocks
    level   int32 [N, L], l of the columns that share it
    shifts  int32, what is added to levels to try others; the first is 0
    moved   [N, b], filled with the change of q
    """
    size, parts = u64(moved.shape[1]), u64(EIGHT // u64(grid.shape[0]))
    block = u64(u64(hessian.shape[0]) // u64(level.shape[1]))
    eights = u64(block // EIGHT)
    room = tables(grid, eights)
    near, old, change = np.empty((3, block), np.float32)
    moved[:] = f32(0)
    for start in range(u64(0), size, block):
        at = u64(first + start)
        a, g = u64(at // block), u64(at // EIGHT)
        room[1][:] = False
        for r in range(u64(pull.shape[0])):
            d = base[r, u64(at // SUPER)]
            if not d > f32(0):
                continue
            own, minus = points[r, g * parts : (g + eights) * parts], signs[r, g : g + eights]
            _load(grid, own, minus, _step(d, level[r, a]), old)
            change[:] = f32(0)
            copy_into(near, pull[r, start : start + block])
            level[r, a] = _best_level(
                near, hessian, at, metric, g, old, d, level[r, a], shifts, grid, even, room,
                own, minus, change,
            )  # fmt: skip
            for i in range(block):
                moved[r, u64(start + i)] = change[i]
                _move(pull[r], change[i], hessian, added, first, u64(start + i))


@inline
def _best_level(
    near, hessian, at, metric, g, old, d, level, shifts, grid, even, room, points, signs, change
):  # fmt: skip
    """Take the best of some levels and its points; fill in the change of q; return the level."""
    before, slopes, tried = (points.copy(), signs.copy()), near.copy(), np.empty_like(near)
    least, best = f32(np.inf), level
    for n in range(u64(shifts.size)):
        other = i32(level + shifts[n])
        if other < i32(0) or other > MOST:
            continue
        own, minus = before[0].copy(), before[1].copy()
        copy_into(near, slopes)
        cost = _try_level(
            near, hessian, at, metric, g, old, _step(d, other), grid, even, room, own, minus, tried
        )
        if cost < least:
            least, best = cost, other
            copy_into(points, own)
            copy_into(signs, minus)
            for i in range(u64(change.shape[0])):
                change[i] = f32(tried[i] - old[i])
    return best


@inline
def _step(d, level):
    """Return what a level of a point is worth."""
    return f32(d * f32(i32(i32(2) * level) + i32(1)))


@inline
def _load(grid, points, signs, step, q):
    """Fill in what points and signs decode to."""
    columns = u64(grid.shape[0])
    for j in range(u64(q.shape[0])):
        value = f32(step * grid[u64(j % columns), points[u64(j // columns)]])
        q[j] = f32(-value) if is_minus(signs[u64(j // EIGHT)], u64(j % EIGHT)) else value


@loop
def _try_level(
    near, hessian, at, metric, g, old, step, grid, even, room, points, signs, tried
):  # fmt: skip
    """Fill in the best points under a step, eight by eight; return what the error changes by.

    near   slopes of the columns that share the step, which follow
    old    what these columns have, and `tried` what they get
    """
    table, made, c, u = room
    parts, cost = u64(EIGHT // u64(grid.shape[0])), f32(0)
    change = np.empty(EIGHT, np.float32)
    for e in range(u64(signs.shape[0])):
        first, own = u64(e * EIGHT), points[e * parts : (e + u64(1)) * parts]
        m = metric[u64(g + e)]
        for i in range(EIGHT):
            u[i] = f32(old[u64(first + i)] / step)
        for i in range(EIGHT):
            c[i] = _times(m, u, i, f32(near[u64(first + i)] / step))
        signs[e] = search(m, grid, even, table[e], made[e], c, u, own, signs[e])
        for i in range(EIGHT):
            tried[u64(first + i)] = f32(u[i] * step)
            change[i] = f32(tried[u64(first + i)] - old[u64(first + i)])
        for i in range(EIGHT):
            slope = _times(m, change, i, f32(f32(-2) * near[u64(first + i)]))
            cost = fma(slope, change[i], cost)
        for i in range(EIGHT):
            _follow(near, change[i], hessian[u64(u64(at + first) + i)], at)
    return cost


@inline
def _move(pull, change, hessian, added, first, i):
    """Change the slope of the block with q of a column."""
    if change != f32(0):
        _follow(pull, change, hessian[u64(first + i)], first)
        pull[i] = fma(f32(-change), added, pull[i])


@inline
def _follow(slopes, change, row, first):
    """Change slopes, of the columns from `first` on, with q of a column whose row of H it is."""
    for k in range(u64(slopes.shape[0])):
        slopes[k] = fma(f32(-change), row[u64(first + k)], slopes[k])
