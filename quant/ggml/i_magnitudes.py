"""The loops that ready blocks of IQ2 and IQ3 for `i_fit`: magnitudes, signs, weights, first scales.

Where only an even number of signs can be stored, the column that loses least by it keeps the wrong
one, its |w| negative. An error of a column weighs

    v = g sqrt(f mean(w^2) + w^2)    with an importance g; the mean is the super-block's
    v = w^2                          IQ3 without one
    v = mean(w^2) / 2 + w^2          IQ2_S without one

Bytes are those of ggml's C: the same float32 operations in the same order.

Arrays: w float32 [B, 256]; importance float32 [C, 256] of the C super-blocks of a row, or [0, 256]
for none; x and v float32 [B, 256], |w| and weights. In loops j counts columns.
"""

from __future__ import annotations

import numpy as np

from quant.numba_ops import inline, loop

u8, u32, u64, f32 = np.uint8, np.uint32, np.uint64, np.float32

SUPER, EIGHT = u64(256), u64(8)


@loop
def prepare(w, importance, start, spread, plain, even, x, v, signs):
    """Fill in x, v, and the signs of eight columns, uint8 [B, 32], where 1 is minus.

    start   the number of the first super-block in its matrix
    spread  f, 1 or 2
    plain   without an importance, the share of f mean(w^2) in v
    even    an even number of signs, of which seven are stored
    """
    for b in range(u64(w.shape[0])):
        total = f32(0)
        for j in range(SUPER):
            total = f32(total + f32(w[b, j] * w[b, j]))
        mean = f32(f32(spread * total) / f32(256))
        if importance.shape[0] > 0:
            c = u64(u64(start + b) % u64(importance.shape[0]))
            for j in range(SUPER):
                v[b, j] = f32(importance[c, j] * np.sqrt(f32(mean + f32(w[b, j] * w[b, j]))))
        else:
            for j in range(SUPER):
                v[b, j] = f32(f32(plain * mean) + f32(w[b, j] * w[b, j]))
        for k in range(u64(32)):
            signs[b, k] = _take_signs(w, b, u64(k * EIGHT), even, x, v)


@inline
def _take_signs(w, b, at, even, x, v):
    """Fill in |w| of eight columns; return their signs."""
    minus, count = u32(0), u32(0)
    for j in range(EIGHT):
        negative = u32(w[b, u64(at + j)] < f32(0))
        x[b, u64(at + j)] = abs(w[b, u64(at + j)])
        minus, count = u32(minus | u32(negative << u32(j))), u32(count + negative)
    if not even:
        return u8(minus)
    if count % u32(2) == u32(1):
        least, wrong = _loss(x, v, b, at), u64(0)
        for other in range(u64(1), EIGHT):
            loss = _loss(x, v, b, u64(at + other))
            if loss < least:
                least, wrong = loss, u64(other)
        x[b, u64(at + wrong)] = f32(-x[b, u64(at + wrong)])
        minus = u32(minus ^ u32(u32(1) << u32(wrong)))
    return u8(minus & u32(127))


@inline
def _loss(x, v, b, j):
    """Return what the wrong sign of a column weighs."""
    return f32(f32(v[b, j] * x[b, j]) * x[b, j])


@loop
def find_tops(x, smallest, largest, tops, scales):
    """Fill in the largest x of each block of x [n, columns], 0 below `smallest`, and top / n."""
    for b in range(u64(x.shape[0])):
        top = x[b, 0]
        for j in range(u64(1), u64(x.shape[1])):
            top = top if top > x[b, j] else x[b, j]
        some = top >= smallest and top > f32(0)
        tops[b] = top if some else f32(0)
        scales[b] = f32(top / largest) if some else f32(0)
