"""The bounds of ggml's types whose scale follows from the block; `bounds` derives them.

Each has a loop of its own kind, so that a first use compiles no other. They compute in float64;
arrays are as in `legacy_symmetric`, decoded values y are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quant.ggml.nvfp4 import nearest_scale, scale_value
from quant.numba_ops import as_float, inline, loop

if TYPE_CHECKING:
    from numpy.typing import NDArray

f32, f64 = np.float32, np.float64

ROUNDING = 1 + 2.0**-18

EXACT, FLOAT16, BFLOAT16, NEAREST, CLIPPED, LINE, E2M1, E2M1_E4M3, TABLE = range(9)
ROUNDED = {
    "F32": (EXACT, 0), "F16": (FLOAT16, 0), "BF16": (BFLOAT16, 0), "Q8_0": (NEAREST, 127),
    "Q4_0": (CLIPPED, 8), "Q5_0": (CLIPPED, 16), "Q4_1": (LINE, 15), "Q5_1": (LINE, 31),
    "MXFP4": (E2M1, 0), "NVFP4": (E2M1_E4M3, 0),
}  # fmt: skip


def outside(name: str, w: NDArray[Any], decoded: NDArray[Any]) -> int:
    """Return how many decoded weights are farther off than a type of `ROUNDED` allows.

    w  [N, K] bits of bfloat16 or float32; decoded float32 [N, K]
    """
    kind, most = ROUNDED[name]
    if kind <= BFLOAT16:
        return int(count_cast(kind, w, decoded))
    size = 16 if kind == E2M1_E4M3 else 32
    blocks, values = w.reshape(-1, size), decoded.reshape(-1, size)
    if kind in (E2M1, E2M1_E4M3):
        return int(count_e2m1(kind, blocks, values))
    return int(count_scaled(kind, most, blocks, values))


@loop
def count_cast(kind, w, y):
    """Return how many of y [N, K] are farther off than a cast allows: EXACT, FLOAT16, BFLOAT16."""
    part, least = 0.0, 0.0
    if kind == FLOAT16:
        part, least = 2.0**-11, 2.0**-25
    elif kind == BFLOAT16:
        part, least = 2.0**-8, 2.0**-134
    count = 0
    for b in range(w.shape[0]):
        for j in range(w.shape[1]):
            x = f64(as_float(w[b, j]))
            limit = max(abs(x) * part, least)
            count += not abs(x - f64(y[b, j])) <= limit * ROUNDING
    return count


@loop
def count_scaled(kind, most, w, y):
    """Return how many of y [B, n] are farther off than d allows: NEAREST, CLIPPED, LINE."""
    x, limit, count = np.empty(w.shape[1]), np.empty(w.shape[1]), 0
    for b in range(w.shape[0]):
        _widen(w, b, x)
        _limits_scaled(kind, most, x, limit)
        count += _count_beyond(x, y, b, limit)
    return count


@loop
def count_e2m1(kind, w, y):
    """Return how many of y [B, n] are farther off than d allows: E2M1, E2M1_E4M3."""
    x, limit, count = np.empty(w.shape[1]), np.empty(w.shape[1]), 0
    for b in range(w.shape[0]):
        _widen(w, b, x)
        _limits_e2m1(kind, x, limit)
        count += _count_beyond(x, y, b, limit)
    return count


@inline
def _widen(w, b, x):
    """Fill in the weights of a block."""
    for j in range(x.size):
        x[j] = as_float(w[b, j])


@inline
def _count_beyond(x, y, b, limit):
    """Return how many weights of a block are farther off than their limits."""
    count = 0
    for j in range(x.size):
        count += not abs(x[j] - f64(y[b, j])) <= limit[j] * ROUNDING
    return count


@inline
def _limits_scaled(kind, most, x, limit):
    """Fill in the largest error of each weight, for codes times a float16 d."""
    amax, least, largest = extremes(x, 0, x.size)
    d = (largest - least if kind == LINE else amax) / most
    relative = half_step(d) / d if d > 0 else 1.0
    start = least if kind == LINE else 0.0
    for j in range(x.size):
        size = abs(x[j] - start)
        within = d / 2
        if kind == CLIPPED:
            within = max(within, size - (most - 1) * d)
        limit[j] = within + (size + within) * relative + half_step(start)


@inline
def _limits_e2m1(kind, x, limit):
    """Do so for MXFP4 and NVFP4."""
    amax, _, _ = extremes(x, 0, x.size)
    d = _scale_e2m1(kind, amax)
    for j in range(x.size):
        size = abs(x[j])
        limit[j] = max(size - 6 * d, d)
        if size < 4 * d:
            limit[j] = d / 2
        if size < 2 * d:
            limit[j] = d / 4


@inline
def _scale_e2m1(kind, amax):
    """Return the d of a block."""
    if kind == E2M1_E4M3:
        return f64(scale_value(nearest_scale(f32(f32(amax) / f32(6)))))
    if amax < 2.0**-125:
        return 0.0
    # As ggml does, the logarithm is rounded to float32 before its fraction is dropped.
    return 2.0 ** (np.floor(f32(np.log2(amax))) - 2)


@inline
def extremes(x, start, stop):
    """Return max |x|, min x and max x of some weights."""
    least, largest = x[start], x[start]
    for j in range(start, stop):
        least = x[j] if x[j] < least else least
        largest = x[j] if x[j] > largest else largest
    return max(-least, largest), least, largest


@inline
def half_step(y):
    """Return the most that float16 rounds off."""
    return max(abs(y) * 2.0**-11, min(abs(y), 2.0**-25))
