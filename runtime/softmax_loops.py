"""One strip of two softmaxes on a CPU, in a compiled pass over both: `softmax` says what it is.

    e^x = 2^n e^r       n = round(x / ln 2)       e^r = 1 + r + r^2 (1/2 + r/6 + ...)

The polynomial is Cephes' (Moshier, expf), within 2^-24 of e^r where |r| <= ln 2 / 2; with rounding
a power is right to 1.5 units of 2^-24. Below e^-87 it is 0. Sums are float64, in lanes whose order
depends on neither machine nor threads. A pass costs a quarter of what torch's operations cost, each
of which reads all logits again.

Trap: comparisons lose a NaN. Logits that are not all finite are left to the definition in torch.

Shape letters: R rows (tokens), n tokens of a strip of the vocabulary; in a loop r is a row, j a
column.
"""

from __future__ import annotations

import math

import numpy as np

from quant.numba_ops import as_bits, as_float, fma, inline, loop

u32, u64, i32, f32, f64 = np.uint32, np.uint64, np.int32, np.float32, np.float64

LANES = u64(64)
INFINITY = u32(0x7F80_0000)
LOG2_E = f32(1.4426950408889634)
# ln 2 in two parts; products of the first with whole numbers up to 2^9 are exact.
LN_2, LN_2_REST = f32(0.693359375), f32(-2.12194440e-4)
ROUND = f32(1.5 * 2.0**23)  # added and taken away, it leaves a whole number
LEAST = f32(-87.0)
TERMS = tuple(
    map(f32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
              5.0000001201e-1))
)  # fmt: skip


@loop
def take(source, artifact, first, targets, source_side, artifact_side, weighted):
    """Take a strip's logits [R, n] of two sides; return False, with nothing changed, if not finite.

    first     the strip's first token
    *_side    top, total, best, target [R] of `Softmax`
    weighted  [R] of `Divergence`
    """
    highest = np.empty((2, source.shape[0]), np.float32)
    for r in range(u64(source.shape[0])):
        highest[0, r], highest[1, r] = _highest(source, r), _highest(artifact, r)
        if not (highest[0, r] < np.inf and highest[1, r] < np.inf):
            return False
    lanes = np.zeros(3 * LANES)
    for r in range(u64(source.shape[0])):
        shrink = _raise_top(source, r, first, highest[0, r], targets, source_side)
        _raise_top(artifact, r, first, highest[1, r], targets, artifact_side)
        for c in range(u64(0), u64(source.shape[1]), LANES):
            stop = min(u64(c + LANES), u64(source.shape[1]))
            _add(source, artifact, r, c, stop, source_side[0][r], artifact_side[0][r], lanes)
        weighted[r] = weighted[r] * shrink + _taken(lanes, u64(0))
        source_side[1][r] += _taken(lanes, LANES)
        artifact_side[1][r] += _taken(lanes, u64(2 * LANES))
    return True


@inline
def _highest(logits, r):
    """Return the largest logit of a row, infinity if one is not finite."""
    tops, largest = np.full(LANES, -np.inf, np.float32), u32(0)
    for c in range(u64(0), u64(logits.shape[1]), LANES):
        for j in range(c, min(u64(c + LANES), u64(logits.shape[1]))):
            x, lane = logits[r, j], u64(j - c)
            tops[lane] = x if x > tops[lane] else tops[lane]
            largest = max(largest, u32(as_bits(x) & u32(0x7FFF_FFFF)))
    return tops.max() if largest < INFINITY else f32(np.inf)


@inline
def _raise_top(logits, r, first, highest, targets, side):
    """Take a row's largest logit and that of the next token; return shrink, which totals have."""
    top, total, best, target = side
    before, column = top[r], targets[r] - first
    if highest > before:
        top[r], j = highest, 0
        while logits[r, j] != highest:
            j += 1
        best[r] = first + j
    if column >= 0 and column < logits.shape[1]:
        target[r] = logits[r, column]
    shrink = math.exp(f64(before) - f64(top[r]))
    total[r] *= shrink
    return shrink


@inline
def _add(source, artifact, r, start, stop, top, other_top, lanes):
    """Add powers times differences, powers, and the artifact's powers of a segment to the lanes."""
    for j in range(start, stop):
        lane = u64(j - start)
        power = _power(f32(source[r, j] - top))
        lanes[lane] += f64(f32(f32(source[r, j] - artifact[r, j]) * power))
        lanes[u64(lane + LANES)] += f64(power)
        lanes[u64(lane + u64(2 * LANES))] += f64(_power(f32(artifact[r, j] - other_top)))


@inline
def _power(x):
    """Return e^x of x <= 0."""
    shifted = fma(max(x, LEAST), LOG2_E, ROUND)
    n = f32(shifted - ROUND)
    r = fma(n, f32(-LN_2_REST), fma(n, f32(-LN_2), max(x, LEAST)))
    p = fma(TERMS[0], r, TERMS[1])
    p = fma(p, r, TERMS[2])
    p = fma(p, r, TERMS[3])
    p = fma(p, r, TERMS[4])
    p = fma(p, r, TERMS[5])
    p = f32(fma(p, f32(r * r), r) + f32(1))
    scale = as_float(u32(u32(as_bits(shifted) + u32(127)) << u32(23)))
    return f32(p * scale) if x > LEAST else f32(0)


@inline
def _taken(lanes, start):
    """Return the sum of some lanes, which begin anew."""
    total = 0.0
    for i in range(start, u64(start + LANES)):
        total += lanes[i]
        lanes[i] = 0.0
    return total
