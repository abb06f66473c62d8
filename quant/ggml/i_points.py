"""Which points of IQ2's and IQ3's grids no search would take, whatever importance it weighs by.

A search wants the least sum(v (s g - x)^2) over the points' levels g, x being |w| with the sign
that is not stored taken off. With any v > 0 a point is beaten by another one whose levels are the
same or nearer to x in every column. The scale s was rounded to the stored d (2 l + 1), so it was in
d 2 l .. d (2 l + 2); it was fitted again after points were taken, which MOVED allows for. A level
counts as nearer only if it is so under every such scale.

Arrays: w, q float32 [B, 256], weights and what is stored; unit [B, 256] what the lowest level is
worth; steps [B] d; points int64 [points, columns] the codes of the grid, levels float64 of a code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quant.ggml import codec
from quant.ggml.batches import SUPER
from quant.ggml.i_grids import levels
from quant.numba_ops import inline, loop

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

f64, u64 = np.float64, np.uint64

MOVED = 1.1
# What float16 rounds off d where d is small.
HALF_UNIT = 2.0**-25
# The bytes that choose points; in IQ2_XS signs are among them.
PLACES: dict[str, list[int]] = {
    "IQ2_XXS": [2 + 8 * block + k for block in range(8) for k in range(4)],
    "IQ2_XS": [*range(2, 66)],
    "IQ2_S": [*range(2, 34), *range(66, 74)],
    "IQ3_XXS": [*range(2, 66)],
    "IQ3_S": [*range(2, 74)],
}


def count_beaten(name: str, w: Tensor, blocks: Tensor, decoded: Tensor) -> NDArray[np.int64]:
    """Return how many points of each super-block another one beats.

    w, decoded  [B, 256]
    blocks      [B, bytes]
    """
    import torch

    lowest = blocks.clone()
    lowest[:, torch.tensor(PLACES[name])] = 0
    unit = codec.decode(name, lowest, SUPER).abs().numpy()
    steps = np.abs(blocks[:, :2].numpy().copy().view(np.float16)[:, 0].astype(np.float64))
    values = np.unique(levels(name)).astype(np.float64)
    points = np.searchsorted(values, levels(name))
    counts = np.zeros(len(blocks), np.int64)
    arrays = w.float().numpy(), decoded.numpy(), unit, steps
    _count(*arrays, points, values / values[0], counts)
    return counts


def num_points(name: str) -> int:
    """Return how many points a super-block has."""
    return SUPER // int(levels(name).shape[1])


@loop
def _count(w, q, unit, steps, points, levels, counts):
    """Fill in the beaten points of each super-block."""
    columns = points.shape[1]
    near = np.empty((columns, levels.size), np.bool_)
    codes = np.empty(columns, np.int64)
    for b in range(w.shape[0]):
        for first in range(0, w.shape[1], columns):
            found = 0
            for j in range(columns):
                at = first + j
                one, x = f64(unit[b, at]), f64(w[b, at]) * np.sign(f64(q[b, at]))
                codes[j] = _code(abs(f64(q[b, at])), one, levels)
                found += _nearer(x, one, steps[b], codes[j], levels, near[j])
            counts[b] += _is_beaten(points, near, codes) if found > 0 else 0


@inline
def _code(q, one, levels):
    """Return the code of a stored value."""
    code = 0
    for c in range(levels.size):
        code = c if abs(levels[c] * one - q) < abs(levels[code] * one - q) else code
    return code


@inline
def _nearer(x, one, step, code, levels, near):
    """Fill in which levels are the stored one or nearer; return how many are nearer."""
    odd = one / step if step > 0 else 1.0
    rounded = HALF_UNIT / step if step > 0 else 1.0
    low = one * (odd - 1) / odd / MOVED * (1 - rounded)
    high = one * (odd + 1) / odd * MOVED * (1 + rounded)
    found = 0
    for c in range(levels.size):
        middle = (levels[c] + levels[code]) / 2
        closer = one > 0 and (x > high * middle if c > code else x < low * middle)
        near[c] = c == code or closer
        found += c != code and closer
    return found


@inline
def _is_beaten(points, near, codes):
    """Return 1 if a point other than the stored one has only levels that are near."""
    beaten = 0
    for p in range(points.shape[0]):
        fits, other = True, False
        for j in range(points.shape[1]):
            fits = fits and near[j, points[p, j]]
            other = other or points[p, j] != codes[j]
            if not fits:
                break
        if fits and other:
            beaten = 1
            break
    return beaten
