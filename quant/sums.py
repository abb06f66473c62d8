"""The sums of `quant.measure`, of weights on a CPU, in one compiled pass: 1 ns a weight, not 30.

Everything is added in float64, as the definition does, in another order: 64 lanes, each of which
adds its columns of every row. So the sums depend on neither machine nor threads. Lanes are what
LLVM makes vectors of; it must not reassociate one sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quant.measure import Error
from quant.measure import measure as defined
from quant.numba_ops import as_bits, as_float, inline, loop

if TYPE_CHECKING:
    from torch import Tensor

u32, u64, i32, f32, f64 = np.uint32, np.uint64, np.int32, np.float32, np.float64

LANES = u64(64)
SUMS = 5


def measure(w: Tensor, decoded: Tensor) -> Error:
    """Return the error of `decoded` against `w`, both [..., K]: `quant.measure.measure`."""
    if not w.numel() or w.device.type != "cpu":
        return defined(w, decoded)
    sums, counts = np.zeros(SUMS + 1), np.zeros(2, np.int64)
    rows = (x.float().reshape(-1, x.shape[-1]).contiguous().numpy() for x in (w, decoded))
    if not add_up(*rows, sums, counts):
        return defined(w, decoded)
    square_error, square, dot, square_q, error, largest = map(float, sums)
    return Error(
        sum_sq_error=square_error,
        sum_sq=square,
        sum_dot=dot,
        sum_sq_q=square_q,
        sum_error=error,
        max_abs=largest,
        zeros=int(counts[0]),
        zero_rows=int(counts[1]),
        count=w.numel(),
    )


@loop
def add_up(w, q, sums, counts):
    """Fill sums [6] and counts [2] of w and q, float32 [N, K]; False if one is not finite.

    sums    (w - q)^2, w^2, w q, q^2, q - w, and the largest |w - q|
    counts  zeros, zero_rows
    """
    num_cols, worst = u64(w.shape[1]), u32(0)
    lanes = np.zeros(SUMS * LANES)
    for r in range(u64(w.shape[0])):
        num_zero, num_lost = 0, 0
        for c in range(u64(0), num_cols, LANES):
            error, zero, lost = _add(w, q, r, c, min(c + LANES, num_cols), lanes)
            worst = max(worst, error)
            num_zero += zero
            num_lost += lost
        counts[0] += num_lost
        counts[1] += num_lost > 0 and num_zero == num_cols
    for i in range(lanes.size):
        sums[i // LANES] += lanes[i]
    sums[SUMS] = as_float(worst)
    return worst < u32(0x7F800000)


@inline
def _add(w, q, r, start, stop, lanes):
    """Add a segment to the lanes; return the largest |w - q| in bits, zeros of q, weights lost."""
    worst, zero, lost = u32(0), i32(0), i32(0)
    for j in range(start, stop):
        lane = j - start
        x, y = w[r, j], q[r, j]
        gap = f32(x - y)
        worst = max(worst, u32(as_bits(gap) & u32(0x7FFFFFFF)))
        e, a, b = f64(gap), f64(x), f64(y)
        lanes[lane] += e * e
        lanes[lane + LANES] += a * a
        lanes[lane + 2 * LANES] += a * b
        lanes[lane + 3 * LANES] += b * b
        lanes[lane + 4 * LANES] += b - a
        nothing = i32(y == f32(0))
        zero = i32(zero + nothing)
        lost = i32(lost + i32(nothing & i32(x != f32(0))))
    return worst, zero, lost
