"""Causal depthwise convolution over K tokens, then silu: GDN's short memory of q, k and v.

Chosen for: every prompt.

    y[t, c] = silu(sum_j w[c, j] * x[t - (K-1) + j, c])        j = K-1 is the current token

Source: the Mamba short convolution (Gu and Dao 2023) as Qwen3.5 uses it, K = 4, no bias. Products
are summed in float32, oldest tap first, in prefill and in decode: both give the same bits. The pool
keeps the last K-1 *inputs* of a sequence (before the convolution), oldest first; zeros are the
history of a fresh sequence, and a slot is zeroed when it is handed out.
Trap: a history that is off by one token still gives plausible text.

Shape letters: T packed tokens, C channels, K taps, N sequences, S slots of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import (
    jit,
    power_of_two,
    ragged_block,
    ragged_blocks,
    tl,
    use_triton,
    widen,
)
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.silu import rounded, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

# Microseconds for 8192 tokens of 10240 channels, bfloat16, on an H200, which copies as much in 80:
#   tokens, channels, warps   8, 256, 2   8, 1024, 4   16, 256, 2   16, 1024, 4   32, 256, 2
#                                   100          138          111           140          131
# Programs that run at once share tokens, whose rows they then read as they lie: 65.3 for 69.3 where
# they share channels, 6144 of them.
_TOKENS, _WIDE = 8, 256
CHANNELS = 128


def conv1d_prefill_reference(
    x_TC: Tensor, weight_C1K: Tensor, pool_SCJ: Tensor, slots_N: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Say what `conv1d_prefill` computes, in plain torch; the pool is updated in place."""
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    bounds = cu_seqlens.tolist()
    for slot, start, end in zip(slots_N.tolist(), bounds, bounds[1:], strict=False):
        history_JC = pool_SCJ[slot].T if slot >= 0 else torch.zeros_like(pool_SCJ[0].T)
        window = torch.cat([history_JC.to(x_TC.dtype), x_TC[start:end]])
        for first in range(0, window.shape[1], CHANNELS):
            some = slice(first, first + CHANNELS)
            y_TC[start:end, some] = taps(window[:, some], weight_C1K[some])
        if slot >= 0:
            pool_SCJ[slot] = window[end - start :].T.to(pool_SCJ.dtype)
    return y_TC


def taps(window: Tensor, weight_C1K: Tensor) -> Tensor:
    """Return silu of the convolution [n, C] of a window [K-1 + n, C]."""
    num_taps = weight_C1K.shape[2]
    n = window.shape[0] - (num_taps - 1)
    window_, weight = widen(window), widen(weight_C1K[:, 0]).T.contiguous()
    total, term = torch.zeros_like(window_[:n]), torch.empty_like(window_[:n])
    for j in range(num_taps):
        total += torch.mul(window_[j : j + n], weight[j], out=term)
    rounded = widen(total.to(window.dtype))
    # F.silu gives other last bits to the tail of a row than to its body; exp does not
    divisor = torch.neg(rounded, out=term).exp_().add_(1)
    return rounded.div_(divisor).to(window.dtype)


def conv1d_prefill(
    x_TC: Tensor, weight_C1K: Tensor, pool_SCJ: Tensor, slots_N: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return silu(conv(x)) [T, C] in x's dtype; each sequence's last inputs replace its slot.

    x_TC        [T, C] packed sequences, channels contiguous
    weight_C1K  [C, 1, K] contiguous
    pool_SCJ    [S, C, K-1] each slot contiguous: the inputs before the sequence, oldest first
    slots_N     [N] int32 or int64; -1 starts from zeros and leaves the pool as it is
    cu_seqlens  [N+1] int32 or int64, from 0 to T; empty sequences are allowed
    """
    check(x_TC, weight_C1K, pool_SCJ)
    assert cu_seqlens.shape[0] == slots_N.shape[0] + 1, "one slot for each sequence"
    if not use_triton(x_TC):
        return conv1d_prefill_reference(x_TC, weight_C1K, pool_SCJ, slots_N, cu_seqlens)
    (num_tokens, channels), num_sequences = x_TC.shape, slots_N.shape[0]
    y_TC = torch.empty((num_tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    num_taps = weight_C1K.shape[2]
    _prefill_kernel[(-(-channels // _WIDE), ragged_blocks(num_tokens, num_sequences, _TOKENS))](
        x_TC,
        weight_C1K,
        pool_SCJ,
        slots_N,
        cu_seqlens,
        y_TC,
        channels,
        num_sequences,
        x_TC.stride(0),
        pool_SCJ.stride(0),
        K=num_taps,
        BT=_TOKENS,
        BC=_WIDE,
        STEPS=num_sequences.bit_length(),
        num_warps=2,
        **early(),
    )
    _history_kernel[(num_sequences, -(-channels // CHANNELS))](
        x_TC,
        pool_SCJ,
        slots_N,
        cu_seqlens,
        channels,
        x_TC.stride(0),
        pool_SCJ.stride(0),
        K=num_taps,
        BJ=power_of_two(num_taps),
        BC=CHANNELS,
        num_warps=4,
        **early(),
    )
    return y_TC


def check(x: Tensor, weight_C1K: Tensor, pool_SCJ: Tensor) -> None:
    """Assert that inputs, filters and pool fit each other."""
    channels, _, num_taps = weight_C1K.shape
    assert x.shape[1] == channels, "one filter for each channel"
    assert x.stride(1) == 1, "channels must be contiguous"
    assert pool_SCJ.shape[1:] == (channels, num_taps - 1), "the pool is [slots, C, K-1]"
    assert pool_SCJ[0].is_contiguous(), "a slot must be contiguous"
    assert weight_C1K.is_contiguous(), "the weight must be contiguous"


@jit
def rounded_silu(total, y):
    """Return silu of a sum that is first rounded to the dtype of `y`."""
    x = rounded(total, y)
    return (x * sigmoid(x)).to(y.dtype.element_ty)


@jit
def _prefill_kernel(
    x,
    weight,
    pool,
    slots,
    cu_seqlens,
    y,
    C,
    N,
    x_row,
    pool_row,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Convolve BT tokens of BC channels; a window of inputs in registers is read once."""
    start_next()
    wait_for_inputs()
    n, start, end, first = ragged_block(tl.program_id(1), cu_seqlens, N, BT, STEPS)
    if first >= end:
        return
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    slot = tl.load(slots + n).to(tl.int64)
    history = pool + slot * pool_row + c * (K - 1)
    x_at = x + first.to(tl.int64) * x_row + c
    weights, window = (), ()
    for j in tl.static_range(K):
        w_C = tl.load(weight + c * K + j, mask=c < C, other=0.0).to(tl.float32)
        weights += (w_C,)  # type: ignore[assignment]
    for j in tl.static_range(1 - K, 0):
        # before its first token a sequence reads its slot, whose last column is token start - 1
        source = first + j - start
        known = c < tl.where((source < 0) & (slot >= 0), C, 0)
        h_C = tl.load(history + (source + K - 1), mask=known, other=0.0).to(tl.float32)
        x_C = tl.load(x_at + j * x_row, mask=c < tl.where(source < 0, 0, C), other=0.0)
        window += (tl.where(source < 0, h_C, x_C.to(tl.float32)),)  # type: ignore[assignment]
    for t in tl.static_range(BT):
        x_C = tl.load(x_at + t * x_row, mask=c < tl.where(first + t < end, C, 0), other=0.0)
        window += (x_C.to(tl.float32),)  # type: ignore[assignment]
    y_at = y + first.to(tl.int64) * C + c
    for t in tl.static_range(BT):
        total = tl.zeros((BC,), tl.float32)
        for j in tl.static_range(K):
            total += window[t + j] * weights[j]
        tl.store(y_at + t * C, rounded_silu(total, y), mask=c < tl.where(first + t < end, C, 0))


@jit
def _history_kernel(
    x,
    pool,
    slots,
    cu_seqlens,
    C,
    x_row,
    pool_row,
    K: tl.constexpr,
    BJ: tl.constexpr,
    BC: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    n = tl.program_id(0)
    slot = tl.load(slots + n).to(tl.int64)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1).to(tl.int64) - start
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[:, None]
    j = tl.arange(0, BJ)[None, :]
    inside = (c < tl.where(slot >= 0, C, 0)) & (j < K - 1)
    history = pool + slot * pool_row + c * (K - 1)
    # column j of the new history is column j + length of [old history | tokens]
    source = j + length
    old = tl.load(history + source, mask=inside & (source < K - 1), other=0.0)
    token = start + source - (K - 1)
    new = tl.load(x + token * x_row + c, mask=inside & (source >= K - 1), other=0.0)
    kept = tl.where(source < K - 1, old, new.to(pool.dtype.element_ty))
    tl.debug_barrier()  # another warp may still read what this one overwrites
    tl.store(history + j, kept, mask=inside)
