"""Chunks of 64 on a GPU: what the state does not touch all at once, then a walk along the chunks.

Chosen for: every prompt on a GPU.

A program walks a sequence, whatever solve has made of it, with columns of the state in registers:
see walk. A long one of few heads is walked in two halves at once: see halves.

Shape letters: T packed tokens, N sequences, H key heads, V value heads, k key size, v value size,
C chunk, P padded tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.delta_rule.halves import chunk_tiles, fits, launch_halves
from runtime.kernels.delta_rule.rule import CHUNK
from runtime.kernels.delta_rule.solve import solve
from runtime.kernels.delta_rule.walk import walked
from runtime.kernels.launch import (
    HAS_TRITON,
    jit,
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
# Of 16 and 16 in halves: 52 of 2048 tokens where a walk takes 67, 169 of 8192 for 227.
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
    if v.shape[0] == 0:
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)
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
    solved = solve(q, k, a, b, A_log, dt_bias, cu_seqlens, sizes)
    options = sizes | {"DV": dv, "BV": columns, "num_stages": 1 if exact else _STAGES}
    walk = launch_halves if fits(q, v, slots, columns) else launch_walks
    return walk(q, k, v, solved, state_pool, slots, cu_seqlens, options)


def launch_walks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    solved: tuple[Tensor, Tensor],
    state_pool: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Return o of `gated_delta_prefill`, whose docstring names the arguments.

    solved   what `solve` returns
    options  of the walk
    """
    (_, heads, dv), columns, (both, factors) = v.shape, options["BV"], solved
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _scan_kernel[(-(-dv // columns), heads, slots.shape[0])](
        *(chunk_tiles(x, options["BK"]) for x in (q, k)),
        *(chunk_tiles(x, columns) for x in (v, o)),
        TensorDescriptor.from_tensor(both, [2, CHUNK, CHUNK]),
        o,
        state_pool,
        slots,
        cu_seqlens,
        factors,
        factors.shape[2],
        state_pool.stride(0),
        **options,
        **early(),
    )
    return o


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
    i = tl.arange(0, BK)
    column = tl.program_id(0) * BV
    j = column + tl.arange(0, BV)
    state_at = pool + slot * pool_row + (h * DK + i[None, :]) * DV + j[:, None]
    kept = (j < tl.where(slot >= 0, DV, 0))[:, None] & (i < DK)[None, :]
    S_vk = tl.load(state_at, mask=kept, other=0.0).to(tl.float32)
    S_vk = walked(
        q, k, v, o, solved, o_at, factors, S_vk, h, start, end, column, 0, None, P,
        V, REPEAT, DV, C, BK, BV, PRECISION,
    )  # fmt: skip
    tl.store(state_at, S_vk.to(pool.dtype.element_ty), mask=kept)
