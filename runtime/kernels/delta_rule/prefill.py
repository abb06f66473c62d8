"""Chunks of 64 on a GPU: what the state does not touch all at once, then a walk along the chunks.

Chosen for: every prompt on a GPU.

With W, Y, G and u of `solve`, and S the state before a chunk, a program walks a sequence with
columns of S in registers:

    r = v - diag(e^G uk) k S      o = diag(e^G uq / sqrt(dk)) q S + Y r      S <- e^G_C S + k^T W r

Norms and decays stay outside the products with k and q, whose operands are then exact inputs.

Shape letters: T packed tokens, N sequences, H key heads, V value heads, k key size, v value size,
C chunk, P padded tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.delta_rule.rule import CHUNK
from runtime.kernels.delta_rule.solve import solve
from runtime.kernels.launch import (
    HAS_TRITON,
    jit,
    operand,
    power_of_two,
    tl,
)
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

# All times are microseconds on an H200, heads of 128, bfloat16, replayed in a CUDA graph.
#
#     tokens                          512   2048   8192   32768      fla-core 0.6.0, chunks:
#     16 key and 48 value heads        38     89    295    1110       77    210    736 (8192)
#     16 and 32                        33     81    268    1009
#     16 and 16                        33     75    240     890
#
# The walk takes two thirds of them, 1.5 a chunk whatever the heads: four products that wait for
# one another, not bytes. Slower there, at 8192 tokens and 48 heads, where it takes 200: 2 stages,
# 323; 128 columns and 8 warps, 330; 32 columns, 463. Walking the first tokens on a second stream
# while the next are solved gained 4 % of the whole and cost the host five launches.
_COLUMNS, _STAGES = 64, 3


def launch_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Return o of `gated_delta_prefill`, whose docstring names the arguments."""
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if o.shape[0] == 0:
        return o
    (_, heads, dv), (_, key_heads, dk) = v.shape, k.shape
    exact = v.dtype == torch.float32
    rows, columns = max(power_of_two(dk), 16), max(16, min(_COLUMNS, power_of_two(dv)))
    sizes = {
        "V": heads,
        "REPEAT": heads // key_heads,
        "DK": dk,
        "C": CHUNK,
        "BK": rows,
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": 4,
    }
    solved, factors = solve(q, k, a, b, A_log, dt_bias, cu_seqlens, sizes)
    _scan_kernel[(-(-dv // columns), heads, slots.shape[0])](
        *(_tiles(x, rows) for x in (q, k)),
        *(_tiles(x, columns) for x in (v, o)),
        TensorDescriptor.from_tensor(solved, [2, CHUNK, CHUNK]),
        o,
        state_pool,
        slots,
        cu_seqlens,
        factors,
        factors.shape[2],
        state_pool.stride(0),
        DV=dv,
        BV=columns,
        num_stages=1 if exact else _STAGES,
        **sizes,
        **early(),
    )
    return o


def _tiles(x_THd: Tensor, columns: int) -> Any:
    """Return a descriptor of x as [H, T, d] whose tiles are a chunk of one head."""
    x = x_THd.transpose(0, 1)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, CHUNK, columns])


@jit
def _advance(
    S_vk,
    k_CK,
    q_CK,
    v_CV,
    WY,
    k_scale,
    q_scale,
    decay,
    C: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return (o [C, v], the state after) of one chunk.

    Everything is transposed, [columns, tokens]: then each product's left side is the result of the
    one before, which a tensor core takes from registers.
    """
    k_, q_ = operand(k_CK), operand(q_CK)
    S_ = operand(S_vk.to(k_CK.dtype))
    S_vk *= decay
    r_vC = tl.dot(S_, tl.trans(k_), input_precision=PRECISION) * k_scale[None, :]
    r_vC = tl.trans(operand(v_CV)) + r_vC
    o_vC = tl.dot(S_, tl.trans(q_), input_precision=PRECISION) * q_scale[None, :]
    r_ = operand(r_vC.to(k_CK.dtype))
    both = tl.dot(r_, tl.trans(operand(WY)), input_precision=PRECISION)
    d_vC, y_vC = tl.split(tl.permute(tl.reshape(both, (BV, 2, C)), (0, 2, 1)))
    d_ = operand(d_vC.to(k_CK.dtype))
    return tl.trans(o_vC + y_vC), tl.dot(d_, k_, S_vk, input_precision=PRECISION)


@jit
def _tile(x, h, t, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return ROWS tokens and COLUMNS of one head behind a descriptor."""
    return tl.reshape(x.load([h, t, column]), (ROWS, COLUMNS))


@jit
def _scan_kernel(
    q,
    k,
    v,
    o,
    solved,
    o_at,
    pool,
    slots,
    cu_seqlens,
    factors,
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
    """Walk the chunks of one sequence with BV columns of one head's state in registers."""
    start_next()
    wait_for_inputs()
    h, n = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + n).to(tl.int64)
    start = tl.load(cu_seqlens + n).to(tl.int32)
    end = tl.load(cu_seqlens + n + 1).to(tl.int32)
    if start == end:
        return
    c, i = tl.arange(0, C), tl.arange(0, BK)
    column = tl.program_id(0) * BV
    j = column + tl.arange(0, BV)
    state_at = pool + slot * pool_row + (h * DK + i[None, :]) * DV + j[:, None]
    kept = (j < tl.where(slot >= 0, DV, 0))[:, None] & (i < DK)[None, :]
    S_vk = tl.load(state_at, mask=kept, other=0.0).to(tl.float32)
    factor = factors + h.to(tl.int64) * P + start
    k_scale, q_scale = tl.load(factor + c), tl.load(factor + V * P + c)
    decay = tl.load(factor + 2 * V * P)
    whole = start + (end - start) // C * C
    for t in range(start, whole, C):
        k_CK, q_CK = _tile(k, h // REPEAT, t, 0, C, BK), _tile(q, h // REPEAT, t, 0, C, BK)
        v_CV = _tile(v, h, t, column, C, BV)
        WY = tl.reshape(solved.load([0, h * P + t, 0]), (2 * C, C))
        # in registers a chunk ahead: only what a product reads is prefetched by itself
        factor += C
        next_k_scale, next_q_scale = tl.load(factor + c), tl.load(factor + V * P + c)
        next_decay = tl.load(factor + 2 * V * P)
        o_CV, S_vk = _advance(S_vk, k_CK, q_CK, v_CV, WY, k_scale, q_scale, decay, C, BV, PRECISION)
        o.store([h, t, column], tl.reshape(o_CV.to(o.dtype), (1, C, BV)))
        k_scale, q_scale, decay = next_k_scale, next_q_scale, next_decay
    if whole < end:
        # what follows the sequence is another's, and may be anything
        inside = c < end - whole
        row = inside[:, None]
        k_CK = tl.where(row, _tile(k, h // REPEAT, whole, 0, C, BK), 0.0).to(k.dtype)
        q_CK = tl.where(row, _tile(q, h // REPEAT, whole, 0, C, BK), 0.0).to(k.dtype)
        v_CV = tl.where(row, _tile(v, h, whole, column, C, BV), 0.0).to(k.dtype)
        WY = tl.where(row[None, :], solved.load([0, h * P + whole, 0]), 0.0).to(k.dtype)
        WY = tl.reshape(WY, (2 * C, C))
        k_scale = tl.where(inside, k_scale, 0.0)
        o_CV, S_vk = _advance(S_vk, k_CK, q_CK, v_CV, WY, k_scale, q_scale, decay, C, BV, PRECISION)
        at = o_at + ((whole + c).to(tl.int64) * V + h)[:, None] * DV + j[None, :]
        tl.store(at, o_CV.to(o.dtype), mask=row & (j < DV)[None, :])
    tl.store(state_at, S_vk.to(pool.dtype.element_ty), mask=kept)
