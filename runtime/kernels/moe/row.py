"""Experts for one token, from the router's logits to the residual stream, in two kernels.

Chosen for: `ONE_TOKEN` on a GPU with the shared expert in the stack.

    e, w = choice of the logits         inner[j] = silu(gate) * up of x and expert e_j
    y = x + sum_j w_j * down_e_j(inner[j])                  the last j is the shared expert, E

Every program chooses the experts itself, from a few hundred logits, in less time than another
kernel takes to start. A program of the first kernel has one expert; all of them fit on a GPU at
once, with their weights on the way to shared memory. The shared expert is known before the choice,
so its weights are prefetched while the router still runs. The second kernel: see row_down.

Source and rounding: see layer and routing.
Trap: the first kernel may let the second start only after it has itself waited: see row_down.

Shape letters: k routed experts, E their number, H hidden, F inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.linear.row_parts import silu_times, x_part
from runtime.kernels.moe.routing import order_keys, take_best
from runtime.kernels.moe.row_down import down_kernel, row_products
from runtime.kernels.overlap import ask, early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Stored

# a thread has 16 bytes of each row at once
_PART = 2048
_COLUMNS = 4
# In FP8 instructions count: each warp chooses by itself, so fewer should;
# and the next layer's weights should not come before those of `down` are on their way. Twelve FP8
# layers of 35B-A3B took 764 us on an H100 with these, 779 with four warps, 785 with one, 776 if the
# next kernel starts early; eight BF16 layers 801 with theirs, 807 and 825 with FP8's.
_GATED = {"num_warps": 4, "STAGES": 3}
_GATED_FP8 = {"num_warps": 2, "STAGES": 3}
_DOWN = {"BLOCK_N": 4, "num_warps": 4, "LATE": 0}
_DOWN_FP8 = _DOWN | {"LATE": 1}
_LINE = 128  # bytes that come together


def routed_row(
    x_1H: Tensor, gate_up: Stored, down: Stored, logits: Tensor, k: int, residual_1H: Tensor
) -> Tensor:
    """Return the residual plus the weighted sum of the experts of x, [1, H].

    logits  [1, E+1] as in `route_absorbed`
    """
    hidden, inner, num_experts = x_1H.shape[1], down.values.shape[2], logits.shape[1] - 1
    choice = {"TOP": k, "BLOCK_E": power_of_two(num_experts)}
    columns = min(_COLUMNS, inner & -inner)
    width = max(16, min(_PART, power_of_two(hidden)))
    for_gated = _GATED_FP8 if gate_up.is_fp8 else _GATED
    for_down = _DOWN_FP8 if down.is_fp8 else _DOWN
    lines = power_of_two(-(-hidden * gate_up.values.element_size() // _LINE))
    inner_JF = x_1H.new_empty((k + 1, inner))
    _gated_kernel[(inner // columns, k + 1)](
        x_1H,
        gate_up.values,
        gate_up.scale,
        logits,
        inner_JF,
        num_experts,
        hidden,
        inner,
        *gate_up.scale_strides,
        EDGE=gate_up.edge,
        BLOCK_K=width,
        PARTS=-(-hidden // width),
        COLUMNS=columns,
        LINES=lines,
        WARPS=for_gated["num_warps"],
        **choice,
        **for_gated,
        **early(),
    )
    y_1H = torch.empty_like(x_1H)
    down_kernel[(-(-hidden // for_down["BLOCK_N"]),)](
        inner_JF,
        down.values,
        down.scale,
        logits,
        residual_1H,
        y_1H,
        num_experts,
        hidden,
        inner,
        *down.scale_strides,
        EDGE=down.edge,
        BLOCK_K=max(power_of_two(inner), 16),
        BLOCK_J=power_of_two(k),
        WARPS=for_down["num_warps"],
        **choice,
        **for_down,
        **early(),
    )
    return y_1H


@jit
def _ask_rows(weight, expert, first, H, F, COLUMNS: tl.constexpr, LINES: tl.constexpr):
    """Ask for the rows of some columns of one expert, both halves."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    half, column = tl.arange(0, 2)[:, None, None] * F, tl.arange(0, COLUMNS)[None, :, None]
    k = tl.minimum(tl.arange(0, LINES)[None, None, :] * LINE, H - 1)
    ask(weight + expert * 2 * F * H + (half + first + column) * H + k)


@jit
def expert_of(place, keys, E, TOP: tl.constexpr):
    """Return the expert of a place: after the TOP likeliest comes E, the shared one."""
    expert, keys = take_best(keys)
    for _ in range(0, tl.where(place < TOP, place, 0)):
        expert, keys = take_best(keys)
    return tl.where(place < TOP, tl.max(expert, 0), E).to(tl.int64)


@jit
def _gated_kernel(
    x,
    gate_up,
    scale,
    logits,
    inner,
    E,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    LINES: tl.constexpr,
):
    """COLUMNS of inner for one place: each from rows f and F + f, in PARTS parts of H."""
    VECTOR: tl.constexpr = 128 // gate_up.dtype.element_ty.primitive_bitwidth
    NUM: tl.constexpr = BLOCK_K // VECTOR
    place, first = tl.program_id(1) - 1, tl.program_id(0) * COLUMNS
    if place < 0:
        place = TOP
        _ask_rows(gate_up, tl.cast(E, tl.int64), first, H, F, COLUMNS, LINES)
    wait_for_inputs()
    start_next()
    keys, x_K = order_keys(logits, E, BLOCK_E, WARPS), x_part(x, 0, H, BLOCK_K)
    expert = expert_of(place, keys, E, TOP)
    k, g = tl.arange(0, BLOCK_K)[None, :], (tl.arange(0, NUM) * VECTOR)[None, :]
    half, column = tl.arange(0, 2)[:, None] * F, tl.arange(0, COLUMNS)
    weight, scales = gate_up + expert * 2 * F * H, scale + expert * scale_expert
    # the columns lie within one block of scales
    s_at, s = scales + (half + first) // 128 * scale_row, tl.zeros((2, NUM), tl.float32)
    if EDGE > 1 and PARTS == 1:
        s = tl.load(s_at + g // 128 * scale_col, mask=g < H + half * 0, other=0.0)
    total, kept = tl.zeros((2, NUM), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for step in tl.range(0, COLUMNS * PARTS, num_stages=STAGES):
        f, start = first + step // PARTS, step % PARTS * BLOCK_K
        at = (half + f) * H + start + k
        w = tl.load(weight + at, mask=k < H - start + half * 0, other=0.0)
        if PARTS > 1:
            x_K = x_part(x, start, H, BLOCK_K)
            if EDGE > 1:
                s_part = s_at + (start + g) // 128 * scale_col
                s = tl.load(s_part, mask=g < H - start + half * 0, other=0.0)
        w, x_gK = tl.reshape(w, (2, NUM, VECTOR)), tl.reshape(x_K, (1, NUM, VECTOR))
        total += row_products(w, x_gK, s, EDGE)
        if step % PARTS == PARTS - 1:
            y = tl.sum(total, 1)
            if EDGE == 1:
                y *= tl.load(scales + tl.arange(0, 2) * F + f).to(tl.float32)
            gate, up = tl.split(y)
            kept = tl.where(column == step // PARTS, silu_times(gate, up, inner), kept)
            total = tl.zeros((2, NUM), tl.float32)
    tl.store(inner + place * F + first + column, kept.to(inner.dtype.element_ty))
