"""Two units of a block at a time, where none alone can be improved.

    unit i one code on, towards what it should be, and with it the best of the others, one code on:
    the error changes by    cost_i + cost_j + 2 x_i x_j H_ij,    cost = x^2 H - 2 x slope

A unit goes first if one code on it is nearly as well off, its own cost within `NEAR` of x^2 H: as
much is gained as if all went first, for a quarter of the work.

Every number is the outcome of one order of float32 operations, as in `quant.fourbit.walk`.

Shape letters: N rows, K columns, G groups, b columns of a block.
"""

from __future__ import annotations

import numpy as np

from quant.numba_ops import fma, inline, loop

u64, f32 = np.uint64, np.float32

NEAR = f32(0.3)


@loop
def pair_block(units, d, zero, slope, hessian, added, end, first, group, moved):
    """Improve pairs of units of the columns from `first` on, row by row.

    units  [N, K], whole numbers         d, zero  [N, G], of groups of so many columns
    slope  [N, K], (w - q) H, with H     hessian  [K, K], `added` to its diagonal
    moved  [N, b], filled with the change of q
    """
    size = u64(moved.shape[1])
    room = np.empty((3, size), np.float32)
    row, step, code = room[0], room[1], room[2]
    for r in range(u64(units.shape[0])):
        for k in range(size):
            g = u64(u64(first + k) // group)
            row[k], moved[r, k], step[k] = slope[r, u64(first + k)], f32(0), d[r, g]
            code[k] = f32(units[r, u64(first + k)] + zero[r, g])
        for i in range(size):
            one = _toward(row[i], step[i])
            if not _goes_first(row[i], one, code[i], step[i], hessian, added, end, first, i):
                continue
            j, other = _partner(row, step, code, one, hessian, added, end, first, i)
            if other != f32(0):
                _go(row, step, code, moved[r], one, hessian, added, first, i)
                _go(row, step, code, moved[r], other, hessian, added, first, j)
        for k in range(size):
            g = u64(u64(first + k) // group)
            units[r, u64(first + k)] = f32(code[k] - zero[r, g])


@inline
def _toward(slope, step):
    """Return the code, 1 or -1, that a unit should go on by."""
    return f32(1) if f32(slope * step) > f32(0) else f32(-1)


@inline
def _goes_first(slope, one, code, step, hessian, added, end, first, i):
    j = u64(first + i)
    x, bend = f32(one * step), f32(hessian[j, j] + added)
    far = f32(f32(x * x) * bend)
    inside = f32(-end) <= f32(code + one) and f32(code + one) < end
    return inside and f32(far - f32(f32(2) * f32(x * slope))) < f32(NEAR * far)


@inline
def _partner(row, step, code, one, hessian, added, end, first, i):
    """Return the column that leaves the least error with i, and what it goes on by, 0 if none."""
    at, x = u64(first + i), f32(one * step[i])
    bend = f32(hessian[at, at] + added)
    own = f32(f32(f32(x * x) * bend) - f32(f32(2) * f32(x * row[i])))
    least, best, chosen = f32(0), i, f32(0)
    for j in range(u64(row.shape[0])):
        pull = fma(f32(-x), hessian[at, u64(first + j)], row[j])
        go = _toward(pull, step[j])
        y, bend = f32(go * step[j]), f32(hessian[u64(first + j), u64(first + j)] + added)
        cost = f32(own + f32(f32(f32(y * y) * bend) - f32(f32(2) * f32(y * pull))))
        inside = f32(-end) <= f32(code[j] + go) and f32(code[j] + go) < end
        if inside and j != i and cost < least:
            least, best, chosen = cost, j, go
    return best, chosen


@inline
def _go(row, step, code, moved, one, hessian, added, first, i):
    """Move a unit by a code, and the slope of the block with it."""
    change = f32(one * step[i])
    code[i] += one
    moved[i] += change
    for k in range(u64(row.shape[0])):
        row[k] = fma(f32(-change), hessian[u64(first + i), u64(first + k)], row[k])
    row[i] = fma(f32(-change), added, row[i])
