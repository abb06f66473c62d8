"""Whether the codes of stored blocks are the nearest ones under the scales beside them.

K-quants and IQ4 search for scales, with an importance matrix or without, but once the scales are
stored, llama.cpp takes every code again, so that no other value of its block is nearer:

    |w - q| <= min over codes |w - value| + 2^-20 (|w| + |least| + |largest|) + (|q| + |value|) r

The first slack is float32 arithmetic; r is what float16 rounds off d, which IQ4 does after taking
the codes (2^-11, or 2^-25 / d where d is subnormal), and 0 elsewhere.

The values of a block are those between the least and the largest, which the all-zero and the
all-one code decode to: evenly spaced, or by IQ4's table.

Source: llama.cpp's `quantize_row_q*_K_ref`, `quantize_row_q*_K_impl` and
`quantize_row_iq4_nl_impl` at b11434.

Arrays: w [B, n] bits of bfloat16 or float32, the others [B, n] float32, n columns of one scale d.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.iq4_search import VALUES
from quant.numba_ops import as_float, loop

f64 = np.float64

# The bytes of a super-block that hold codes, and the largest code; 0 for IQ4's table.
CODES = {
    "Q2_K": (16, 80, 3),
    "Q3_K": (0, 96, 7),
    "Q4_K": (16, 144, 15),
    "Q5_K": (16, 176, 31),
    "Q6_K": (0, 192, 63),
    "IQ4_NL": (2, 18, 0),
    "IQ4_XS": (8, 136, 0),
}
SLACK = 2.0**-20
STEPS = (np.array(VALUES, f64) - VALUES[0]) / (f64(VALUES[15]) - VALUES[0])


@loop
def count_far(w, y, least, largest, most, steps, rounded, counts):
    """Fill in how many of each row's values are not the nearest.

    most     the largest code, 0 for a table of `steps` from 0 to 1
    rounded  r of each row, float64 [B]
    """
    for b in range(w.shape[0]):
        far = 0
        for j in range(w.shape[1]):
            x, q = f64(as_float(w[b, j])), f64(y[b, j])
            low, span = f64(least[b, j]), f64(largest[b, j]) - f64(least[b, j])
            place = (x - low) / span if span != 0 else 0.0
            gap = _gap(min(max(place, 0.0), 1.0), most, steps)
            value = low + gap * span
            best, moved = abs(x - value), (abs(q) + abs(value)) * rounded[b]
            slack = SLACK * (abs(x) + abs(low) + abs(low + span)) + moved
            far += not abs(x - q) <= best + slack
        counts[b] = far


@loop
def _gap(place, most, steps):
    """Return the nearest step to a place between 0 and 1."""
    if most > 0:
        return np.rint(place * most) / most
    nearest = 0.0
    for k in range(steps.size):
        nearest = steps[k] if abs(steps[k] - place) < abs(nearest - place) else nearest
    return nearest
