"""How far off a weight may be that was stored in one of ggml's types: what follows from the format.

Types whose scale follows from the block bound every weight by itself. x is a weight; float16 rounds
off at most h(y) = max(|y| 2^-11, min(2^-25, |y|)), of a scale d after the codes were taken:

    F16, BF16     |x| 2^-11 or 2^-25, |x| 2^-8 or 2^-134
    Q8_0          d / 2 + (|x| + d / 2) h(d) / d                 d = amax / 127
    Q4_0, Q5_0    c + (|x| + c) h(d) / d                         d = amax / n, n = 8, 16
                  c = max(d / 2, |x| - (n - 1) d): one end is clipped
    Q4_1, Q5_1    d / 2 + (x - min + d / 2) h(d) / d + h(min)    d = (max - min) / 15, 31
    MXFP4         d / 4 below 2 d, d / 2 below 4 d, d below 7 d, else |x| - 6 d
    NVFP4         the same, d = amax / 6 in E4M3

The others (K-quants, IQ4, and Q4_0 to Q5_1 with an importance matrix) search for the scale that
leaves the least sum(v e^2) in a block, v being what an error e weighs. A single weight may lose by
that, the sum cannot: the search starts from plain rounding with d = amax / n or (max - min) / n,
and takes only what is better. Then the super-block's d rounds the scale of each block, by half a
step (the clipped end: a whole one) of 1 / 15 to 1 / 128 of the largest; so it does to minima; and
float16 rounds d. Together they move a value by at most a, and codes that are taken again after that
only come nearer. So, by Minkowski's inequality, with e0 for the errors of plain rounding,

    sqrt(sum(v e^2)) <= sqrt(sum(v e0^2)) + a sqrt(sum(v))

for each block; for each super-block where an importance matrix weighs the rounding of scales too;
and in sums of |x| |e| for Q2_K without one. Where more is left, those farther off than e0 + a are
outside: there must be one. Sums of n float32 terms are granted 16 (n + 4) units in the last place
of sum(v x^2).

In a, the largest scale of a fit is that of weights which all lie at the far end of their codes:
1.5 d (code 1 for 1.5); 2.5 (max - min) / (n - 1) of a line, whose minimum is then at most twice its
largest weight; in IQ4, whose entry 1 is the nearest up to 7, 7 / 120 amax, and 1 / 99 amax without
an importance matrix, because there the largest weight dominates its block. Codes of Q3_K are moved
one by one, and hold it to amax only.

The loops compute in float64; arrays are as in `legacy_symmetric`, decoded values are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quant.ggml.iq4_search import VALUES, M
from quant.ggml.rounded import CLIPPED, LINE, ROUNDED, ROUNDING, TABLE, extremes, half_step
from quant.ggml.rounded import outside as outside_rounded
from quant.numba_ops import as_float, inline, loop

if TYPE_CHECKING:
    from numpy.typing import NDArray

f32, f64 = np.float32, np.float64

UNIT = 2.0**-24
# Below this float32 has no room for the squares that a search compares.
UNDERFLOW = 1e-34

MAGNITUDE, RMS_AND_MAGNITUDE, SQUARE, IMPORTANCE, BY_SUPER_BLOCK, BY_ROW = range(6)


class Search(NamedTuple):
    """A type whose scale is searched.

    kind     CLIPPED: d q; LINE: d q + m; TABLE: d T[q]
    block    columns with one scale
    most     codes on one side of zero, or above the minimum
    levels   steps of the block's scale in the super-block's, 0 if it is float16 itself
    largest  what a fitted scale is at most, in units of amax, or of max - min
    v        what the error of a weight x weighs: |x|, rms + |x|, x^2, its importance, or that times
             sqrt(factor * mean(x^2) + x^2) with the super-block's mean, or the row's
    whole    the sums are those of super-blocks, not of blocks
    power    2, or 1 for sums of errors
    """

    kind: int
    block: int
    most: int
    levels: int
    largest: float
    v: int
    factor: float = 1.0
    whole: bool = False
    power: int = 2


SEARCHED = {
    "Q2_K": Search(LINE, 16, 3, 15, 2.5 / 2, MAGNITUDE, power=1),
    "Q3_K": Search(CLIPPED, 16, 4, 32, 1.0, SQUARE),
    "Q4_K": Search(LINE, 32, 15, 63, 2.5 / 14, RMS_AND_MAGNITUDE),
    "Q5_K": Search(LINE, 32, 31, 63, 2.5 / 30, RMS_AND_MAGNITUDE),
    "Q6_K": Search(CLIPPED, 16, 32, 128, 1.5 / 31.1, SQUARE),
    "IQ4_NL": Search(TABLE, 32, 127, 0, 1 / 99, SQUARE),
    "IQ4_XS": Search(TABLE, 32, 127, 32, 1 / 99, SQUARE),
}
WEIGHTED = {
    "Q2_K": Search(LINE, 16, 3, 15, 2.5 / 2, BY_SUPER_BLOCK, 1.0, whole=True),
    "Q3_K": Search(CLIPPED, 16, 4, 32, 1.0, BY_SUPER_BLOCK, 2.0, whole=True),
    "Q4_K": Search(LINE, 32, 15, 63, 2.5 / 14, BY_SUPER_BLOCK, 2.0, whole=True),
    "Q5_K": Search(LINE, 32, 31, 63, 2.5 / 30, BY_SUPER_BLOCK, 2.0, whole=True),
    "Q6_K": Search(CLIPPED, 16, 32, 128, 1.5 / 31.1, IMPORTANCE),
    "IQ4_NL": Search(TABLE, 32, 127, 0, 7 / 120, BY_SUPER_BLOCK, 2.0),
    "IQ4_XS": Search(TABLE, 32, 127, 32, 7 / 120, BY_SUPER_BLOCK, 2.0),
    "Q4_0": Search(CLIPPED, 32, 8, 0, 1.5 / 7.1, BY_ROW),
    "Q5_0": Search(CLIPPED, 32, 16, 0, 1.5 / 15.1, BY_ROW),
    "Q4_1": Search(LINE, 32, 15, 0, 2.5 / 14, BY_ROW),
    "Q5_1": Search(LINE, 32, 31, 0, 2.5 / 30, BY_ROW),
}


def outside(
    name: str, w: NDArray[Any], decoded: NDArray[Any], importance: NDArray[Any] | None
) -> int:
    """Return how many of the decoded weights are farther off than the type allows.

    w           [N, K] bits of bfloat16 or float32
    decoded     [N, K] float32
    importance  [K] float32 that w was encoded with, if its type uses one
    """
    if importance is None and name in ROUNDED:
        return outside_rounded(name, w, decoded)
    search = SEARCHED[name] if importance is None else WEIGHTED[name]
    size = 256 if search.levels else search.block
    table = np.empty((0, size), f32) if importance is None else importance.reshape(-1, size)
    return int(count_searched(search, w.reshape(-1, size), decoded.reshape(-1, size), table))


@loop
def count_searched(search, w, y, importance):
    """Return how many of y [S, n] are farther off than the search for these scales allows."""
    size, count, mean = w.shape[1], 0, 0.0
    x, e, e0, v = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    per_row = max(1, importance.shape[0])
    for s in range(w.shape[0]):
        rows = per_row if search.v == BY_ROW else 1
        if s % rows == 0:
            mean = search.factor * _mean_square(w, s, s + rows)
        for j in range(size):
            x[j] = as_float(w[s, j])
            e[j] = abs(x[j] - f64(y[s, j]))
        count += _count_row(search, x, e, e0, v, mean, importance, s % per_row)
    return count


@loop
def _count_row(search, x, e, e0, v, mean, importance, c):
    """Return how many weights of one row are outside; e0 and v are room to work in."""
    count, group = 0, x.size if search.whole else search.block
    for start in range(0, x.size, search.block):
        _plain_errors(search, x, start, e0)
        _weigh(search, x, start, mean, importance, c, v)
    shift = _shift(search, x)
    for start in range(0, x.size, group):
        count += _count_in(search, x, e, e0, v, start, start + group, shift)
    return count


@inline
def _count_in(search, x, e, e0, v, start, stop, shift):
    """Return how many weights are outside, of a group whose sums are compared."""
    error, plain, moved, scale, outside = 0.0, 0.0, 0.0, 0.0, 0
    for j in range(start, stop):
        size = abs(x[j])
        if search.power == 2:
            error += v[j] * e[j] * e[j]
            plain += v[j] * e0[j] * e0[j]
            scale += v[j] * size * size
        else:
            error += v[j] * e[j]
            plain += v[j] * e0[j]
            scale += v[j] * size
        moved += v[j]
    plain += 16 * (search.block + 4) * UNIT * scale + UNDERFLOW
    if search.power == 2:
        error, plain, moved = np.sqrt(error), np.sqrt(plain), np.sqrt(moved)
    if not error <= (plain + shift * moved) * ROUNDING:
        for j in range(start, stop):
            outside += not e[j] <= e0[j] + shift
    return outside


@inline
def _mean_square(w, first, last):
    """Return the mean of the squares of some rows."""
    total = 0.0
    for s in range(first, last):
        for j in range(w.shape[1]):
            total += f64(as_float(w[s, j])) ** 2
    return total / (w.shape[1] * (last - first))


@inline
def _plain_errors(search, x, start, e0):
    """Fill in the errors of plain rounding, where a search begins."""
    stop = start + search.block
    amax, least, largest = extremes(x, start, stop)
    if search.kind == LINE:
        least = min(least, 0.0)
        d = (largest - least) / search.most
        for j in range(start, stop):
            q = min(np.rint((x[j] - least) / d), search.most) if d > 0 else 0.0
            e0[j] = abs(x[j] - least - d * q)
        return
    d = amax / search.most
    for j in range(start, stop):
        if abs(x[j]) == amax:
            d = -x[j] / search.most
            break
    for j in range(start, stop):
        y = x[j] / d if d != 0 else 0.0
        q = min(np.rint(y), search.most - 1.0)
        if search.kind == TABLE:
            q = f64(VALUES[0])
            for k in range(15):
                q = f64(VALUES[k + 1]) if y >= M[k] else q
        e0[j] = abs(x[j] - d * q)


@inline
def _weigh(search, x, start, mean, importance, c, v):
    """Fill in what the errors of a block weigh."""
    stop, rms = start + search.block, 0.0
    for j in range(start, stop):
        rms += x[j] * x[j]
    rms = np.sqrt(rms / search.block)
    for j in range(start, stop):
        if search.v == MAGNITUDE:
            v[j] = abs(x[j])
        elif search.v == RMS_AND_MAGNITUDE:
            v[j] = rms + abs(x[j])
        elif search.v == SQUARE:
            v[j] = x[j] * x[j]
        elif search.v == IMPORTANCE:
            v[j] = importance[c, j]
        else:
            v[j] = importance[c, j] * np.sqrt(mean + x[j] * x[j])


@inline
def _shift(search, x):
    """Return how far rounding scales, to a super-block's steps and to float16, may move a value."""
    top, bottom = 0.0, 0.0
    for start in range(0, x.size, search.block):
        amax, least, largest = extremes(x, start, start + search.block)
        least = min(least, 0.0)
        span = largest - least if search.kind == LINE else amax
        top, bottom = max(top, span), max(bottom, -least)
    if search.levels == 0:
        return search.most * half_step(top * search.largest) + half_step(bottom)
    step = top * search.largest / search.levels
    rounded = search.most * search.levels * half_step(step)
    if search.kind != LINE:
        return search.most * step + rounded
    minimum = 2 * max(top, bottom) / search.levels
    return (search.most * step + minimum) / 2 + rounded + search.levels * half_step(minimum)
