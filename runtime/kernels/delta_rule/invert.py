"""The inverse of a chunk's unit triangular matrix, within a kernel.

Chosen for: never alone, see solve.

    X = (I + L)^-1 diag(beta)

No entry of X, or of the products that form it, exceeds 1: I - beta k k^T stretches nothing. Hence
float16, with ten bits of mantissa, serves there as TF32 would.

Shape letters: C chunk, B diagonal blocks of 16.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, tl


@jit
def _added(row, column, level: tl.constexpr):
    """Return where diagonal blocks of twice 2^level reach below those of 2^level."""
    same = (row >> (level + 1)) == (column >> (level + 1))
    return same & ((row >> level) > (column >> level))


@jit
def invert(L, beta, column_beta, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """Return (diag(1 / beta) + L)^-1 [64, 64], L strictly lower triangular, by doubling blocks.

    With X the inverse of the diagonal blocks, that of the blocks twice as large is X - X L' X,
    L' being what those add. Powers of L would need fewer steps, but overflow: equal keys make
    entries of 10^17 that cancel. Up to 16 there is one small product for each diagonal block. Its
    right side is a transpose, which a tensor core takes from the registers of a product as they
    are: so the transposes are computed too.

    L [64, 64]; beta, column_beta: as [4, 16, 1] and [4, 1, 16]
    """
    C: tl.constexpr = L.shape[0]
    B: tl.constexpr = C // 16
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    near = tl.reshape(tl.arange(0, C) // 16, (C, 1, 1)) == tl.arange(0, B)[None, :, None]
    L_b = tl.sum(tl.where(near, tl.reshape(L, (C, B, 16)), 0.0), 1)
    L_b = tl.reshape(L_b, (B, 16, 16))
    L_bt = tl.permute(L_b, (0, 2, 1))
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    one = tl.where(i == j, beta, 0.0)
    X_b = one - tl.where(_added(i, j, 0), L_b * (beta * column_beta), 0.0)
    X_bt = one - tl.where(_added(j, i, 0), L_bt * (beta * column_beta), 0.0)
    L_bt = L_bt.to(FINE)
    for level in tl.static_range(1, 4):
        L_ = tl.permute(tl.where(_added(j, i, level), L_bt, 0.0).to(FINE), (0, 2, 1))
        X_, X_t_ = X_b.to(FINE), X_bt.to(FINE)
        P_ = tl.dot(X_, L_, input_precision=PRECISION).to(FINE)
        X_b -= tl.dot(P_, tl.permute(X_t_, (0, 2, 1)), input_precision=PRECISION)
        X_bt -= tl.dot(X_t_, tl.permute(P_, (0, 2, 1)), input_precision=PRECISION)
    X = tl.reshape(tl.broadcast_to(tl.reshape(X_b, (C, 1, 16)), (C, B, 16)), (C, C))
    X = tl.where(row // 16 == column // 16, X, 0.0)
    for level in tl.static_range(4, 6):
        X_ = X.to(FINE)
        L_ = tl.where(_added(row, column, level), L, 0.0).to(FINE)
        P_ = tl.dot(X_, L_, input_precision=PRECISION).to(FINE)
        X -= tl.dot(P_, X_, input_precision=PRECISION)
    return X
