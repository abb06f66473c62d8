"""The causal depthwise convolution of one token for each sequence.

Chosen for: `RULE_STEP` with 256 states or more. within uses its parts with fewer.

Formula, source and the pool of histories: see conv1d; both give the same bits. A history is read
once and moves on in registers: four layers of 64 sequences take 1237 us on an H200 (35B-A3B), 1250
where it is read again to be moved.
Trap: a step loads histories while the preceding kernels still run: between two steps of one pool
there must be a kernel that is not launched early.

Shape letters: B sequences with one token each, C channels, K taps, S slots of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.conv1d import CHANNELS, check, rounded_silu, taps
from runtime.kernels.launch import jit, loaded, tl, use_triton, widened
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
        BC=CHANNELS,
        num_warps=4,
        **early(),
    )
    return y_BC


@jit
def older_taps(inputs, weights, first: tl.constexpr, K: tl.constexpr):
    """Return the sum of K - 1 products from input `first` on, oldest first: all but the newest."""
    total = tl.zeros_like(weights[0])
    for j in tl.static_range(K - 1):
        total += inputs[first + j] * weights[j]
    return total


@jit
def taps_before(weight, history, c, inside, K: tl.constexpr):
    """Return the taps of channels c, their K - 1 inputs so far, and these multiplied and summed.

    history  where that of channel 0 lies
    """
    weights = widened(loaded(weight + c * K, inside, 1, K))
    inputs = widened(loaded(history + c * (K - 1), inside, 1, K - 1))
    return weights, inputs, older_taps(inputs, weights, 0, K)


@jit
def mixed(x_C, total, w_C, y):
    """Return silu of the convolution of inputs x_C, in the dtype of `y`."""
    return rounded_silu(total + x_C.to(tl.float32) * w_C, y)


@jit
def convolved(inputs, weights, older, y, token: tl.constexpr, K: tl.constexpr):
    """Return silu of the convolution at a token, in float32, but rounded to the dtype of `y`.

    inputs  K - 1 before the first token, and those of the tokens; older: the first's `older_taps`
    """
    total = older if token == 0 else older_taps(inputs, weights, token, K)
    return mixed(inputs[K - 1 + token], total, weights[K - 1], y).to(tl.float32)


@jit
def history_after(x, x_row, history, inside, token: tl.constexpr, K: tl.constexpr, J: tl.constexpr):
    """Return the last inputs [C, J] of some channels after a token, whose first K - 1 count.

    x, history  where the channels' inputs of token 0 lie, and those before it
    """
    j = tl.arange(0, J)[None, :] + token + 1
    inside = inside[:, None]
    old = tl.load(history[:, None] + j, mask=inside & (j < K - 1), other=0.0)
    new_at = x[:, None] + (j - (K - 1)).to(tl.int64) * x_row
    new = tl.load(new_at, mask=inside & (j >= K - 1) & (j < K + token), other=0.0)
    return tl.where(j < K - 1, old, new.to(history.dtype.element_ty))


@jit
def store_history(kept, history, inside, K: tl.constexpr):
    """Store what `history_after` returned."""
    j = tl.arange(0, kept.shape[1])[None, :]
    tl.store(history[:, None] + j, kept, mask=inside[:, None] & (j < K - 1))


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
    BC: tl.constexpr,
):
    start_next()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < tl.where(slot >= 0, C, 0)
    history = pool + slot * pool_row
    weights, inputs, total = taps_before(weight, history, c, inside, K)
    wait_for_inputs()
    x_C = tl.load(x + b * x_row + c, mask=inside, other=0.0)
    tl.store(y + b * C + c, mixed(x_C, total, weights[K - 1], y), mask=c < C)
    inputs += (x_C.to(tl.float32),)
    tl.debug_barrier()  # another warp may still read what this one overwrites
    for j in tl.static_range(K - 1):
        kept = inputs[j + 1].to(pool.dtype.element_ty)
        tl.store(history + c * (K - 1) + j, kept, mask=inside)
