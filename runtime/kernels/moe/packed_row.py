"""Experts of four bits for one token, from the router's logits to the residual stream: two kernels.

Chosen for: `ONE_TOKEN` with packed weights, the shared expert in the stack, of usual sizes.

    e, w = choice of the logits         inner[j] = silu(gate) * up of x and expert e_j
    y = x + sum_j w_j * down_e_j(inner[j])                  the last j is the shared expert, E

The choice, and what starts before what, are those of row; units of weights those of
linear.packed_units. In the first kernel the warps of a program have different chunks of the same
rows of gate and up, of one expert. In the second a warp has the same rows of one expert of its own,
in all chunks, so that its product is rounded and weighted before warps are added. The shared
expert's chunks are one more unit of the first warps.

Source and rounding: see layer and routing.
Trap: the first kernel may let the second start only after it has itself waited: see row_down.

Shape letters: k routed experts, E their number, H hidden, F inner size, C chunks of 256 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.linear.packed_pairs import pairs_of, pairs_of_chunks
from runtime.kernels.linear.packed_parts import row_factor
from runtime.kernels.linear.packed_units import (
    joined,
    sums_of,
    thread_numbers,
    unit_of,
    unit_sums,
    units_of,
    whole_sums,
)
from runtime.kernels.linear.row_parts import rounded, silu_times
from runtime.kernels.moe.routing import order_keys, take_best
from runtime.kernels.moe.row import expert_of
from runtime.kernels.overlap import ask, early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.packed import PackedWeight

# H200, 12 layers of 35B-A3B in NVFP4, a layer: 32.2 us with these; 33.4 with one block of eight
# columns of inner for a program, 34.6 with 64 registers. With 64 registers down spills: 33.0; where
# it lets the next kernel start before its weights have been asked for, 33.8.
_GATED = {"WARPS": 8, "num_warps": 8, "maxnreg": 80}
_DOWN = {"maxnreg": 128}
_BLOCKS = 2


def packed_routed_row(
    x_1H: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    logits: Tensor,
    k: int,
    residual_1H: Tensor,
) -> Tensor:
    """Return the residual plus the weighted sum of the experts of x, [1, H].

    logits  [1, E+1] as in `route_absorbed`
    """
    inner_JF = routed_inner(x_1H.contiguous(), gate_up, logits, k)
    num_experts, hidden, inner = down.shape
    warps = power_of_two(max(k, down.chunks))
    y_1H = torch.empty_like(x_1H)
    _down_kernel[(-(-hidden // 8),)](
        inner_JF,
        down.words,
        down.scale,
        down.row,
        logits,
        residual_1H,
        y_1H,
        num_experts - 1,
        hidden,
        inner,
        down.chunks,
        FP4=int(down.is_nvfp4),
        GROUP=down.group,
        CHUNKS=down.chunks,
        TOP=k,
        BLOCK_E=power_of_two(num_experts - 1),
        WARPS=warps,
        num_warps=warps,
        **_DOWN,
        **early(),
    )
    return y_1H


def routed_inner(x_1H: Tensor, gate_up: PackedWeight, logits: Tensor, k: int) -> Tensor:
    """Return the inner activations [k+1, F] of the chosen experts and the shared one."""
    (num_experts, rows, hidden), chunks = gate_up.shape, gate_up.chunks
    inner, across = rows // 2, min(_GATED["WARPS"], power_of_two(chunks))
    beside = _GATED["WARPS"] // across
    turns = max(1, _BLOCKS // beside)
    inner_JF = x_1H.new_empty((k + 1, inner))
    _gated_kernel[(-(-inner // (8 * beside * turns)), k + 1)](
        x_1H,
        gate_up.words,
        gate_up.scale,
        gate_up.row,
        logits,
        inner_JF,
        num_experts - 1,
        hidden,
        inner,
        chunks,
        FP4=int(gate_up.is_nvfp4),
        GROUP=gate_up.group,
        ACROSS=across,
        REPEATS=-(-chunks // across),
        TURNS=turns,
        TOP=k,
        BLOCK_E=power_of_two(num_experts - 1),
        **_GATED,
        **early(),
    )
    return inner_JF


@jit
def _ask_rows(words, first, F, C, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """Ask for some rows of gate and up of one expert, in all chunks."""
    c = tl.minimum(tl.arange(0, CHUNKS), C - 1)[:, None, None]
    half, n = tl.arange(0, 2)[None, :, None], first + tl.arange(0, ROWS)[None, None, :]
    ask(words + (c * 2 * F + half * F + tl.minimum(n, F - 1)) * 32)


@jit
def _gated_kernel(
    x,
    words,
    scale,
    row,
    logits,
    inner,
    E,
    H,
    F,
    C,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    ACROSS: tl.constexpr,
    REPEATS: tl.constexpr,
    TURNS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Write some columns of inner of one place: each from rows f and F + f."""
    BESIDE: tl.constexpr = WARPS // ACROSS
    ROWS: tl.constexpr = 8 * BESIDE * TURNS
    place, first = tl.program_id(1) - 1, tl.program_id(0) * ROWS
    if place < 0:
        place = TOP
        _ask_rows(words + tl.cast(E, tl.int64) * C * F * 64, first, F, C, ROWS, ACROSS * REPEATS)
    wait_for_inputs()
    start_next()
    keys = order_keys(logits, E, BLOCK_E, WARPS)
    warp, g, lane = thread_numbers(32 * WARPS)
    x_parts = pairs_of_chunks(x, warp, g, lane, H, C, FP4, ACROSS, REPEATS)
    expert = expert_of(place, keys, E, TOP)
    words += expert * C * F * 64
    scale += expert * C * F * (512 // GROUP)
    row, n, units = row + expert * 2 * F, first + warp // ACROSS * 8 + g, ()
    for half in tl.static_range(2 * TURNS):
        at = n + half // 2 * BESIDE * 8
        units += units_of(
            words, scale, at + half % 2 * F, 2 * F, at < F, C, warp, lane,
            FP4, GROUP, ACROSS, REPEATS,
        )  # fmt: skip
    r, factors = tl.arange(0, 8)[None, :], ()
    for turn in tl.static_range(TURNS):
        f = first + (turn * BESIDE + tl.arange(0, BESIDE)[:, None]) * 8 + r
        inside = f < F
        factors += (row_factor(row, f, inside, FP4), row_factor(row, F + f, inside, FP4))  # type: ignore[assignment]
    for turn in tl.static_range(TURNS):
        gate = sums_of(units, x_parts, 2 * turn * REPEATS, FP4, GROUP)
        up = sums_of(units, x_parts, (2 * turn + 1) * REPEATS, FP4, GROUP)
        gate, up = tl.split(whole_sums(joined((gate, up), 2), BESIDE, ACROSS))
        f = first + (turn * BESIDE + tl.arange(0, BESIDE)[:, None]) * 8 + r
        gate, up = gate * factors[2 * turn], up * factors[2 * turn + 1]
        y = silu_times(gate, up, inner).to(inner.dtype.element_ty)
        tl.store(inner + place * F + f, y, mask=f < F)


@jit
def _expert_of_warps(logits, E, TOP: tl.constexpr, BLOCK_E: tl.constexpr, WARPS: tl.constexpr):
    """Return [WARPS]: the TOP likeliest of E experts, one for each warp, else E."""
    keys, warp = order_keys(logits, E, BLOCK_E, WARPS), tl.arange(0, WARPS)
    experts = tl.zeros((WARPS,), tl.int32) + E
    for place in tl.static_range(TOP):
        expert, keys = take_best(keys)
        experts = tl.where(warp == place, expert, experts)
    return experts


@jit
def _down_kernel(
    inner,
    words,
    scale,
    row,
    logits,
    residual,
    y,
    E,
    H,
    F,
    C,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Eight rows of all experts; WARPS is at least TOP, and CHUNKS at most WARPS."""
    first, j = tl.program_id(0) * 8, tl.arange(0, WARPS)
    warp, g, lane = thread_numbers(32 * WARPS)
    n = first + g
    experts = _expert_of_warps(logits, E, TOP, BLOCK_E, WARPS)
    expert, used = tl.gather(experts, warp, 0).to(tl.int64), (warp < TOP) & (n < H)
    units, of_expert = (), expert * C * H
    for c in tl.static_range(CHUNKS):
        units += (unit_of(words, scale, of_expert + c * H + n, lane, used, FP4, GROUP),)  # type: ignore[assignment]
    used_shared = (warp < CHUNKS) & (n < H)
    of_shared = (tl.cast(E, tl.int64) * C + warp) * H + n
    shared = unit_of(words, scale, of_shared, lane, used_shared, FP4, GROUP)
    start_next()
    out = first + tl.arange(0, 8)
    inside = out < H
    factor = row_factor(row + experts[:, None] * H, out[None, :], inside[None, :], FP4)
    factor_shared = row_factor(row + tl.cast(E, tl.int64) * H, out, inside, FP4)
    before = tl.load(residual + out, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    p = tl.load(logits + experts, mask=j < TOP, other=-float("inf"), cache_modifier=".cg")
    p = tl.exp(p.to(tl.float32) - tl.max(p.to(tl.float32), 0))
    p = rounded(p / tl.sum(p, 0), logits)[:, None]
    p_shared = rounded(tl.sigmoid(tl.load(logits + E, cache_modifier=".cg").to(tl.float32)), logits)
    wait_for_inputs()
    x_parts = ()
    for c in tl.static_range(CHUNKS):
        x_parts += (pairs_of(inner + warp * F, warp * 0 + c, g, lane, warp < TOP, F, FP4),)  # type: ignore[assignment]
    total = sums_of(units, x_parts, 0, FP4, GROUP)
    x = pairs_of(inner + TOP * F, warp, g, lane, warp < CHUNKS, F, FP4)
    zeros = tl.zeros(total.shape, tl.float32)
    total_shared = unit_sums(shared, x, warp < CHUNKS, zeros, FP4, GROUP)
    both = tl.sum(tl.reshape(joined((total, total_shared), 2), (WARPS, 8, 4, 2)), 2)
    routed, whole = tl.split(both)  # [WARPS, 8]
    routed = tl.sum(rounded(rounded(routed * factor, y) * p, y), 0)
    whole = tl.sum(whole, 0)
    whole = rounded(rounded(whole * factor_shared, y) * p_shared, y)
    y_N = before + rounded(routed + whole, y)
    tl.store(y + out, y_N.to(y.dtype.element_ty), mask=inside)
