"""The scales of IQ4_NL and IQ4_XS: of sixteen the one with the least error, as ggml tries them.

A block of 32 columns tries 1 / d = 127 / w_max and (t - 127) / w_max for t = -7..7, where w_max is
the weight of largest magnitude. For each it takes the nearest entries q of the table and the scale
of least squares for them, sum(v w q) / sum(v q^2); the one that leaves the least sum(v e^2) wins. v
is w^2 or, with an importance matrix, importance * sqrt(2 mean(w^2) + w^2). Every sum runs over the
columns in order, in float32.

What makes it fast: LANES blocks lie side by side, column by column, so that vectors run over
blocks; and the fifteen scales t differ so little that they move no column by more than one entry:
134 / 120 is less than the ratio of any two neighbouring midpoints. The table is searched for the
first and the last of them; between, a column has one of two entries and one midpoint to compare
with.

Arrays are float32: a plane of every column and lane, or [LANES]; weights and importance are those
of `iq4`. In loops j is a column, i a lane.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from quant.ggml.iq4_table import TABLE
from quant.numba_ops import as_float, inline, loop

u64, i32, f32 = np.uint64, np.int32, np.float32

VALUES = tuple(map(f32, TABLE))
# Between two entries the nearest changes here, and a tie goes up.
M = tuple(f32((a + b) / 2) for a, b in pairwise(TABLE))
STEPS = tuple(f32(b - a) for a, b in pairwise(TABLE))

LANES = u64(32)
BLOCK = u64(32)
SMALLEST = f32(1e-15)
# Where the planes, of what is known of each column and lane, begin in one flat array: LLVM would
# doubt that arrays are apart, or rows whose width it does not know, and would not vectorise.
# A cache line between two planes keeps reads from waiting for a write 4096 bytes away.
X, V, BELOW, MIDDLE, ABOVE, PLANES = (u64(k * (32 * 32 + 16)) for k in range(6))
# Far beyond float16 scales, and far below where the sums of cubes overflow.
LARGEST = f32(2.0**32)


@inline
def place(j, i):
    """Return where a plane has column j of lane i."""
    return u64(u64(j * LANES) + i)


@inline
def load(w, first, count, plane, top, peak):
    """Lay blocks side by side, with their largest magnitude and the weight that has it first.

    Lanes past `count` are zeros. Return False if a weight is too large or not finite.
    """
    for i in range(LANES):
        for j in range(BLOCK):
            plane[u64(X + place(j, i))] = as_float(w[u64(first + i), j]) if i < count else f32(0)
    top[:] = 0
    peak[:] = 0
    for j in range(BLOCK):
        for i in range(LANES):
            x = plane[u64(X + place(j, i))]
            above = abs(x) > top[i]
            top[i] = abs(x) if above else top[i]
            peak[i] = x if above else peak[i]
    for j in range(BLOCK):
        for i in range(LANES):
            top[i] = top[i] if abs(plane[u64(X + place(j, i))]) < LARGEST else LARGEST
    below = True
    for i in range(LANES):
        below = below and top[i] < LARGEST
    return below


@loop
def weigh(importance, first, size, plane):
    """Fill in what an error of each column weighs; `size` lanes are one block of theirs."""
    if importance.shape[0] == 0:
        for j in range(BLOCK):
            for i in range(LANES):
                plane[u64(V + place(j, i))] = f32(
                    plane[u64(X + place(j, i))] * plane[u64(X + place(j, i))]
                )
        return
    mean = f32(0)
    for i in range(LANES):
        c = u64(u64(first + i) % u64(importance.shape[0]))
        if i % size == 0:
            mean = _mean_square(plane, i, size)
        for j in range(BLOCK):
            square = f32(plane[u64(X + place(j, i))] * plane[u64(X + place(j, i))])
            plane[u64(V + place(j, i))] = f32(importance[c, j] * np.sqrt(f32(mean + square)))


@loop
def search(plane, top, peak, scale):
    """Fill in the best scale of each lane, 0 for one of zeros."""
    inverse, best = np.empty(LANES, f32), np.empty(LANES, f32)
    dot, square = np.empty(LANES, f32), np.empty(LANES, f32)
    for i in range(LANES):
        inverse[i] = f32(f32(1) / f32(peak[i] / f32(127)))
    _nearest(plane, inverse, BELOW)
    for k in range(u64(PLANES - ABOVE)):
        plane[u64(ABOVE + k)] = plane[u64(BELOW + k)]
    _sums(plane, inverse, dot, square)
    for i in range(LANES):
        scale[i] = f32(dot[i] / square[i]) if square[i] > f32(0) else f32(0)
        best[i] = f32(scale[i] * dot[i])
    _bracket(plane, peak, inverse)
    for t in range(-134, -119):
        _divide(f32(t), peak, inverse)
        _sums(plane, inverse, dot, square)
        for i in range(LANES):
            product = f32(dot[i] * dot[i])
            better = square[i] > f32(0) and product > f32(best[i] * square[i])
            ratio = f32(dot[i] / square[i])
            scale[i] = ratio if better else scale[i]
            best[i] = f32(ratio * dot[i]) if better else best[i]
    for i in range(LANES):
        scale[i] = scale[i] if top[i] >= SMALLEST else f32(0)


@loop
def nearest_codes(plane, inverse, codes):
    """Fill in the index of the table's nearest value to x * inverse."""
    for j in range(BLOCK):
        for i in range(LANES):
            y = f32(plane[u64(X + place(j, i))] * inverse[i])
            codes[place(j, i)] = i32(
                i32(i32(y >= M[0]) + i32(y >= M[1]))
                + i32(i32(y >= M[2]) + i32(y >= M[3]))
                + i32(i32(y >= M[4]) + i32(y >= M[5]))
                + i32(i32(y >= M[6]) + i32(y >= M[7]))
                + i32(i32(y >= M[8]) + i32(y >= M[9]))
                + i32(i32(y >= M[10]) + i32(y >= M[11]))
                + i32(i32(y >= M[12]) + i32(y >= M[13]))
                + i32(y >= M[14])
            )


@inline
def _mean_square(plane, i, size):
    """Return twice the mean of the squares of `size` lanes, summed one column after the other."""
    total = f32(0)
    for k in range(i, u64(i + size)):
        for j in range(BLOCK):
            total = f32(total + f32(plane[u64(X + place(j, k))] * plane[u64(X + place(j, k))]))
    return f32(total * f32(f32(2) / f32(BLOCK * size)))


@inline
def _bracket(plane, peak, inverse):
    """Fill in the two entries that a column may have in the fifteen scales, and their middle."""
    _divide(f32(-134), peak, inverse)
    _nearest(plane, inverse, BELOW)
    _divide(f32(-120), peak, inverse)
    _nearest(plane, inverse, ABOVE)
    for j in range(BLOCK):
        for i in range(LANES):
            first, last = plane[u64(BELOW + place(j, i))], plane[u64(ABOVE + place(j, i))]
            plane[u64(BELOW + place(j, i))] = min(first, last)
            plane[u64(ABOVE + place(j, i))] = max(first, last)
            plane[u64(MIDDLE + place(j, i))] = f32(f32(first + last) * f32(0.5))


@inline
def _divide(x, peak, inverse):
    """Fill in x / peak."""
    for i in range(LANES):
        inverse[i] = f32(x / peak[i])


@loop
def _nearest(plane, inverse, to):
    """Fill in a plane with the table's nearest value to x * inverse."""
    for j in range(BLOCK):
        for i in range(LANES):
            y = f32(plane[u64(X + place(j, i))] * inverse[i])
            q = VALUES[0]
            for k in range(15):
                q = f32(q + (STEPS[k] if y >= M[k] else f32(0)))
            plane[u64(to + place(j, i))] = q


@loop
def _sums(plane, inverse, dot, square):
    """Fill in sum(v w q) and sum(v q^2), with q on one side of the middle or on the other."""
    dot[:] = 0
    square[:] = 0
    for four in range(u64(0), BLOCK, u64(4)):
        for i in range(LANES):
            a, b = dot[i], square[i]
            for step in range(4):
                j = u64(four + u64(step))
                x = plane[u64(X + place(j, i))]
                # Read both: two reads of one array in two branches become a slow gather.
                below, above = plane[u64(BELOW + place(j, i))], plane[u64(ABOVE + place(j, i))]
                q = above if f32(x * inverse[i]) >= plane[u64(MIDDLE + place(j, i))] else below
                vq = f32(plane[u64(V + place(j, i))] * q)
                a = f32(a + f32(vq * x))
                b = f32(b + f32(vq * q))
            dot[i], square[i] = a, b
