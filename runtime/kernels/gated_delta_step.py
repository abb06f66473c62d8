"""One token of each sequence on a GPU: a program takes some columns of one head's state.

    retrieved = e^g S^T k      d = beta (v - retrieved)      o = e^g S^T q + (k.q) d

is the rule of `delta_rule` with both products against the old state, which one reduction gives.
The time is that of reading and writing the states. Padding slots are negative: zeros out.

Shape letters: B sequences, V value heads, k key size, v value size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule import EPS
from runtime.kernels.launch import jit, power_of_two, tl

if TYPE_CHECKING:
    from torch import Tensor


def launch_step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state_pool: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Return o of `gated_delta_step`, whose docstring names the arguments."""
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    batch, heads, dv = v.shape
    dk = k.shape[2]
    columns, warps = _shape(batch * heads, state_pool.dtype)
    columns = min(columns, power_of_two(dv))
    _step_kernel[(-(-dv // columns), heads, batch)](
        q, k, v, a, b, A_log, dt_bias, state_pool, slots, o,
        *(x.stride(0) for x in (q, k, v, a, b, state_pool)), dk**-0.5, EPS,
        V=heads, REPEAT=heads // k.shape[1], DK=dk, DV=dv,
        BK=power_of_two(dk), BV=columns, num_warps=warps,
    )  # fmt: skip
    return o


def _shape(states: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return (columns, warps) of a program for so many states, batch times heads.

    Microseconds on an H200, head size 128, replayed in a CUDA graph with a cold L2 cache. An empty
    graph takes 4, and copying what 3072 states move 96 (float32) or 48 (bfloat16).

        states  dtype       16, 1   32, 1   32, 2   64, 2   64, 4
            48  float32       7.2     7.9     7.7     8.3     8.0
           384  float32      18.5    18.3    18.9    19.6    19.5
          3072  float32     124.3   109.2   109.7   107.0   106.0
          6144  float32     243.7   214.2   214.3   205.2   203.2
          3072  bfloat16     81.8    71.2    74.6    78.3    82.6
          6144  bfloat16    165.2   135.6   147.8   150.1   159.4
    """
    if states >= 1024 and dtype == torch.float32:
        return 64, 4
    return (32, 1) if states >= 256 else (16, 1)


@jit
def gates(a, b, A_log, dt_bias, rounded):
    """Return (g, beta) from loaded values; beta is rounded to the dtype `rounded` points to."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    e = tl.exp(-tl.abs(x))
    # log(1 + e) to the last bits also where 1 + e rounds (Kahan)
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    g = -tl.exp(A_log.to(tl.float32)) * (tl.maximum(x, 0.0) + log1p)
    beta = tl.sigmoid(b.to(tl.float32)).to(rounded.dtype.element_ty)
    return g, beta.to(tl.float32)


@jit
def _add_both(x, y, z, w):
    return x + z, y + w


@jit
def _step_kernel(
    q, k, v, a, b, A_log, dt_bias, pool, slots, o,
    q_row, k_row, v_row, a_row, b_row, pool_row, scale, eps,
    V: tl.constexpr, REPEAT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BK)
    j = tl.program_id(0) * BV + tl.arange(0, BV)
    slot = tl.load(slots + n).to(tl.int64)
    o_at = o + (n * V + h) * DV + j
    if slot < 0:
        tl.store(o_at, tl.zeros((BV,), o.dtype.element_ty), mask=j < DV)
        return
    state_at = pool + slot * pool_row + (h * DK + i[:, None]) * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    S_kv = tl.load(state_at, mask=inside, other=0.0).to(tl.float32)

    key = (h // REPEAT) * DK + i
    q_k = tl.load(q + n * q_row + key, mask=i < DK, other=0.0).to(tl.float32)
    k_k = tl.load(k + n * k_row + key, mask=i < DK, other=0.0).to(tl.float32)
    v_v = tl.load(v + n * v_row + h * DV + j, mask=j < DV, other=0.0).to(tl.float32)
    q_k = q_k * tl.rsqrt(tl.sum(q_k * q_k, 0) + eps) * scale
    k_k = k_k * tl.rsqrt(tl.sum(k_k * k_k, 0) + eps)
    a_ = tl.load(a + n * a_row + h)
    b_ = tl.load(b + n * b_row + h)
    g, beta = gates(a_, b_, tl.load(A_log + h), tl.load(dt_bias + h), b)

    decay = tl.exp(g)
    retrieved, read = tl.reduce((S_kv * k_k[:, None], S_kv * q_k[:, None]), 0, _add_both)
    d_v = (v_v - retrieved * decay) * beta
    o_v = read * decay + tl.sum(k_k * q_k, 0) * d_v
    tl.store(o_at, o_v.to(o.dtype.element_ty), mask=j < DV)
    S_kv = S_kv * decay + k_k[:, None] * d_v[None, :]
    tl.store(state_at, S_kv.to(pool.dtype.element_ty), mask=inside)
