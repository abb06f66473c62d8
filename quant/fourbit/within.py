"""The gain of the weights that lie between the least and the largest value of their codes.

A scale of half the size explains most codes of two bits: they are the last of their side, with the
weight beyond. But what it does not cut off is half as large, too. Errors that were moved there know
nothing of the weight, so these weights have 0.7 to 1.12 times their own gain, or ours if that is
farther from 1, give or take 4 standard errors; rows are the sample.

Measured as in `judge`: Q2_K 0.95 to 1.02, 0.79 with damping 0.001. Points of IQ2 and IQ3, damping
0.3: 0.86 to 1.02, of weights with heavy tails 0.83 to 1.14; at half the scale 0.4 to 0.65.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.measure import Within

if TYPE_CHECKING:
    from torch import Tensor

    from quant.measure import Error

LEAST, MOST, CERTAIN = 0.7, 1.12, 4


def within(w: Tensor, q: Tensor, own: Tensor) -> Within:
    """Return the sums of rows [N, K] whose weights beyond the values of their codes are 0."""
    square, product, ours = ((w * x).sum(-1) for x in (w, q, own))
    pairs = (square @ square, square @ product, product @ product)
    return Within(*(float(x.sum()) for x in (square, product, ours)), *map(float, pairs))


def gain_within(error: Error) -> list[str]:
    """Return if weights within the values of their codes have another gain, for certain."""
    sums = error.within
    if sums is None or not sums.square:
        return []
    gain, ours = sums.product / sums.square, sums.ours / sums.square
    spread = sums.of_products - 2 * gain * sums.of_both + gain**2 * sums.of_squares
    slack = CERTAIN * max(spread, 0.0) ** 0.5 / sums.square
    if LEAST * min(1, ours) - slack <= gain <= MOST * max(1, ours) + slack:
        return []
    return [f"its values are {gain:.4g} times the weights that lie within the range of their codes"]
