"""Logits of the experts for a few tokens.

Chosen for: `ROUTER` of 2 to 8 tokens of 4096 numbers or fewer on a GPU.

    logits[t, e] = sum_h x[t, h] * w[e, h]              summed in float32, rounded once

A router is small, and what follows waits for it: the time is that of starting, of one load of x and
of one sum. So a program has two experts, which are in registers before x is there, and multiplies
all tokens with them without the tensor cores, for which rows would be exchanged first.

Shape letters: T tokens, E experts, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.linear.weight import product_reference
from runtime.kernels.overlap import at_once, early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_MOST_TOKENS = 8
_THREAD = 8  # numbers of a row that a thread loads at once: 16 bytes


def few_logits(x_TH: Tensor, router: Tensor) -> Tensor:
    """Return x @ router.T [T, E] in x's dtype, T at most 8.

    x_TH    [T, H], rows contiguous in themselves
    router  [E, H] in x's dtype, contiguous
    """
    if not use_triton(x_TH):
        return product_reference(x_TH, router)
    (num_tokens, hidden), num_experts = x_TH.shape, router.shape[0]
    assert num_tokens <= _MOST_TOKENS, "a program has all tokens"
    assert x_TH.stride(1) == 1, "rows must be contiguous"
    assert router.is_contiguous(), "the router must be contiguous"
    assert router.shape[1] == hidden, "x and router must have one width"
    logits_TE, block = x_TH.new_empty((num_tokens, num_experts)), power_of_two(hidden)
    _logits_kernel[(-(-num_experts // 2),)](
        x_TH,
        router,
        logits_TE,
        num_tokens,
        num_experts,
        hidden,
        x_TH.stride(0),
        ROWS=_MOST_TOKENS,
        BLOCK=block,
        num_warps=min(max(block // (32 * _THREAD), 1), 16),
        **at_once(),
        **early(),
    )
    return logits_TE


@jit
def _logits_kernel(
    x,
    router,
    logits,
    T,
    E,
    H,
    x_row,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start_next()
    first, h, t = tl.program_id(0) * 2, tl.arange(0, BLOCK), tl.arange(0, ROWS)
    at, inside = router + first * H + h, h < H
    w_H = tl.load(at, mask=inside, other=0.0)
    next_H = tl.load(at + H, mask=h < tl.where(first + 1 < E, H, 0), other=0.0)
    wait_for_inputs()
    x_at, used = x + t[:, None] * x_row + h[None, :], t < T
    x_RH = tl.load(x_at, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
    # both in one sum: warps exchange them at once
    products = tl.join(x_RH * w_H.to(tl.float32)[None, :], x_RH * next_H.to(tl.float32)[None, :])
    e = first + tl.arange(0, 2)[None, :]
    y_R2 = tl.sum(products, 1).to(logits.dtype.element_ty)
    tl.store(logits + t[:, None] * E + e, y_R2, mask=used[:, None] & (e < E))
