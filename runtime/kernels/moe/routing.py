"""The choice of experts: what the router's logits say.

Chosen for: every sparse layer. With `ONE_TOKEN` the experts' kernels choose for themselves, by the
functions here.

    p = softmax(logits)  over all E experts            w = p[top k] / sum(p[top k])

Softmax, top k and renormalisation in float32, then w in the model dtype, as in transformers. The
kernels order by logits, which order as their probabilities do, and divide e^x by the sum of those
chosen, which is the same number to float32 rounding.

Source: transformers, modeling_qwen3_5_moe.
Traps: the weights are always renormalised. Another kernel that chooses again must order in the same
way: ties go to the lower number.

Shape letters: T tokens, k experts per token, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import at_once, early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_MOST_EXPERTS = 1 << 16


def route_reference(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Say what `route` computes, in plain torch."""
    probabilities = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    top, experts = probabilities.topk(k, dim=-1)
    return (top / top.sum(-1, keepdim=True)).to(logits_TE.dtype), experts


def route_absorbed_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Say what `route_absorbed` computes, in plain torch."""
    weights, experts = route_reference(logits[:, :-1], k)
    shared = torch.full_like(experts[:, :1], logits.shape[1] - 1)
    weights = torch.cat([weights, torch.sigmoid(logits[:, -1:])], dim=1)
    return weights, torch.cat([experts, shared], dim=1)


def route(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (weights, experts): for each token its k likeliest experts, likeliest first.

    logits_TE   [T, E] model dtype, rows contiguous in themselves
    weights_Tk  [T, k] in the dtype of the logits, summing to 1 before they are rounded to it
    experts_Tk  [T, k] int64; of equal ones the kernel takes the lower number
    """
    if not use_triton(logits_TE):
        return route_reference(logits_TE, k)
    return _launch_route(logits_TE, logits_TE.shape[1], k, k)


def route_absorbed(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `route` of the first E columns, then expert E with weight sigmoid(last column).

    logits            [T, E+1] model dtype, rows contiguous in themselves
    weights, experts  [T, k+1]
    """
    if not use_triton(logits):
        return route_absorbed_reference(logits, k)
    return _launch_route(logits, logits.shape[1] - 1, k, k + 1)


def _launch_route(logits: Tensor, num_experts: int, k: int, out: int) -> tuple[Tensor, Tensor]:
    assert logits.stride(1) == 1, "rows must be contiguous"
    assert num_experts < _MOST_EXPERTS, "an expert's number has 16 bits beside its logit"
    assert k <= num_experts, "no more experts can be chosen than there are"
    num_tokens = logits.shape[0]
    weights = torch.empty((num_tokens, out), dtype=logits.dtype, device=logits.device)
    experts = torch.empty((num_tokens, out), dtype=torch.int64, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        weights,
        experts,
        num_experts,
        logits.stride(0),
        TOP=k,
        OUT=out,
        BLOCK_E=power_of_two(num_experts),
        BLOCK_J=power_of_two(out),
        num_warps=1,
        **at_once(),
        **early(),
    )
    return weights, experts


@jit
def order_keys(logits, E, BLOCK_E: tl.constexpr, WARPS: tl.constexpr):
    """Return [WARPS, BLOCK_E] integers that order experts by logit, then against their numbers.

    The lower 16 bits are 65535 - e. Those of a float of 16 bits fit beside them in 32. Each warp of
    a program has all of them for itself: then no choice has to wait for another warp.
    """
    e = tl.arange(0, BLOCK_E)[None, :] + tl.zeros((WARPS, 1), tl.int32)
    # not from the nearest cache: `row` reads them before it has waited
    return _keys(tl.load(logits + e, mask=e < E, other=0.0, cache_modifier=".cg"), e, E)


@jit
def _keys(x, e, E):
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits == -32768, 0, bits)  # zeros of both signs are equal
        # negative floats order against their bits
        keys = ((bits ^ ((bits >> 15) & 32767)) << 16) | (65535 - e)
        keys = tl.where(e < E, keys, -2147483648)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(bits == -2147483648, 0, bits)
        keys = ((bits ^ ((bits >> 31) & 2147483647)).to(tl.int64) << 16) | (65535 - e)
        keys = tl.where(e < E, keys, -9223372036854775808)
    return keys


@jit
def _best_key(keys):
    """Return (the greatest key, for each warp, the keys without it)."""
    best = tl.max(keys, 1)
    if keys.dtype.primitive_bitwidth == 32:
        left = tl.where(keys == best[:, None], -2147483648, keys)
    else:
        left = tl.where(keys == best[:, None], -9223372036854775808, keys)
    return best, left


@jit
def _expert(key):
    return 65535 - (key & 65535).to(tl.int32)


@jit
def _logit(key, like):
    """Return the logit of a key in float32; like: the pointer that it was loaded from."""
    ordered = key >> 16
    if key.dtype.primitive_bitwidth == 32:
        bits = (ordered ^ ((ordered >> 15) & 32767)).to(tl.int16)
        x = bits.to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        bits = (ordered ^ ((ordered >> 31) & 2147483647)).to(tl.int32)
        x = bits.to(tl.float32, bitcast=True)
    return x


@jit
def take_best(keys):
    """Return (the first expert of those left, for each warp, the keys without it)."""
    best, left = _best_key(keys)
    return _expert(best), left


@jit
def likeliest(
    logits, E, TOP: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr, WARPS: tl.constexpr
):
    """Return [BLOCK_J]: the TOP likeliest of E experts, likeliest first, then E everywhere."""
    j = tl.arange(0, BLOCK_J)[None, :]
    keys = order_keys(logits, E, BLOCK_E, WARPS)
    experts = tl.zeros((WARPS, BLOCK_J), tl.int32) + E
    for place in tl.static_range(TOP):
        expert, keys = take_best(keys)
        experts = tl.where(j == place, expert[:, None], experts)
    return tl.max(experts, 0)


@jit
def _route_kernel(
    logits,
    weights,
    experts,
    E,
    row,
    TOP: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Write the TOP likeliest of E experts, likeliest first.

    OUT is TOP, or TOP + 1 where column E of the logits is the gate of expert E, the shared one,
    which then comes last.
    """
    start_next()
    wait_for_inputs()
    t = tl.program_id(0).to(tl.int64)
    row_at = logits + t * row
    j, gate = tl.arange(0, BLOCK_J), 0.0
    if OUT > TOP:
        gate = tl.load(row_at + E).to(tl.float32)
    # a row that begins anywhere is read number by number; without conditions, of which a thread has
    # few, all are asked for at once
    e = tl.arange(0, BLOCK_E)[None, :]
    keys = _keys(tl.load(row_at + tl.minimum(e, E - 1)), e, E)
    chosen, x = tl.zeros((BLOCK_J,), tl.int32) + E, tl.zeros((BLOCK_J,), tl.float32) - float("inf")
    for place in tl.static_range(TOP):
        best, keys = _best_key(keys)
        best = tl.max(best, 0)
        chosen = tl.where(j == place, _expert(best), chosen)
        x = tl.where(j == place, _logit(best, logits), x)
    powers = tl.exp(x - tl.max(x, 0))
    top = powers / tl.sum(powers, 0)
    if OUT > TOP:
        top = tl.where(j == TOP, tl.sigmoid(gate), top)
    tl.store(weights + t * OUT + j, top.to(weights.dtype.element_ty), mask=j < OUT)
    tl.store(experts + t * OUT + j, chosen.to(tl.int64), mask=j < OUT)
