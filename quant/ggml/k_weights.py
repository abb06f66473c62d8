"""What an error of a column weighs with an importance g, for the loops that search K-quants.

    v = g, or g sqrt(c mean(w^2) + w^2)    the mean is the super-block's, c is 1 or 2

Blocks of 16 or 32 columns lie side by side, one to a lane, as `k_lines` and `k_steps` search them.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.lane_types import LANES
from quant.ggml.lanes import gather, load, root, splat, store
from quant.numba_ops import inline

u64, f32 = np.uint64, np.float32

W = u64(LANES)
SUPER = u64(256)


@inline
def mean_squares(flat, factor, spread):
    """Fill in c mean(w^2) of each super-block of w, flat float32."""
    for b in range(u64(0), u64(spread.shape[0]), W):
        total = splat(f32(0))
        for j in range(SUPER):
            x = gather(flat, b * SUPER + j, SUPER)
            total = total + x * x
        store(spread, b, splat(factor) * total / splat(f32(256)))


@inline
def lay_importance(importance, spread, first, block, columns, v):
    """Fill in g of LANES blocks from `block` on; return c mean(w^2) of each."""
    flat, mean = importance.reshape(-1), np.empty(W, f32)
    per_super = SUPER // columns
    for i in range(W):
        b = block + i
        mean[i] = spread[b // per_super]
        at = ((first * per_super + b) * columns) % u64(flat.size)
        for j in range(columns):
            v[j * W + i] = flat[at + j]
    return load(mean, u64(0))


@inline
def times_root(x, sigma, size, v):
    """Multiply g of columns x by sqrt(sigma + x^2)."""
    for j in range(u64(0), size, W):
        a = load(x, j)
        store(v, j, load(v, j) * root(sigma + a * a))
