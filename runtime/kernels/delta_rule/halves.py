"""A long prompt of few heads, walked in two halves at once.

Chosen for: one sequence of 2048 tokens or more whose heads leave most of a GPU idle.

The state after a chunk is linear in the state before it, and so are its outputs. What the second
half makes of a state S that it does not know yet is

    o_t = o'_t + q'_t S          S_end = S' + A S

with o' and S' of a walk from zeros, q' and A of a walk from the identity whose values are zeros. So
three walks go on at the same time, each half as long; then two products join them. No entry of A
exceeds 1: no step stretches anything. A product more rounds: against float64, outputs of the second
half whose states hardly decay are 5.0e-3 off for 4.7e-3. H200, 16 heads, us: 52 for 67 of 2048
tokens, 169 for 227 of 8192; of 512 tokens 0.8B takes 2.016 ms for 1.943.

Shape letters: T packed tokens, V value heads, d key and value size, C chunk, P padded tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.delta_rule.rule import CHUNK
from runtime.kernels.delta_rule.walk import walked
from runtime.kernels.launch import HAS_TRITON, jit, operand, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.waves import MULTIPROCESSORS

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

_WALKS = 3
_LONG = 2048
_FEW, _MANY = 16, 64  # rows of a state, or tokens, of a program that joins


def fits(q: Tensor, v: Tensor, slots: Tensor, columns: int) -> bool:
    """Return whether there is one long sequence, and a GPU has room for its three walks at once.

    columns  of a state that a program walks with
    """
    (tokens, heads, d), square = v.shape, q.shape[2] == v.shape[2]
    whole = square and d & (d - 1) == 0 and d >= _FEW
    room = _WALKS * heads * (d // columns) <= MULTIPROCESSORS
    return len(slots) == 1 and tokens >= _LONG and whole and room


def launch_halves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    solved: tuple[Tensor, Tensor],
    state_pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Return o of `gated_delta_prefill`, whose docstring names the arguments, of one sequence.

    solved   what `solve` returns
    options  of the walk
    """
    (tokens, heads, d), (factors, columns) = v.shape, (solved[1], options["BV"])
    half = -(-tokens // (2 * CHUNK)) * CHUNK
    # behind the outputs are those to the identity
    o = torch.empty((tokens + half, heads, d), dtype=v.dtype, device=v.device)
    states = torch.empty((_WALKS, heads, d, d), dtype=torch.float32, device=v.device)
    middle = torch.empty((heads, d, d), dtype=v.dtype, device=v.device)
    at = o, state_pool, states, middle, slots, cu_seqlens
    _halves_kernel[(_WALKS * (d // columns), heads)](
        *(chunk_tiles(x, d) for x in (q, k)),
        *(chunk_tiles(x, columns) for x in (v, o)),
        TensorDescriptor.from_tensor(solved[0], [2, CHUNK, CHUNK]),
        *at,
        factors,
        tokens,
        factors.shape[2],
        state_pool.stride(0),
        **options,
        **early(),
    )
    blocks = -(-half // _MANY)
    _join_kernel[(blocks + d // _FEW, heads)](
        *at,
        tokens,
        blocks,
        state_pool.stride(0),
        V=heads,
        D=d,
        C=CHUNK,
        TOKENS=_MANY,
        ROWS=_FEW,
        STEP=min(d, 64),
        PRECISION=options["PRECISION"],
        num_warps=8,
        num_stages=1,
        **early(),
    )
    return o[:tokens]


def chunk_tiles(x_THd: Tensor, columns: int) -> Any:
    """Return a descriptor of x as [H, T, d] whose tiles are a chunk of one head."""
    x = x_THd.transpose(0, 1)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, CHUNK, columns])


@jit
def _bounds(cu_seqlens, C: tl.constexpr):
    """Return (start, cut, end) of the sequence; it is cut where a chunk begins."""
    start, end = tl.load(cu_seqlens).to(tl.int32), tl.load(cu_seqlens + 1).to(tl.int32)
    return start, start + tl.cdiv(end - start, C) // 2 * C, end


@jit
def _halves_kernel(
    q,
    k,
    v,
    o,
    solved,
    o_at,
    pool,
    states,
    middle,
    slots,
    cu_seqlens,
    factors,
    T,
    P,
    pool_row,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk the first half from its state, the second from zeros, the second from the identity."""
    start_next()
    wait_for_inputs()
    walk, column = tl.program_id(0) // (DV // BV), tl.program_id(0) % (DV // BV) * BV
    h = tl.program_id(1)
    slot = tl.load(slots).to(tl.int64)
    start, cut, end = _bounds(cu_seqlens, C)
    i, j = tl.arange(0, BK)[None, :], (column + tl.arange(0, BV))[:, None]
    at = (h * DK + i) * DV + j
    known = (j < tl.where((slot >= 0) & (walk == 0), DV, 0)) & (i < DK)
    S_vk = tl.load(pool + slot * pool_row + at, mask=known, other=0.0).to(tl.float32)
    S_vk = tl.where((i == j) & (walk == 2), 1.0, S_vk)
    first, last = tl.where(walk == 0, start, cut), tl.where(walk == 0, cut, end)
    further = tl.where(walk == 2, T - cut, 0)
    S_vk = walked(
        q, k, v, o, solved, o_at, factors, S_vk, h, first, last, column, further, walk != 2, P,
        V, REPEAT, DV, C, BK, BV, PRECISION,
    )  # fmt: skip
    tl.store(states + walk * V * DK * DV + at, S_vk)
    tl.store(middle + at, S_vk.to(middle.dtype.element_ty), mask=(walk == 0) & (i < DK))


@jit
def _join_outputs(
    o, middle, t, cut, end, T, h,
    V: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to outputs of the second half what it makes of the state before it."""
    j, p, inside = tl.arange(0, D)[None, :], tl.arange(0, STEP), t < end
    at = o + (t.to(tl.int64) * V + h) * D
    further = (T - cut).to(tl.int64) * V * D
    total = tl.load(at + j, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, D, STEP):
        q_BP = operand(tl.load(at + further + first + p[None, :], mask=inside, other=0.0))
        S_PD = operand(tl.load(middle + (h * D + first + p[:, None]) * D + j))
        total = tl.dot(q_BP, S_PD, total, input_precision=PRECISION)
    tl.store(at + j, total.to(o.dtype.element_ty), mask=inside)


@jit
def _join_state(to, kept, before, after, A, i, D: tl.constexpr, STEP: tl.constexpr):
    """Store rows of the state after both halves."""
    j, p = tl.arange(0, D)[None, :], tl.arange(0, STEP)
    total = tl.load(after + i * D + j)
    for first in range(0, D, STEP):
        A_BP = tl.load(A + i * D + first + p[None, :])
        S_PD = tl.load(before + (first + p[:, None]) * D + j)
        total = tl.dot(A_BP, S_PD, total, input_precision="tf32x3")
    tl.store(to + i * D + j, total.to(to.dtype.element_ty), mask=(j < D) & kept)


@jit
def _join_kernel(
    o,
    pool,
    states,
    middle,
    slots,
    cu_seqlens,
    T,
    blocks,
    pool_row,
    V: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Join the walks: outputs of the second half, or rows of the state after it."""
    start_next()
    wait_for_inputs()
    block, h = tl.program_id(0), tl.program_id(1)
    _, cut, end = _bounds(cu_seqlens, C)
    if block < blocks:
        t = cut + block * TOKENS + tl.arange(0, TOKENS)[:, None]
        _join_outputs(o, middle, t, cut, end, T, h, V, D, STEP, PRECISION)
    else:
        slot = tl.load(slots).to(tl.int64)
        to, before = pool + slot * pool_row + h * D * D, states + h * D * D
        after = before + V * D * D
        i = (block - blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        _join_state(to, slot >= 0, before, after, after + V * D * D, i, D, ROWS)
