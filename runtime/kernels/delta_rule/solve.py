"""Chunks of 64 before the walk: gates summed, and each chunk's triangular system solved.

Chosen for: every prompt on a GPU, before the walk of prefill.

With G the running sum of g within a chunk, u = 1 / |.| and the L and A of

    L_ij = beta_i e^(G_i - G_j) uk_i uk_j k_i.k_j,  j < i           X = (I + L)^-1 diag(beta)
    A_ij = e^(G_i - G_j) uq_i uk_j q_i.k_j / sqrt(dk),  j <= i

the first kernel sums the gates. The second has a program for each chunk and some value heads of one
key head, and writes W = diag(e^(G_C - G) uk) X and Y = A X. Of a short prompt it sums the gates of
its head itself, and there is no first one. The walk: see prefill.

No entry of X, or of the products that form it, exceeds 1: I - beta k k^T stretches nothing. Hence
float16, with ten bits of mantissa, serves there as TF32 would.

Shape letters: T packed tokens, N sequences, H key heads, V value heads, k key size, C chunk, P
padded tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.delta_rule.rule import CHUNK, EPS
from runtime.kernels.delta_rule.step import gates
from runtime.kernels.launch import (
    jit,
    operand,
    ragged_block,
    ragged_blocks,
    tl,
)
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# Planes of `factors`: -e^G uk, e^G uq / sqrt(dk), e^G_C, G / ln 2, beta.
_PLANES = 5
_GATE_HEADS = 16
# A program that solves all value heads of a key head saves products with k: 111 for 145 with 48
# value heads, 88 for 106 with 32. Below so many of them a GPU is not full, and one head for each
# program is as fast or faster. Then a kernel less counts, too: 512 tokens of 0.8B take 2.05 ms on
# an H200, 2.12 with the first kernel; 8192 tokens 255 us with it, 258 without, 32 value heads. Nor
# is there one where each value head has a key head of its own: then nobody else needs its gates.
_FULL = 256
# So many programs are faster three on a multiprocessor: 16 heads, 8192 tokens 47.8 us for 55.7. Of
# fewer none waits for another, and of several heads there are more registers: 113.8 for 106.3, 48.
_MANY = 1024


def solve(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    sizes: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return (W and Y [2, V*P, C], factors [5, V, P])."""
    (num_tokens, heads), (_, key_heads, dk) = a.shape, k.shape
    num_sequences = cu_seqlens.shape[0] - 1
    blocks = ragged_blocks(num_tokens, num_sequences, CHUNK)
    # whole chunks, and one more: the walk reads the factors of the chunk after its last
    padded = (-(-num_tokens // CHUNK) + 1) * CHUNK
    solved = torch.empty((2, heads * padded, CHUNK), dtype=q.dtype, device=q.device)
    factors = torch.empty((_PLANES, heads, padded), dtype=torch.float32, device=q.device)
    steps, full = num_sequences.bit_length(), heads > key_heads and blocks * key_heads >= _FULL
    room = {"maxnreg": 168} if not full and blocks * heads >= _MANY else {}
    if full:
        _gates_kernel[(blocks, -(-heads // _GATE_HEADS))](
            a,
            b,
            A_log,
            dt_bias,
            cu_seqlens,
            factors,
            num_sequences,
            padded,
            a.stride(0),
            b.stride(0),
            V=heads,
            C=CHUNK,
            BH=_GATE_HEADS,
            STEPS=steps,
            num_warps=4,
            **early(),
        )
    together = heads // key_heads if full else 1
    _solve_kernel[(blocks, heads // together)](
        q,
        k,
        *((None,) * 4 if full else (a, b, A_log, dt_bias)),
        cu_seqlens,
        solved,
        factors,
        num_sequences,
        padded,
        *(x.stride(0) for x in (q, k, a, b)),
        dk**-0.5,
        EPS,
        TOGETHER=together,
        EXACT=q.dtype == torch.float32,
        STEPS=steps,
        **sizes,
        **room,
        **early(),
    )
    return solved, factors


@jit
def _gates_kernel(
    a,
    b,
    A_log,
    dt_bias,
    cu_seqlens,
    factors,
    N,
    P,
    a_row,
    b_row,
    V: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    STEPS: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    _, _, end, first = ragged_block(tl.program_id(0), cu_seqlens, N, C, STEPS)
    if first >= end:
        return
    c = tl.arange(0, C)[:, None]
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[None, :]
    t = first.to(tl.int64) + c
    head = h < V
    inside = (t < end) & head
    a_CH = tl.load(a + t * a_row + h, mask=inside, other=0.0)
    b_CH = tl.load(b + t * b_row + h, mask=inside, other=0.0)
    A_H = tl.load(A_log + h, mask=head, other=0.0)
    g, beta = gates(a_CH, b_CH, A_H, tl.load(dt_bias + h, mask=head, other=0.0), b)
    G = tl.cumsum(tl.where(inside, g * 1.4426950408889634, 0.0), 0)
    G_end = tl.sum(tl.where(c == C - 1, G, 0.0), 0)  # not the sum of g: it would round otherwise
    at = factors + h.to(tl.int64) * P + t
    tl.store(at + 2 * V * P, tl.exp2(G_end[None, :] + tl.zeros_like(G)), mask=inside)
    tl.store(at + 3 * V * P, G, mask=inside)
    tl.store(at + 4 * V * P, beta, mask=inside)


@jit
def _added(row, column, level: tl.constexpr):
    """Return where diagonal blocks of twice 2^level reach below those of 2^level."""
    same = (row >> (level + 1)) == (column >> (level + 1))
    return same & ((row >> level) > (column >> level))


@jit
def _invert(L, beta, column_beta, PRECISION: tl.constexpr, FINE: tl.constexpr):
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


@jit
def _chunk_gates(factor, P, left, V: tl.constexpr, C: tl.constexpr):
    """Return G as rows, as columns and at the end, and beta as [4, 16, 1] and [4, 1, 16]."""
    c = tl.arange(0, C)
    block, i_16 = tl.arange(0, C // 16)[:, None, None] * 16, tl.arange(0, 16)
    i, j = i_16[None, :, None], i_16[None, None, :]
    G_at, beta_at = factor + 3 * V * P, factor + 4 * V * P + block
    return (
        tl.load(G_at + c[:, None], mask=c[:, None] < left, other=0.0),
        tl.load(G_at + c[None, :], mask=c[None, :] < left, other=0.0),
        tl.load(G_at + tl.minimum(C, left) - 1),
        tl.load(beta_at + i, mask=block + i < left, other=0.0),
        tl.load(beta_at + j, mask=block + j < left, other=0.0),
    )


@jit
def _summed_gates(a, b, A_log, dt_bias, a_row, b_row, left, C: tl.constexpr):
    """Return `_chunk_gates` of one head from a and b."""
    c = tl.arange(0, C)
    a_C = tl.load(a + c * a_row, mask=c < left, other=0.0)
    b_C = tl.load(b + c * b_row, mask=c < left, other=0.0)
    g, beta = gates(a_C, b_C, tl.load(A_log), tl.load(dt_bias), b)
    G = tl.cumsum(tl.where(c < left, g * 1.4426950408889634, 0.0), 0)
    G_end = tl.sum(tl.where(c == C - 1, G, 0.0), 0)
    G, beta = tl.where(c < left, G, 0.0), tl.where(c < left, beta, 0.0)
    rows, columns = tl.reshape(beta, (C // 16, 16, 1)), tl.reshape(beta, (C // 16, 1, 16))
    return G[:, None], G[None, :], G_end, rows, columns


@jit
def _products(
    q,
    k,
    q_row,
    k_row,
    left,
    scale,
    eps,
    DK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return k.k and, for j <= i, q.k of a chunk's units [C, C], then the factors uk and uq."""
    i = tl.arange(0, BK)[None, :]
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    keys = (row < left) & (i < DK)
    k_ = operand(tl.load(k + (row * k_row + i), mask=keys, other=0.0))
    q_ = operand(tl.load(q + (row * q_row + i), mask=keys, other=0.0))
    kk = tl.dot(k_, tl.trans(k_), input_precision=PRECISION)
    qk = tl.dot(q_, tl.trans(k_), input_precision=PRECISION)
    qq = tl.dot(q_, tl.trans(q_), input_precision=PRECISION)
    k_unit = tl.rsqrt(tl.sum(tl.where(row == column, kk, 0.0), 1) + eps)
    q_unit = tl.rsqrt(tl.sum(tl.where(row == column, qq, 0.0), 1) + eps) * scale
    kk *= k_unit[:, None] * k_unit[None, :]
    qk *= q_unit[:, None] * k_unit[None, :]
    return kk, tl.where(row >= column, qk, 0.0), k_unit, q_unit


@jit
def _solve_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    cu_seqlens,
    solved,
    factors,
    N,
    P,
    q_row,
    k_row,
    a_row,
    b_row,
    scale,
    eps,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    TOGETHER: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write W, Y and the first two factors of one chunk and TOGETHER value heads.

    a  None: the gates of each head are summed already, and e^G_C is written
    """
    start_next()
    wait_for_inputs()
    _, _, end, first = ragged_block(tl.program_id(0), cu_seqlens, N, C, STEPS)
    if first >= end:
        return
    FINE: tl.constexpr = tl.float32 if EXACT else tl.float16
    first_head = tl.program_id(1) * TOGETHER
    left = end - first
    c = tl.arange(0, C)
    row, column = c[:, None], c[None, :]
    inside = row < left
    factor = factors + first_head.to(tl.int64) * P + first
    if a is None:
        ahead = _chunk_gates(factor, P, left, V, C)
    else:
        a_at = a + first.to(tl.int64) * a_row + first_head
        b_at = b + first.to(tl.int64) * b_row + first_head
        weights = A_log + first_head, dt_bias + first_head
        ahead = _summed_gates(a_at, b_at, *weights, a_row, b_row, left, C)
        tl.store(factor + 2 * V * P, tl.exp2(ahead[2]))
    k_at = k + first.to(tl.int64) * k_row + first_head // REPEAT * DK
    q_at = q + first.to(tl.int64) * q_row + first_head // REPEAT * DK
    kk, qk, k_unit, q_unit = _products(
        q_at, k_at, q_row, k_row, left, scale, eps, DK, C, BK, PRECISION
    )

    for u in tl.static_range(TOGETHER):
        h = (first_head + u).to(tl.int64)
        factor = factors + h * P + first
        # those of all heads ahead would not fit in registers
        if u == 0:
            G_row, G_column, G_end, beta, column_beta = ahead
        else:
            G_row, G_column, G_end, beta, column_beta = _chunk_gates(factor, P, left, V, C)
        decay = tl.exp2(tl.minimum(G_row - G_column, 0.0))
        X = _invert(kk * decay, beta, column_beta, PRECISION, FINE)
        Y = tl.dot((qk * decay).to(FINE), X.to(FINE), input_precision=PRECISION)
        W = X * (tl.exp2(G_end - G_row) * k_unit[:, None])
        at = solved + (h * P + first) * C + (row * C + column)
        tl.store(at, W.to(solved.dtype.element_ty), mask=inside)
        tl.store(at + (V * C) * P.to(tl.int64), Y.to(solved.dtype.element_ty), mask=inside)
        grown = tl.exp2(G_row)
        tl.store(factor + row, -grown * k_unit[:, None], mask=inside)
        tl.store(factor + V * P + row, grown * q_unit[:, None], mask=inside)
