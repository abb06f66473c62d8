"""Experts for one token, from the router's logits to the residual stream, in two kernels.

    e, w = choice of the logits         inner[j] = silu(gate) * up of norm(x) and expert e_j
    y = x + sum_j w_j * down_e_j(inner[j])                  the last j is the shared expert, E

A program chooses by itself, among a few hundred numbers, sooner than one more kernel would start.
Those of the first kernel have one expert each, and all fit on a GPU at once, their weights on the
way in shared memory. Those of the second have the same rows of all experts, and ask for them while
the first still runs.

Source and rounding: see moe and routing.
Trap: the second kernel reads the logits before it waits for the first. So the first lets it start
only when it has itself waited for them.

Shape letters: k routed experts, E their number, H hidden, F inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.gemv import root_mean, rounded, row_part, silu_times
from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.routing import likeliest, order_keys, take_best

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.weight import Stored

# a thread has 16 bytes of each row at once
_PART = 2048
_COLUMNS = 4
_GATED = {"num_warps": 4, "STAGES": 3}
_DOWN = {"BLOCK_N": 2, "num_warps": 4}


def routed_row(
    x_1H: Tensor, norm_H: Tensor, eps: float, gate_up: Stored, down: Stored, logits: Tensor, k: int
) -> Tensor:
    """Return x plus the weighted sum of the experts of its norm, [1, H], of x before the norm.

    logits  [1, E+1] as in `route_absorbed`
    """
    hidden, inner, num_experts = x_1H.shape[1], down.values.shape[2], logits.shape[1] - 1
    choice = {"TOP": k, "BLOCK_E": power_of_two(num_experts)}
    columns = min(_COLUMNS, inner & -inner)
    width = max(16, min(_PART, power_of_two(hidden)))
    inner_JF = x_1H.new_empty((k + 1, inner))
    _gated_kernel[(inner // columns, k + 1)](
        x_1H, norm_H, gate_up.values, gate_up.scale, logits, inner_JF, num_experts, hidden, inner,
        *gate_up.scale_strides, eps, EDGE=gate_up.edge, WIDTH=power_of_two(hidden),
        BLOCK_K=width, PARTS=-(-hidden // width), COLUMNS=columns, **choice, **_GATED, **early(),
    )  # fmt: skip
    y_1H = torch.empty_like(x_1H)
    _down_kernel[(-(-hidden // _DOWN["BLOCK_N"]),)](
        inner_JF, down.values, down.scale, logits, x_1H, y_1H, num_experts, hidden, inner,
        *down.scale_strides, EDGE=down.edge, BLOCK_K=max(power_of_two(inner), 16),
        BLOCK_J=power_of_two(k), **choice, **_DOWN, **early(),
    )  # fmt: skip
    return y_1H


@jit
def _products(w, x, s, g_inside, EDGE: tl.constexpr):
    """Return w * x [..., NUM], summed over the 16 bytes of weights that a thread loaded at once.

    w  [..., NUM, VECTOR], x that can be multiplied with it; s points to the scales of [..., NUM]
    """
    products = tl.sum(w.to(tl.float32) * x, len(w.shape) - 1)
    if EDGE > 1:
        products *= tl.load(s, mask=g_inside, other=0.0).to(tl.float32)
    return products


@jit
def _gated_kernel(
    x, norm, gate_up, scale, logits, inner, E, H, F, scale_expert, scale_row, scale_col, eps,
    EDGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, TOP: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """COLUMNS of inner for one place: each from rows f and F + f, in PARTS parts of H."""
    VECTOR: tl.constexpr = 128 // gate_up.dtype.element_ty.primitive_bitwidth
    NUM: tl.constexpr = BLOCK_K // VECTOR
    place = tl.program_id(1)
    wait_for_inputs()
    start_next()
    expert, keys = take_best(order_keys(logits, E, BLOCK_E))
    for _ in range(0, tl.where(place < TOP, place, 0)):
        expert, keys = take_best(keys)
    expert = tl.where(place < TOP, expert, E).to(tl.int64)
    root = root_mean(x, norm, H, eps, WIDTH)
    x_K = row_part(x, norm, root, 0, H, BLOCK_K)
    k, g = tl.arange(0, BLOCK_K)[None, :], (tl.arange(0, NUM) * VECTOR)[None, :]
    weight, scales = gate_up + expert * 2 * F * H, scale + expert * scale_expert
    total = tl.zeros((2, NUM), tl.float32)
    for step in tl.range(0, COLUMNS * PARTS, num_stages=STAGES):
        f, start = tl.program_id(0) * COLUMNS + step // PARTS, step % PARTS * BLOCK_K
        rows = (tl.arange(0, 2) * F + f)[:, None]
        w = tl.load(weight + rows * H + start + k, mask=k < H - start + rows * 0, other=0.0)
        if PARTS > 1:
            x_K = row_part(x, norm, root, start, H, BLOCK_K)
        w, x_gK = tl.reshape(w, (2, NUM, VECTOR)), tl.reshape(x_K, (1, NUM, VECTOR))
        at = scales + rows // 128 * scale_row + (start + g) // 128 * scale_col
        total += _products(w, x_gK, at, g < H - start + rows * 0, EDGE)
        if step % PARTS == PARTS - 1:
            y = tl.sum(total, 1)
            if EDGE == 1:
                y *= tl.load(scales + tl.arange(0, 2) * F + f).to(tl.float32)
            gate, up = tl.split(y)
            product = silu_times(gate, up, inner).to(inner.dtype.element_ty)
            tl.store(inner + place * F + f, product)
            total = tl.zeros((2, NUM), tl.float32)


@jit
def _down_rows(weight, experts, used, first, H, F, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return BLOCK_N rows of some experts, [experts, BLOCK_N, BLOCK_K]."""
    n, k = first + tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_K)[None, None, :]
    inside = used[:, None, None] & (n < H) & (k < F)
    at = (experts[:, None, None] * H + n) * F + k
    return tl.load(weight + at, mask=inside, other=0.0)


@jit
def _down_sums(
    w, inner, place, scale, experts, used, first, H, F, scale_expert, scale_row, scale_col, like,
    EDGE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Return w times the rows `place` of inner, rounded: [experts, BLOCK_N] in float32."""
    NUM_J: tl.constexpr = w.shape[0]
    BLOCK_N: tl.constexpr = w.shape[1]
    BLOCK_K: tl.constexpr = w.shape[2]
    NUM: tl.constexpr = BLOCK_K // VECTOR
    k, g = tl.arange(0, BLOCK_K)[None, :], (tl.arange(0, NUM) * VECTOR)[None, None, :]
    known = used[:, None] & (k < F)
    x = tl.load(inner + place[:, None] * F + k, mask=known, other=0.0).to(tl.float32)
    n = first + tl.arange(0, BLOCK_N)
    s = scale + experts[:, None, None] * scale_expert + first // 128 * scale_row
    s += g // 128 * scale_col + tl.zeros_like(n)[None, :, None]
    w = tl.reshape(w, (NUM_J, BLOCK_N, NUM, VECTOR))
    x = tl.reshape(x, (NUM_J, 1, NUM, VECTOR))
    inside = used[:, None, None] & (g < F) & (n < H)[None, :, None]
    y = tl.sum(_products(w, x, s, inside, EDGE), 2)
    if EDGE == 1:
        s_rows = scale + experts[:, None] * scale_expert + n[None, :]
        y *= tl.load(s_rows, mask=used[:, None] & (n < H)[None, :], other=0.0).to(tl.float32)
    return rounded(y, like)


@jit
def _down_kernel(
    inner, down, scale, logits, residual, y, E, H, F, scale_expert, scale_row, scale_col,
    EDGE: tl.constexpr, TOP: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K spans F."""
    start_next()
    VECTOR: tl.constexpr = 128 // down.dtype.element_ty.primitive_bitwidth
    first = tl.program_id(0) * BLOCK_N
    j = tl.arange(0, BLOCK_J)
    experts, used = likeliest(logits, E, TOP, BLOCK_J, BLOCK_E).to(tl.int64), j < TOP
    shared = tl.zeros((1,), tl.int64) + E
    w = _down_rows(down, experts, used, first, H, F, BLOCK_N, BLOCK_K)
    w_shared = _down_rows(down, shared, shared == E, first, H, F, BLOCK_N, BLOCK_K)
    p = tl.load(logits + experts, mask=used, other=-float("inf")).to(tl.float32)
    p = tl.exp(p - tl.max(p, 0))
    p = rounded(p / tl.sum(p, 0), logits)
    p_shared = rounded(tl.sigmoid(tl.load(logits + E).to(tl.float32)), logits)
    wait_for_inputs()
    out = _down_sums(
        w, inner, j, scale, experts, used, first, H, F, scale_expert, scale_row, scale_col, y,
        EDGE, VECTOR,
    )  # fmt: skip
    out_shared = _down_sums(
        w_shared, inner, shared * 0 + TOP, scale, shared, shared == E, first, H, F,
        scale_expert, scale_row, scale_col, y, EDGE, VECTOR,
    )  # fmt: skip
    y_N = tl.sum(rounded(out * p[:, None], y), 0) + tl.sum(rounded(out_shared * p_shared, y), 0)
    n = first + tl.arange(0, BLOCK_N)
    r_N = tl.load(residual + n, mask=n < H, other=0.0).to(tl.float32)
    tl.store(y + n, (r_N + rounded(y_N, y)).to(y.dtype.element_ty), mask=n < H)
