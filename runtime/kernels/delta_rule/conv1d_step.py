"""The causal depthwise convolution of one token for each sequence.

Chosen for: `RULE_STEP` with 256 states or more. mixed_step uses its parts with fewer.

Formula, source and the pool of histories: see conv1d; both give the same bits.
Trap: a step loads histories while the preceding kernels still run: between two steps of one pool
there must be a kernel that is not launched early.

Shape letters: B sequences with one token each, C channels, K taps, S slots of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.conv1d import CHANNELS, check, rounded_silu, taps
from runtime.kernels.launch import (
    jit,
    power_of_two,
    tl,
    use_triton,
)
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


def conv1d_step_reference(
    x_BC: Tensor, weight_C1K: Tensor, pool_SCJ: Tensor, slots_B: Tensor
) -> Tensor:
    """Say what `conv1d_step` computes, in plain torch; the pool is updated in place."""
    y_BC = torch.zeros(x_BC.shape, dtype=x_BC.dtype, device=x_BC.device)
    for row, slot in enumerate(slots_B.tolist()):
        if slot >= 0:
            window = torch.cat([pool_SCJ[slot].T.to(x_BC.dtype), x_BC[row : row + 1]])
            y_BC[row] = taps(window, weight_C1K)[0]
            pool_SCJ[slot] = window[1:].T.to(pool_SCJ.dtype)
    return y_BC


def conv1d_step(x_BC: Tensor, weight_C1K: Tensor, pool_SCJ: Tensor, slots_B: Tensor) -> Tensor:
    """Return silu(conv(x)) [B, C] in x's dtype for one token of each sequence; slots move on.

    x_BC        [B, C] channels contiguous
    weight_C1K  [C, 1, K] contiguous
    pool_SCJ    [S, C, K-1] each slot contiguous, updated in place
    slots_B     [B] int32 or int64, no slot twice; -1 is a padding row: zeros out, nothing written
    """
    check(x_BC, weight_C1K, pool_SCJ)
    assert slots_B.shape == x_BC.shape[:1], "one slot for each row"
    if not use_triton(x_BC):
        return conv1d_step_reference(x_BC, weight_C1K, pool_SCJ, slots_B)
    batch, channels = x_BC.shape
    y_BC = torch.empty((batch, channels), dtype=x_BC.dtype, device=x_BC.device)
    num_taps = weight_C1K.shape[2]
    _step_kernel[(batch, -(-channels // CHANNELS))](
        x_BC,
        weight_C1K,
        pool_SCJ,
        slots_B,
        y_BC,
        channels,
        x_BC.stride(0),
        pool_SCJ.stride(0),
        K=num_taps,
        BJ=power_of_two(num_taps),
        BC=CHANNELS,
        num_warps=4,
        **early(),
    )
    return y_BC


@jit
def older_taps(weight, history, c, inside, K: tl.constexpr):
    """Return the sum of all products of channels c but those of the current token, oldest first."""
    total = tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(K - 1):
        h_C = tl.load(history + j, mask=inside, other=0.0).to(tl.float32)
        total += h_C * tl.load(weight + c * K + j, mask=inside, other=0.0).to(tl.float32)
    return total


@jit
def last_tap(weight, c, inside, K: tl.constexpr):
    """Return what the current inputs of channels c are multiplied with, in float32."""
    return tl.load(weight + c * K + K - 1, mask=inside, other=0.0).to(tl.float32)


@jit
def mixed(x_C, total, w_C, y):
    """Return silu of the convolution of inputs x_C, in the dtype of `y`."""
    return rounded_silu(total + x_C.to(tl.float32) * w_C, y)


@jit
def shift_history(x_C, history, inside, K: tl.constexpr, BJ: tl.constexpr):
    """Drop the oldest inputs of some channels and append x_C."""
    j = tl.arange(0, BJ)[None, :]
    at, inside = history[:, None] + j, inside[:, None]
    old = tl.load(at + 1, mask=inside & (j < K - 2), other=0.0)
    kept = tl.where(j < K - 2, old, x_C.to(history.dtype.element_ty)[:, None])
    tl.debug_barrier()  # another warp may still read what this one overwrites
    tl.store(at, kept, mask=inside & (j < K - 1))


@jit
def _step_kernel(
    x,
    weight,
    pool,
    slots,
    y,
    C,
    x_row,
    pool_row,
    K: tl.constexpr,
    BJ: tl.constexpr,
    BC: tl.constexpr,
):
    start_next()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < tl.where(slot >= 0, C, 0)
    history = pool + slot * pool_row + c * (K - 1)
    total, w_C = older_taps(weight, history, c, inside, K), last_tap(weight, c, inside, K)
    wait_for_inputs()
    x_C = tl.load(x + b * x_row + c, mask=inside, other=0.0)
    tl.store(y + b * C + c, mixed(x_C, total, w_C, y), mask=c < C)
    shift_history(x_C, history, inside, K, BJ)
