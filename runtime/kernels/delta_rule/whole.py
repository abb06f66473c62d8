"""The next token of each sequence through a delta-rule layer, in one kernel.

Chosen for: `RULE_STEP` with 128 states or fewer, each with a key head of its own.

A program has a whole head: it convolves what the head reads, takes the token through the state, and
norms and gates what comes out. No other program reads the histories of the same channels, so it
writes those, too. Each warp has some rows of the state, and all of their columns.

Several tokens of one sequence have 16 such programs, of which each token takes 3 to 4 us longer
than in within: steps of 0.8B with 2, 3 and 4 rows 732, 931 and 1018 us on an H200, for 702, 840 and
910.

Trap: with more warps than 128 numbers fill, the compiler loads the inputs again in every layout
that they are needed in, and spills: 8 warps, 488 bytes a thread.

Source, other traps and rounding: see head, within, conv1d, rule, step and norm.gated.

Shape letters: as in mixed_step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.head import (
    arguments,
    channels,
    head_before,
    head_convolved,
    head_inputs,
    head_window,
    normed,
)
from runtime.kernels.delta_rule.step import advance, gates
from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.delta_rule.rule import Rule

# With so many, programs find place beside three of a product by tiles, and load their states while
# it runs. H200, 0.8B, 3, 4 and 8 rows: 769, 796 and 884 us, with the 248 that the kernel takes 779,
# 790 and 896. After products in registers, one and two rows: 560 and 672 for 556 and 663.
_REGISTERS, _MANY = {"maxnreg": 192}, 32


def whole_heads(
    qkv_BC: Tensor,
    z_BVv: Tensor,
    a_BV: Tensor,
    b_BV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    sources_B: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """Return `mixed_step` of one row each, with as many key heads as value heads."""
    of_head = arguments(qkv_BC, z_BVv, a_BV, b_BV, rule, conv_pool, state_pool)
    (heads, dv), (key_heads, _) = rule.values, rule.keys
    assert heads == key_heads, "a key head for each value head"
    assert sources_B.shape == slots_B.shape, "one row for each sequence"
    y = torch.empty(z_BVv.shape, dtype=qkv_BC.dtype, device=qkv_BC.device)
    output = {"z": z_BVv, "z_row": z_BVv.stride(0), "norm": rule.norm_v, "norm_eps": rule.eps}
    options = {"BV": power_of_two(dv), "num_warps": 4}
    options |= _REGISTERS if heads * len(slots_B) > _MANY else {}
    _heads_kernel[(heads, len(slots_B))](
        slots=slots_B, y=y, **of_head, **output, **options, **early()
    )
    return y


@jit
def _store_history(history, window, at, keys, columns, K: tl.constexpr):
    """Store the last K - 1 of K inputs of the channels at = (q, k, v)."""
    for x in tl.static_range(3):
        for j in tl.static_range(K - 1):
            kept = window[x][j + 1].to(history.dtype.element_ty)
            tl.store(history + at[x] * (K - 1) + j, kept, mask=keys if x < 2 else columns)


@jit
def _heads_kernel(
    qkv,
    z,
    a,
    b,
    filters,
    A_log,
    dt_bias,
    norm,
    conv_pool,
    pool,
    slots,
    y,
    qkv_row,
    z_row,
    a_row,
    b_row,
    conv_row,
    pool_row,
    scale,
    eps,
    norm_eps,
    H: tl.constexpr,
    V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    start_next()
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = tl.arange(0, BK), tl.arange(0, BV)
    slot = tl.load(slots + n).to(tl.int64)
    y_at = y + (n * V + h) * DV + j
    # states, histories and weights do not depend on the kernels before
    keys, columns = i < tl.where(slot >= 0, DK, 0), j < tl.where(slot >= 0, DV, 0)
    inside = keys[:, None] & columns[None, :]
    state_at = pool + slot * pool_row + (h * DK + i[:, None]) * DV + j[None, :]
    S_kv = tl.load(state_at, mask=inside, other=0.0)
    at, history = channels(h, i, j, H, V, DK, DV), conv_pool + slot * conv_row
    past = head_before(filters, history, at, keys, columns, K)
    A_h, bias_h = tl.load(A_log + h), tl.load(dt_bias + h)
    w_v = tl.load(norm + j, mask=columns, other=0.0).to(tl.float32)
    wait_for_inputs()
    if slot < 0:
        tl.store(y_at, tl.zeros((BV,), y.dtype.element_ty), mask=j < DV)
        return

    inputs = head_inputs(qkv + n * qkv_row, 0, at, keys, columns, 1)
    a_h, b_h = tl.load(a + n * a_row + h), tl.load(b + n * b_row + h)
    z_v = tl.load(z + n * z_row + h * DV + j, mask=columns, other=0.0)
    window = head_window(past, inputs)
    g, beta = gates(a_h, b_h, A_h, bias_h, b)
    q_k, k_k, v_v = head_convolved(past, window, y, 0, K)
    o_v, S_kv = advance(S_kv, q_k, k_k, v_v, tl.exp(g), beta, scale, eps)
    tl.store(state_at, S_kv.to(pool.dtype.element_ty), mask=inside)
    tl.store(y_at, normed(o_v, z_v, w_v, norm, y, norm_eps, DV), mask=j < DV)
    tl.debug_barrier()  # another warp may still read what this one overwrites
    _store_history(history, window, at, keys, columns, K)
