"""Gates of the delta rule summed within chunks of 64, before each is solved.

Chosen for: prompts whose programs solve several value heads, see solve; of others each program sums
its own.

    G = running sum of g / ln 2 within a chunk

Shape letters: T packed tokens, N sequences, V value heads, C chunk, P padded tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.delta_rule.rule import CHUNK
from runtime.kernels.delta_rule.step import gates
from runtime.kernels.launch import jit, ragged_block, ragged_blocks, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# Planes of `factors`: -e^G uk, e^G uq / sqrt(dk), e^G_C, G / ln 2, beta.
PLANES = 5
_HEADS = 16


def sum_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor, factors: Tensor
) -> None:
    """Fill in the last three planes of factors [5, V, P] for a, b [T, V]."""
    (num_tokens, heads), num_sequences = a.shape, cu_seqlens.shape[0] - 1
    blocks = ragged_blocks(num_tokens, num_sequences, CHUNK)
    _gates_kernel[(blocks, -(-heads // _HEADS))](
        a,
        b,
        A_log,
        dt_bias,
        cu_seqlens,
        factors,
        num_sequences,
        factors.shape[2],
        a.stride(0),
        b.stride(0),
        V=heads,
        C=CHUNK,
        BH=_HEADS,
        STEPS=num_sequences.bit_length(),
        num_warps=4,
        **early(),
    )


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
def chunk_gates(factor, P, left, V: tl.constexpr, C: tl.constexpr):
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
def summed_gates(a, b, A_log, dt_bias, a_row, b_row, left, C: tl.constexpr):
    """Return `chunk_gates` of one head from a and b."""
    c = tl.arange(0, C)
    a_C = tl.load(a + c * a_row, mask=c < left, other=0.0)
    b_C = tl.load(b + c * b_row, mask=c < left, other=0.0)
    g, beta = gates(a_C, b_C, tl.load(A_log), tl.load(dt_bias), b)
    G = tl.cumsum(tl.where(c < left, g * 1.4426950408889634, 0.0), 0)
    G_end = tl.sum(tl.where(c == C - 1, G, 0.0), 0)
    G, beta = tl.where(c < left, G, 0.0), tl.where(c < left, beta, 0.0)
    rows, columns = tl.reshape(beta, (C // 16, 16, 1)), tl.reshape(beta, (C // 16, 1, 16))
    return G[:, None], G[None, :], G_end, rows, columns
