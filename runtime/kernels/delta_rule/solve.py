"""Chunks of 64 before the walk: each chunk's triangular system solved.

Chosen for: every prompt on a GPU, before the walk of prefill.

With G the running sum of g within a chunk, u = 1 / |.| and the L and A of

    L_ij = beta_i e^(G_i - G_j) uk_i uk_j k_i.k_j,  j < i           X = (I + L)^-1 diag(beta)
    A_ij = e^(G_i - G_j) uq_i uk_j q_i.k_j / sqrt(dk),  j <= i

a program for each chunk and some value heads of one key head writes W = diag(e^(G_C - G) uk) X and
Y = A X. Its gates are summed before, by `chunk_gates`; of a short prompt it sums those of its head
itself. The walk: see prefill.

Shape letters: T packed tokens, N sequences, H key heads, V value heads, k key size, C chunk, P
padded tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.delta_rule.chunk_gates import PLANES, chunk_gates, sum_gates, summed_gates
from runtime.kernels.delta_rule.invert import invert
from runtime.kernels.delta_rule.rule import CHUNK, EPS
from runtime.kernels.launch import jit, operand, ragged_block, ragged_blocks, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# A program that solves all value heads of a key head saves products with k: 111 for 145 with 48
# value heads, 88 for 106 with 32. Below so many of them a GPU is not full, and one head for each
# program is as fast or faster. Then a kernel less counts, too: 512 tokens of 0.8B take 2.05 ms on
# an H200, 2.12 with one for gates; 8192 tokens 255 us with it, 258 without, 32 value heads. Nor
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
    factors = torch.empty((PLANES, heads, padded), dtype=torch.float32, device=q.device)
    steps, full = num_sequences.bit_length(), heads > key_heads and blocks * key_heads >= _FULL
    room = {"maxnreg": 168} if not full and blocks * heads >= _MANY else {}
    if full:
        sum_gates(a, b, A_log, dt_bias, cu_seqlens, factors)
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
        ahead = chunk_gates(factor, P, left, V, C)
    else:
        a_at = a + first.to(tl.int64) * a_row + first_head
        b_at = b + first.to(tl.int64) * b_row + first_head
        weights = A_log + first_head, dt_bias + first_head
        ahead = summed_gates(a_at, b_at, *weights, a_row, b_row, left, C)
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
            G_row, G_column, G_end, beta, column_beta = chunk_gates(factor, P, left, V, C)
        decay = tl.exp2(tl.minimum(G_row - G_column, 0.0))
        X = invert(kk * decay, beta, column_beta, PRECISION, FINE)
        Y = tl.dot((qk * decay).to(FINE), X.to(FINE), input_precision=PRECISION)
        W = X * (tl.exp2(G_end - G_row) * k_unit[:, None])
        at = solved + (h * P + first) * C + (row * C + column)
        tl.store(at, W.to(solved.dtype.element_ty), mask=inside)
        tl.store(at + (V * C) * P.to(tl.int64), Y.to(solved.dtype.element_ty), mask=inside)
        grown = tl.exp2(G_row)
        tl.store(factor + row, -grown * k_unit[:, None], mask=inside)
        tl.store(factor + V * P + row, grown * q_unit[:, None], mask=inside)
