"""The loops of the scale search and of GPTQ, compiled by numba.

    weigh_errors  what nearest codes lose of each group, by the weights of the columns
    best_steps    of each group the step, among several, under which they lose least
    walk_block    GPTQ within a block of columns: nearest codes, what they lose moved on
    settle_block  each code of a block again, given all others; steps too
    subtract      what a block lost or changed, moved into other columns

Every number is the outcome of one order of float32 operations, with one rounding for a product and
its sum, whichever rows come together; so ranges of rows get the same bytes. No loop holds the
interpreter's lock or starts a thread.

A unit is a decoded weight over its step. `end` is 2^(bits-1) of whole numbers, 0 of E2M1, and less
for the values of ggml's IQ4.

Shape letters: B groups of g weights, N rows, K columns, b columns of a block.
"""

from __future__ import annotations

import numpy as np

from quant.ggml import iq4_table
from quant.numba_ops import as_bits, as_float, fma, inline, loop, to_bfloat16

u32, u64, f32 = np.uint32, np.uint64, np.float32

LANES = u64(16)
TABLE = np.array(iq4_table.TABLE, np.float32)
BETWEEN = np.array([TABLE[0], *((TABLE[1:] + TABLE[:-1]) / 2)], np.float32)
# A tile of so many rows and columns, and what is taken from it, stay in a core's cache.
ROWS, COLUMNS, DEEP = u64(64), u64(512), u64(8)


@inline
def nearest(y, zero, end):
    """Return the unit nearest to y, ties to the even code; of a table, to the larger value."""
    magic = f32(1.5 * 2.0**23)  # its last bit is worth 1
    if end > f32(0):
        code = min(max(f32(y + zero), f32(-end)), f32(end - f32(1)))
        return f32(f32(f32(code + magic) - magic) - zero)
    if end < f32(0):
        unit = TABLE[0]
        for k in range(u64(1), u64(TABLE.size)):
            unit = TABLE[k] if y >= BETWEEN[k] else unit
        return unit
    bits = as_bits(y)
    size = min(as_float(u32(bits & u32(0x7FFFFFFF))), f32(6))
    gap = f32(0.5) if size < f32(2) else (f32(1) if size < f32(4) else f32(2))
    code = f32(f32(f32(size / gap) + magic) - magic)
    return as_float(u32(as_bits(f32(code * gap)) | u32(bits & u32(0x80000000))))


@loop
def weigh_errors(w, weight, d, zero, end, out):
    """Fill out [B] with sums of weight (w - q)^2, w float32 [B, g], weight [G, g]; 16 divides g."""
    groups = u64(weight.shape[0])
    errors = np.empty(w.shape[1], np.float32)
    for b in range(u64(w.shape[0])):
        out[b] = _group_error(w[b], weight[u64(b % groups)], d[b], zero[b], end, errors)


@loop
def best_steps(w, weight, steps, end, out):
    """Fill out [B] with those of steps [C, B] that have the least errors, the first if several."""
    groups = u64(weight.shape[0])
    errors = np.empty(w.shape[1], np.float32)
    for b in range(u64(w.shape[0])):
        least = f32(np.inf)
        out[b] = steps[0, b]
        for c in range(u64(steps.shape[0])):
            row = weight[u64(b % groups)]
            error = _group_error(w[b], row, steps[c, b], f32(0), end, errors)
            if error < least:
                least, out[b] = error, steps[c, b]


@inline
def _group_error(w, weight, step, zero, end, errors):
    """Return the sum of weight (w - q)^2 of a group; errors [g] is room for its terms."""
    group, total = u64(w.shape[0]), f32(0)
    lanes = np.empty(LANES, np.float32)
    for j in range(group):
        missed = f32(w[j] - f32(nearest(f32(w[j] / step), zero, end) * step))
        errors[j] = f32(f32(missed * missed) * weight[j])
    for i in range(LANES):
        lanes[i] = errors[i]
    for start in range(LANES, group, LANES):
        for i in range(LANES):
            lanes[i] += errors[u64(start + i)]
    for i in range(LANES):
        total += lanes[i]
    return total


@loop
def walk_block(w, d, zero, upper, end, first, units, missed):
    """Take the nearest units of the columns from `first` on; all but missed are [N, K] or [K, K].

    missed  [N, b], what each column lost, over the factor's diagonal
    """
    size = u64(missed.shape[1])
    row = np.empty(size, np.float32)
    for r in range(u64(w.shape[0])):
        for i in range(size):
            row[i] = w[r, u64(first + i)]
        for i in range(size):
            j = u64(first + i)
            unit = nearest(f32(row[i] / d[r, j]), zero[r, j], end)
            error = f32(f32(row[i] - f32(unit * d[r, j])) / upper[j, j])
            units[r, j], missed[r, i] = unit, error
            for k in range(u64(i + u64(1)), size):
                row[k] = fma(f32(-error), upper[j, u64(first + k)], row[k])


@loop
def settle_block(units, d, zero, slope, hessian, added, end, first, group, refit, moved):
    """Improve the units, and the steps if `refit`, of the columns from `first` on, row by row.

    units  [N, K]                      d, zero  [N, G], of groups of so many columns
    slope  [N, K], (w - q) H, with H   hessian  [K, K], `added` to its diagonal
    moved  [N, b], filled with the change of q
    """
    size = u64(moved.shape[1])
    row, push = np.empty(size, np.float32), np.empty(size, np.float32)
    for r in range(u64(units.shape[0])):
        for i in range(size):
            row[i], moved[r, i] = slope[r, u64(first + i)], f32(0)
        for start in range(u64(0), size, min(group, size)):
            span = u64(start), u64(start + min(group, size))
            g = u64(u64(first + start) // group)
            if refit:
                step = _better_step(units[r], row, push, hessian, added, d[r, g], first, span)
                change = f32(step - d[r, g])
                d[r, g] = step
                _scale(units[r], row, moved[r], change, hessian, added, first, span)
            for i in range(span[0], span[1]):
                unit = _better_unit(
                    units[r], row, hessian, added, d[r, g], zero[r, g], end, first, i
                )
                change = f32(f32(unit - units[r, u64(first + i)]) * d[r, g])
                units[r, u64(first + i)] = unit
                _move(row, moved[r], change, hessian, added, first, i)


@inline
def _better_unit(units, row, hessian, added, step, zero, end, first, i):
    """Return the best unit of a column, given all others."""
    j = u64(first + i)
    bend = f32(hessian[j, j] + added)
    if not bend > f32(0):
        return units[j]
    return nearest(f32(fma(units[j], step, f32(row[i] / bend)) / step), zero, end)


@inline
def _scale(units, row, moved, change, hessian, added, first, span):
    """Change the step of a group, and the slope of the block with it."""
    if change != f32(0):
        for i in range(span[0], span[1]):
            _move(row, moved, f32(units[u64(first + i)] * change), hessian, added, first, i)


@inline
def _move(row, moved, change, hessian, added, first, i):
    """Change q of a column, and the slope of the block with it."""
    if change == f32(0):
        return
    j = u64(first + i)
    moved[i] += change
    for k in range(u64(row.shape[0])):
        row[k] = fma(f32(-change), hessian[j, u64(first + k)], row[k])
    row[i] = fma(f32(-change), added, row[i])


@inline
def _better_step(units, row, push, hessian, added, step, first, span):
    """Return the bfloat16 step with the least error under these units, or the one there is."""
    for k in range(span[0], span[1]):
        push[k] = f32(added * units[u64(first + k)])
    for i in range(span[0], span[1]):
        unit = units[u64(first + i)]
        for k in range(span[0], span[1]):
            push[k] = fma(unit, hessian[u64(first + i), u64(first + k)], push[k])
    along, bend = f32(0), f32(0)
    for k in range(span[0], span[1]):
        along = fma(units[u64(first + k)], row[k], along)
        bend = fma(units[u64(first + k)], push[k], bend)
    if not bend > f32(0):
        return step
    new = as_float(to_bfloat16(f32(step + f32(along / bend))))
    change = f32(new - step)
    gain = f32(f32(change * bend) - f32(f32(2) * along))  # over the change
    return new if f32(new * step) > f32(0) and f32(change * gain) < f32(0) else step


@loop
def subtract(w, missed, matrix, top, left):
    """Take missed [N, b] @ matrix[top : top + b, left:] from w[:, left:], both K columns wide."""
    num_rows, num_cols = u64(w.shape[0]), u64(w.shape[1])
    for first in range(u64(0), num_rows, ROWS):
        for start in range(u64(left), num_cols, COLUMNS):
            last, stop = min(u64(first + ROWS), num_rows), min(u64(start + COLUMNS), num_cols)
            _subtract_tile(w, missed, matrix, top, (first, last), (start, stop))


@inline
def _subtract_tile(w, missed, matrix, top, rows, columns):
    deep = u64(missed.shape[1])
    whole = u64(deep - u64(deep % DEEP))
    for i in range(u64(0), whole, DEEP):
        for r in range(rows[0], rows[1]):
            _subtract_eight(w[r], missed[r], matrix, top, i, columns)
    for i in range(whole, deep):
        for r in range(rows[0], rows[1]):
            for j in range(columns[0], columns[1]):
                w[r, j] = fma(-missed[r, i], matrix[u64(top + i), j], w[r, j])


@inline
def _subtract_eight(w, missed, matrix, top, i, columns):
    """Take eight rows of the matrix from one of w, one after the other."""
    m0, m1, m2, m3 = -missed[i], -missed[i + u64(1)], -missed[i + u64(2)], -missed[i + u64(3)]
    m4, m5 = -missed[i + u64(4)], -missed[i + u64(5)]
    m6, m7 = -missed[i + u64(6)], -missed[i + u64(7)]
    if m0 == m1 == m2 == m3 == m4 == m5 == m6 == m7 == f32(0):
        return
    t = u64(top + i)
    for j in range(columns[0], columns[1]):
        x = fma(m0, matrix[t, j], w[j])
        x = fma(m1, matrix[t + u64(1), j], x)
        x = fma(m2, matrix[t + u64(2), j], x)
        x = fma(m3, matrix[t + u64(3), j], x)
        x = fma(m4, matrix[t + u64(4), j], x)
        x = fma(m5, matrix[t + u64(5), j], x)
        x = fma(m6, matrix[t + u64(6), j], x)
        w[j] = fma(m7, matrix[t + u64(7), j], x)
