"""Of eight columns the points of IQ2 or IQ3, and signs, with the least error under a metric.

Eight columns have one point of eight levels, or two of four, and as many signs, in some types an
even number of them minus. A unit is a level with its sign. What is looked for are the units u with
the least u M u - 2 c u, M being a metric [8, 8]. In turn

    a point   the best of the grid, given all signs and the other point
    signs     the one, or of an even number the two, whose change helps most; again until none does

as long as one of these changes; 99 of 100 times no other points and signs are better. u M u / 2 of
all points is looked up: rows of a weight share M, so a table has it for each pattern of signs that
came by, up to a change of all signs.

Arrays: metric [8, 8]; grid [C, P], C levels of P points; table [8 / C, 2^(C - 1), P] and made,
whether a row of it is filled in; c and u [8]; points int32 [8 / C]; all others float32. Of signs a
bit is 1 for minus. In loops i and k are columns of the eight, p a point.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.lane_types import LANES
from quant.ggml.lanes import choose, load, splat, store
from quant.numba_ops import fma, inline, loop

u8, u32, u64, i32, f32 = np.uint8, np.uint32, np.uint64, np.int32, np.float32

EIGHT, W = u64(8), u64(LANES)
# A search that goes on for longer goes round in a circle of roundings.
ROUNDS = u64(8)


@inline
def tables(grid, eights):
    """Return memory for so many eights: tables and which rows they have; c and u."""
    columns = u64(grid.shape[0])
    parts, rows = u64(EIGHT // columns), u64(u64(1) << u64(columns - u64(1)))
    table = np.empty((eights, parts, rows, u64(grid.shape[1])), np.float32)
    made = np.empty((eights, parts, rows), np.bool_)
    return table, made, np.empty(EIGHT, np.float32), np.empty(EIGHT, np.float32)


@inline
def is_minus(signs, i):
    """Return whether the sign of a column is minus."""
    return u32(u32(signs) >> u32(i)) & u32(1) == u32(1)


@loop
def search(metric, grid, even, table, made, c, u, points, signs):
    """Improve points and units u; return the signs.

    Where u are no units of points yet, the best points of these signs are taken first.
    """
    minus, parts = u32(signs), u64(EIGHT // u64(grid.shape[0]))
    for _ in range(ROUNDS):
        changed = False
        for part in range(parts):
            if _better_point(metric, grid, table[part], made[part], c, u, points, part, minus):
                changed = True
        flipped = _better_signs(metric, even, c, u, minus)
        if flipped == minus and (parts == u64(1) or not changed):
            break
        minus = flipped
    return u8(minus)


@inline
def _better_point(metric, grid, table, made, c, u, points, part, minus):
    """Take the best point under these signs; return whether it is another one."""
    columns, ones = u64(grid.shape[0]), u32(u32(u32(1) << u32(grid.shape[0])) - u32(1))
    first = u64(part * columns)
    pattern = u32(u32(minus >> u32(first)) & ones)
    linear = np.empty(columns, np.float32)
    for i in range(columns):
        total = c[u64(first + i)]
        for k in range(EIGHT):
            inside = k >= first and k < u64(first + columns)
            total = total if inside else fma(f32(-metric[u64(first + i), k]), u[k], total)
        linear[i] = f32(-total) if is_minus(pattern, i) else total
    row = u64(min(pattern, u32(pattern ^ ones)))
    if not made[row]:
        made[row] = True
        _fill(metric, grid, first, row, table[row])
    best = _least(table[row], grid, linear)
    changed = False
    for i in range(columns):
        unit = f32(-grid[i, best]) if is_minus(pattern, i) else grid[i, best]
        changed = changed or unit != u[u64(first + i)]
        u[u64(first + i)] = unit
    points[part] = i32(best)
    return changed


@inline
def _fill(metric, grid, first, pattern, row):
    """Fill in u M u / 2 of every point under a pattern of signs."""
    columns = u64(grid.shape[0])
    row[:] = f32(0)
    for i in range(columns):
        for k in range(u64(i + u64(1))):
            m = metric[u64(first + i), u64(first + k)]
            m = f32(m * f32(0.5)) if i == k else m
            m = f32(-m) if is_minus(pattern, i) != is_minus(pattern, k) else m
            for p in range(u64(row.shape[0])):
                row[p] = fma(m, f32(grid[i, p] * grid[k, p]), row[p])


@inline
def _least(row, grid, linear):
    """Return the point with the least row - linear * levels, of several the first of its lane."""
    flat, num_points = grid.reshape(-1), u64(grid.shape[1])
    least, place, at = splat(f32(np.inf)), splat(i32(0)), splat(i32(0))
    for p in range(u64(0), num_points, W):
        cost = load(row, p)
        for i in range(u64(linear.shape[0])):
            cost = cost - splat(linear[i]) * load(flat, u64(u64(i * num_points) + p))
        better = cost < least
        least, place = choose(better, cost, least), choose(better, at, place)
        at = at + splat(i32(1))
    costs, places = np.empty(W, np.float32), np.empty(W, np.int32)
    store(costs, u64(0), least)
    store(places, u64(0), place)
    lane = u64(0)
    for i in range(u64(1), W):
        lane = u64(i) if costs[i] < costs[lane] else lane
    return u64(u64(u64(places[lane]) * W) + lane)


@inline
def _better_signs(metric, even, c, u, minus):
    """Change signs of u as long as that helps; return all."""
    alone = np.empty(EIGHT, np.float32)
    for _ in range(EIGHT):
        for i in range(EIGHT):
            alone[i] = _change_alone(metric, c, u, i)
        one, other = _best_pair(metric, u, alone) if even else _best_sign(alone)
        if one == EIGHT:
            break
        minus = _turn(u, minus, one)
        if even:
            minus = _turn(u, minus, other)
    return minus


@inline
def _change_alone(metric, c, u, i):
    """Return what a change of one sign adds, over 4."""
    slope = c[i]
    for k in range(EIGHT):
        slope = fma(f32(-metric[i, k]), u[k], slope)
    return f32(u[i] * fma(metric[i, i], u[i], slope))


@inline
def _best_sign(alone):
    """Return the sign that helps most, twice, EIGHT if none does."""
    least, one = f32(0), u64(EIGHT)
    for i in range(EIGHT):
        if alone[i] < least:
            least, one = alone[i], u64(i)
    return one, one


@inline
def _best_pair(metric, u, alone):
    """Return the two signs that help most together, EIGHT if none do."""
    least, one, other = f32(0), u64(EIGHT), u64(EIGHT)
    for i in range(EIGHT):
        for k in range(i):
            both = f32(f32(u[i] * u[k]) * metric[i, k])
            change = f32(f32(alone[i] + alone[k]) + f32(f32(2) * both))
            if change < least:
                least, one, other = change, u64(i), u64(k)
    return one, other


@inline
def _turn(u, minus, i):
    """Change a sign; return all."""
    u[i] = f32(-u[i])
    return u32(minus ^ u32(u32(1) << u32(i)))
