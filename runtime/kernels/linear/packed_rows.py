"""A few rows times the four-bit weights of their experts, in two kernels.

Chosen for: `EXPERTS` of few tokens, by moe.packed; never alone.

    y[n] = sum_k x[k] * w[n, k]                       summed in float32, rounded once; see packed
    gated     silu(gate) * up, each step rounded to x's dtype
    weights   each pair's y is rounded, multiplied with its weight, rounded; a token's are summed
    residual  y is rounded, then added to it

A program keeps its columns of x in registers, as the tensor cores take them, and goes through
blocks of the weight's rows: reading x again for each block would take longer than the weights do.
What it has of a row is a part of its sum, written in float32; a second kernel adds the parts and
finishes.

Tensor cores want eight rows of x: the other seven are zeros.

Shape letters: N outputs, K inputs, C chunks of 256 inputs, P pairs of a token and an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import jit, operand, power_of_two, tl
from runtime.kernels.linear.packed import PackedWeight
from runtime.kernels.linear.packed_parts import planes_of, row_factor, row_planes
from runtime.kernels.linear.row_parts import rounded, silu_times
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# Measured on an H200. One warp a program waits for no other: 34816 x 5120 of NVFP4 45 us, 16 rows
# and 4 warps 46; x read again for each block of 16 rows 102, of 64 rows 70.
_BLOCKS = {"BLOCK_N": 16, "SLICES": 1, "num_warps": 1, "STAGES": 3}
_WARPS = 132 * 20  # all at once
_FINISHED = 64


def row_parts(x: Tensor, weight: PackedWeight, experts: Tensor, share: int = 1) -> Tensor:
    """Return the sums over each chunk of columns [P, C, N].

    weight   a stack
    experts  [P] int64; pair p is of x's row p // share
    """
    pairs = experts.numel()
    (n, k), chunks = weight.shape[-2:], weight.chunks
    partial = x.new_empty((pairs, chunks, n), dtype=torch.float32)
    slices = -(-chunks // _BLOCKS["SLICES"])
    blocks = -(-n // _BLOCKS["BLOCK_N"])
    programs = max(1, min(blocks, _WARPS // (_BLOCKS["num_warps"] * slices * pairs)))
    _parts_kernel[(slices, programs, pairs)](
        x,
        experts,
        weight.words,
        weight.scale,
        partial,
        n,
        k,
        chunks,
        blocks,
        SHARE=share,
        FP4=int(weight.is_nvfp4),
        GROUP=weight.group,
        **_BLOCKS,
        **early(),
    )
    return partial


def finish(
    partial: Tensor,
    weight: PackedWeight,
    y: Tensor,
    experts: Tensor,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Write y [rows, columns] from the parts of its sums.

    weight   a stack
    experts  [P] int64
    weights  [rows, k] for the k pairs of each row, which are summed
    """
    chunks = weight.chunks
    block = max(16, min(_FINISHED, 2048 // power_of_two(chunks)))
    _finish_kernel[(-(-y.shape[1] // block), y.shape[0])](
        partial,
        residual,
        experts,
        weights,
        weight.row,
        y,
        weight.shape[-2],
        chunks,
        y.shape[1],
        TOP=1 if weights is None else weights.shape[1],
        GATED=int(gated),
        FP4=int(weight.is_nvfp4),
        BLOCK=block,
        PARTS=power_of_two(chunks),
        num_warps=4,
        **early(),
    )


@jit
def _block_sums(
    words,
    scale,
    chunk,
    x_planes,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the products of a block of rows with the planes of x [SLICES, BLOCK_N, 8]."""
    GROUPS: tl.constexpr = 256 // GROUP
    w = tl.load(words + chunk * 32 + tl.arange(0, 32)[None, None, :])
    s = w
    if FP4:
        s = tl.load(scale + chunk * 16 + tl.arange(0, 16)[None, None, :]).to(tl.int32)
        s = tl.broadcast_to(s[:, :, :, None], (SLICES, BLOCK_N, 16, 2))
        s = tl.reshape(s, (SLICES, BLOCK_N, 32))
    planes = planes_of(w, s, FP4)
    total = tl.zeros((SLICES, BLOCK_N, 8), tl.float32)
    part = total
    for p in tl.static_range(8):
        if not FP4 and p * 32 % GROUP == 0:
            part = tl.zeros((SLICES, BLOCK_N, 8), tl.float32)
        part = tl.dot(operand(planes[p]), operand(x_planes[p]), part)
        if not FP4 and (p + 1) * 32 % GROUP == 0:
            s_N = tl.load(scale + chunk * GROUPS + p * 32 // GROUP)
            total += part * s_N.to(tl.float32)
    if FP4:
        total = part
    return total


@jit
def _parts_kernel(
    x,
    experts,
    words,
    scale,
    partial,
    N,
    K,
    C,
    blocks,
    SHARE: tl.constexpr,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """SLICES chunks of columns of one row, a warp each, times some blocks of BLOCK_N rows."""
    start_next()
    pair, turns = tl.program_id(2).to(tl.int64), tl.cdiv(blocks, tl.num_programs(1))
    first = tl.program_id(1) * turns
    c = tl.program_id(0) * SLICES + tl.arange(0, SLICES)[:, None, None]
    i, m = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, 8)[None, None, :]
    e = tl.arange(0, 32)[None, :, None]
    used = (c < C) & (m == 0)
    at = tl.minimum(c, C - 1)
    wait_for_inputs()
    expert = tl.load(experts + pair)
    words += expert * N * C * 32
    scale += expert * N * C * (256 // GROUP)
    column, STEP = e, 32
    if FP4:
        column, STEP = 16 * (e // 2) + e % 2, 2
    x_planes = row_planes(x + pair // SHARE * K, c * 256 + column + m * 0, used, K, STEP)
    for block in tl.range(first, tl.minimum(first + turns, blocks), num_stages=STAGES):
        n = block * BLOCK_N + i
        chunk = at * N + tl.minimum(n, N - 1)
        total = _block_sums(words, scale, chunk, x_planes, FP4, GROUP, SLICES, BLOCK_N)
        out = partial + (pair * C + c) * N + n + m * 0
        tl.store(out, total, mask=used & (n < N))


@jit
def _sum_of_parts(partial, n, inside, N, C, PARTS: tl.constexpr):
    """Return the sums of the parts of columns n."""
    c = tl.arange(0, PARTS)[:, None]
    parts = tl.load(partial + c * N + n[None, :], mask=(c < C) & inside[None, :], other=0.0)
    return tl.sum(parts, 0)


@jit
def _finish_kernel(
    partial,
    residual,
    experts,
    weights,
    row,
    y,
    N,
    C,
    OUT,
    TOP: tl.constexpr,
    GATED: tl.constexpr,
    FP4: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    start_next()
    t, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < OUT
    wait_for_inputs()
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        pair = t * TOP + j
        of_row, at = row + tl.load(experts + pair) * N, partial + pair * C * N
        out = _sum_of_parts(at, n, inside, N, C, PARTS) * row_factor(of_row, n, inside, FP4)
        if GATED:
            up = _sum_of_parts(at, n + OUT, inside, N, C, PARTS)
            out = silu_times(out, up * row_factor(of_row, n + OUT, inside, FP4), y)
        out = rounded(out, y)
        if weights is not None:
            out = rounded(out * tl.load(weights + pair).to(tl.float32), y)
        total += out
    if residual is not None:
        r = tl.load(residual + t * OUT + n, mask=inside, other=0.0).to(tl.float32)
        total = r + rounded(total, y)
    tl.store(y + t * OUT + n, total.to(y.dtype.element_ty), mask=inside)
