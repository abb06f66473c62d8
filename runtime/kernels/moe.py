"""The sparse feed-forward of Qwen3.5 MoE: router, chosen experts, shared expert.

    p = softmax(x W_router^T)  over all E experts      w = p[top k] / sum(p[top k])
    y = sum_j w_j * expert_{e_j}(x)  +  sigmoid(x W_sg^T) * shared(x)        (experts: see mlp)

Dtypes, as in transformers' Qwen3_5MoeSparseMoeBlock: logits in the model dtype; softmax, top k and
renormalisation in float32, then w in the model dtype; every linear, silu, product and weighted term
is rounded to the model dtype, and terms are added in it, in order of expert. The kernels round the
same values but add a token's terms in float32 and round their sum once.

Source: transformers, modeling_qwen3_5_moe; DeepSeekMoE (Dai et al. 2024) for the shared expert.
Traps: gate is the first half of gate_up, up the second; the weights are always renormalised; the
shared expert has a size of its own (shared_expert_intermediate_size).

The shared expert may be the last of the stack (`route_absorbed`): its gate is then the router's
last row. That is the same sum in the same order, in fewer kernels; it needs S = F.

Shape letters: T tokens, k experts per token, P = T*k pairs, E experts, H hidden, F expert inner
size, S inner size of the shared expert, B blocks of pairs of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.kernels.gemm_fp8 import (
    BLOCK,
    ROW_CHOICES,
    TILE_CHOICES,
    Fp8Weight,
    Weight,
    add_product,
    block_of_rows,
    linear,
    linear_reference,
    row_products,
    scale_rows,
)
from runtime.kernels.launch import autotune, jit, power_of_two, tl, use_triton
from runtime.kernels.mlp import (
    Stored,
    gated_rows,
    rounded,
    shared_expert,
    silu_mul_reference,
    silu_times,
)
from runtime.kernels.quantize_rows import quantize_rows

_FEW_TOKENS = 8
_MOST_PAIRS = 64  # gate and up sum at once: tiles of 128 spill registers


class Experts(Protocol):
    """Weights of experts by number: a Tensor [E, N, K], an Fp8Weight stack, or a lazy reader."""

    def __getitem__(self, expert: int, /) -> Weight:
        """Return the weight [N, K] of one expert."""


@dataclass(frozen=True)
class MoeWeights:
    """The weights of one MoE layer.

    router          [E, H]
    gate_up, down   [E, 2F, H] and [E, H, F], gate rows first
    shared_gate     [1, H]
    shared_gate_up  [2S, H], gate rows first
    shared_down     [H, S]

    Without the three shared ones the shared expert is absorbed: router [E+1, H] ends in its gate,
    gate_up [E+1, 2F, H] and down [E+1, H, F] in its weights.
    """

    router: Tensor
    gate_up: Experts
    down: Experts
    shared_gate: Tensor | None = None
    shared_gate_up: Weight | None = None
    shared_down: Weight | None = None


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


def moe_experts_reference(
    x_TH: Tensor, gate_up: Experts, down: Experts, weights_Tk: Tensor, experts_Tk: Tensor
) -> Tensor:
    """Say what `moe_experts` computes, in plain torch; asks only for experts that have tokens."""
    y_TH, batch = torch.zeros_like(x_TH), x_TH.shape[0]
    for expert in experts_Tk.unique().tolist():
        tokens, place = (experts_Tk == expert).nonzero(as_tuple=True)
        inner = silu_mul_reference(linear_reference(x_TH[tokens], gate_up[expert], batch))
        out = linear_reference(inner, down[expert], batch) * weights_Tk[tokens, place, None]
        y_TH.index_add_(0, tokens, out)
    return y_TH


def moe_block(x_TH: Tensor, weights: MoeWeights, k: int) -> Tensor:
    """Return the whole sparse feed-forward [T, H] of x [T, H] with k routed experts per token."""
    logits = linear(x_TH, weights.router)
    if weights.shared_gate_up is None:
        return moe_experts(x_TH, weights.gate_up, weights.down, *route_absorbed(logits, k))
    assert weights.shared_gate is not None, "a shared expert of its own has a gate"
    assert weights.shared_down is not None, "a shared expert of its own has a down projection"
    shared = shared_expert(x_TH, weights.shared_gate_up, weights.shared_down, weights.shared_gate)
    return moe_experts(x_TH, weights.gate_up, weights.down, *route(logits, k)) + shared


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


def moe_experts(
    x_TH: Tensor, gate_up: Experts, down: Experts, weights_Tk: Tensor, experts_Tk: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts [T, H]; other experts are not read.

    x_TH           [T, H] model dtype, contiguous
    gate_up, down  [E, 2F, H], gate rows first, and [E, H, F]: Tensors of x's dtype or Fp8Weights;
                   without a GPU anything that gives one expert's weight by its number
    weights_Tk     [T, k] model dtype
    experts_Tk     [T, k] int64, no expert twice for a token

    A `dynamic` gate_up quantises x and the inner activations where T > 16, as in `linear`.
    """
    if not use_triton(x_TH):
        return moe_experts_reference(x_TH, gate_up, down, weights_Tk, experts_Tk)
    assert x_TH.is_contiguous(), "x must be contiguous"
    assert experts_Tk.shape == weights_Tk.shape, "one weight for each chosen expert"
    up, out = Stored.of(gate_up), Stored.of(down)
    assert up.values.shape[2] == x_TH.shape[1] == out.values.shape[1], "hidden sizes must agree"
    assert up.values.shape[1] == 2 * out.values.shape[2], "gate_up has twice down's inner size"
    experts, weights = experts_Tk.contiguous(), weights_Tk.contiguous()
    if x_TH.shape[0] <= _FEW_TOKENS:
        return _few_tokens(x_TH, up, out, weights, experts)
    quantise = isinstance(gate_up, Fp8Weight) and gate_up.quantises(x_TH.shape[0])
    return _grouped(x_TH, up, out, weights, experts, quantise=quantise)


def expert_blocks(experts_Tk: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Return (order, blocks): the pairs sorted by expert, cut into blocks of one expert each.

    order   [P] int64, pair numbers t*k + j
    blocks  [B, 3] int32: expert, first and end place in `order`; expert -1 marks an unused row.
            B depends on T, k and E alone, so that nothing waits for the GPU
    """
    ordered, order = experts_Tk.flatten().sort(stable=True)
    num_pairs, device = order.numel(), order.device
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=device))
    counts = (bounds.diff() + block - 1) // block
    ends = counts.cumsum(0)
    number = torch.arange(num_pairs // block + min(num_experts, num_pairs), device=device)
    owner = torch.searchsorted(ends, number, right=True)
    expert = owner.clamp(max=num_experts - 1)
    first = bounds[expert] + (number - (ends - counts)[expert]) * block
    end = torch.minimum(first + block, bounds[expert + 1])
    used = torch.where(owner < num_experts, owner, -1)
    return order, torch.stack([used, first, end], dim=1).int()


def _launch_route(logits: Tensor, num_experts: int, k: int, out: int) -> tuple[Tensor, Tensor]:
    assert logits.stride(1) == 1, "rows must be contiguous"
    assert k <= num_experts, "no more experts can be chosen than there are"
    num_tokens = logits.shape[0]
    weights = torch.empty((num_tokens, out), dtype=logits.dtype, device=logits.device)
    experts = torch.empty((num_tokens, out), dtype=torch.int64, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits, weights, experts, num_experts, logits.stride(0),
        TOP=k, OUT=out, BLOCK_E=power_of_two(num_experts), BLOCK_K=power_of_two(out), num_warps=1,
    )  # fmt: skip
    return weights, experts


def _few_tokens(
    x_TH: Tensor, gate_up: Stored, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor
) -> Tensor:
    num_tokens, k = experts_Tk.shape
    hidden, inner = down.values.shape[1:]
    inner_PF = x_TH.new_empty((num_tokens * k, inner))
    _gate_up_rows_kernel[lambda meta: (-(-inner // meta["BLOCK_N"]), num_tokens * k)](
        x_TH, gate_up.values, gate_up.scale, experts_Tk, inner_PF, hidden, inner,
        *gate_up.scale_strides, TOP=k, EDGE=gate_up.edge,
    )  # fmt: skip
    y_TH = torch.empty_like(x_TH)
    _down_rows_kernel[lambda meta: (-(-hidden // meta["BLOCK_N"]), num_tokens)](
        inner_PF, down.values, down.scale, experts_Tk, weights_Tk, y_TH, hidden, inner,
        *down.scale_strides, TOP=k, EDGE=down.edge,
    )  # fmt: skip
    return y_TH


def _grouped(
    x_TH: Tensor, gate_up: Stored, down: Stored, weights_Tk: Tensor, experts_Tk: Tensor,
    *, quantise: bool,
) -> Tensor:  # fmt: skip
    num_tokens, k = experts_Tk.shape
    num_experts, hidden, inner = down.values.shape
    block = min(block_of_rows(num_tokens * k // num_experts), _MOST_PAIRS)
    order_P, blocks_B3 = expert_blocks(experts_Tk, num_experts, block)
    num_blocks = blocks_B3.shape[0]
    inner_PF = x_TH.new_empty((num_tokens * k, inner))
    x, x_scale = _activations(x_TH, gate_up, quantise=quantise)
    _gate_up_tiles_kernel[lambda meta: (num_blocks, -(-inner // meta["BLOCK_N"]))](
        x, x_scale, gate_up.values, gate_up.scale, order_P, blocks_B3, inner_PF,
        num_tokens, hidden, inner, *gate_up.scale_strides,
        TOP=k, EDGE=gate_up.edge, BLOCK_M=block,
    )  # fmt: skip
    out_PH = x_TH.new_empty((num_tokens * k, hidden))
    x, x_scale = _activations(inner_PF, down, quantise=quantise)
    _down_tiles_kernel[lambda meta: (num_blocks, -(-hidden // meta["BLOCK_N"]))](
        x, x_scale, down.values, down.scale, order_P, blocks_B3, weights_Tk, out_PH,
        num_tokens * k, hidden, inner, *down.scale_strides, EDGE=down.edge, BLOCK_M=block,
    )  # fmt: skip
    return out_PH.view(num_tokens, k, hidden).sum(1)


def _activations(x: Tensor, weight: Stored, *, quantise: bool) -> tuple[Tensor, Tensor | None]:
    return quantize_rows(x, x.shape[1] if weight.edge == 1 else BLOCK) if quantise else (x, None)


@jit
def _route_kernel(
    logits, weights, experts, E, row,
    TOP: tl.constexpr, OUT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """OUT is TOP, or TOP + 1 where the shared expert's gate is column E."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    j = tl.arange(0, BLOCK_K)
    x = tl.load(logits + t * row + e, mask=e < E, other=-float("inf")).to(tl.float32)
    powers = tl.exp(x - tl.max(x, 0))
    p = tl.where(e < E, powers / tl.sum(powers, 0), -1.0)
    top = tl.zeros((BLOCK_K,), tl.float32)
    chosen = tl.zeros((BLOCK_K,), tl.int32) + E
    for place in tl.static_range(TOP):
        best = tl.argmax(p, 0)
        top = tl.where(j == place, tl.max(p, 0), top)
        chosen = tl.where(j == place, best, chosen)
        p = tl.where(e == best, -1.0, p)
    top = top / tl.sum(top, 0)
    if OUT > TOP:
        gate = tl.load(logits + t * row + E).to(tl.float32)
        top = tl.where(j == TOP, tl.sigmoid(gate), top)
    tl.store(weights + t * OUT + j, top.to(weights.dtype.element_ty), mask=j < OUT)
    tl.store(experts + t * OUT + j, chosen.to(tl.int64), mask=j < OUT)


@autotune(ROW_CHOICES, key=["H", "F", "TOP", "EDGE"])
@jit
def _gate_up_rows_kernel(
    x, gate_up, scale, experts, inner, H, F, scale_expert, scale_row, scale_col,
    TOP: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + pair)
    gated_rows(
        x + pair // TOP * H, gate_up + expert * 2 * F * H, scale + expert * scale_expert,
        inner + pair * F, 1, H, F, scale_row, scale_col, EDGE, 1, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@autotune(ROW_CHOICES, key=["H", "F", "TOP", "EDGE"])
@jit
def _down_rows_kernel(
    inner, down, scale, experts, weights, y, H, F, scale_expert, scale_row, scale_col,
    TOP: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((1, BLOCK_N), tl.float32)
    for j in range(TOP):
        pair = t * TOP + j
        expert = tl.load(experts + pair)
        weight = tl.load(weights + pair).to(tl.float32)
        out = row_products(
            inner + pair * F, down + expert * H * F, scale + expert * scale_expert,
            h, h < H, 1, F, F, scale_row, scale_col, EDGE, 1, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total += rounded(rounded(out, y) * weight, y)
    tl.store(y + t * H + h[None, :], total.to(y.dtype.element_ty), mask=(h < H)[None, :])


@jit
def _expert_block(blocks, BLOCK_M: tl.constexpr):
    """Return (expert or -1, places in the order [BLOCK_M], which of them are the block's)."""
    block = blocks + tl.program_id(0) * 3
    place = tl.load(block + 1).to(tl.int64) + tl.arange(0, BLOCK_M)
    return tl.load(block).to(tl.int64), place, place < tl.load(block + 2)


@autotune(TILE_CHOICES, key=["H", "F", "BLOCK_M", "EDGE"])
@jit
def _gate_up_tiles_kernel(
    x, x_scale, gate_up, scale, order, blocks, inner, T, H, F, scale_expert, scale_row, scale_col,
    TOP: tl.constexpr, EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, place, used = _expert_block(blocks, BLOCK_M)
    if expert < 0:
        return
    t = tl.load(order + place, mask=used, other=0) // TOP
    f = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + t[None, :] * H + k[:, None]
    gate_rows = gate_up + (expert * 2 * F + f)[:, None] * H + k[None, :]
    up_rows = gate_up + (expert * 2 * F + F + f)[:, None] * H + k[None, :]
    s = scale + expert * scale_expert
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, H, BLOCK_K):
        left = k < H - start
        inside = (f < F)[:, None] & left[None, :]
        x_KM = tl.load(x_rows + start, mask=used[None, :] & left[:, None], other=0.0)
        gate = add_product(
            gate, tl.load(gate_rows + start, mask=inside, other=0.0), x_KM, s, x_scale,
            f, t, f < F, used, start, T, scale_row, scale_col, EDGE,
        )  # fmt: skip
        up = add_product(
            up, tl.load(up_rows + start, mask=inside, other=0.0), x_KM, s, x_scale,
            F + f, t, f < F, used, start, T, scale_row, scale_col, EDGE,
        )  # fmt: skip
    gate = scale_rows(gate, s, x_scale, f, t, f < F, used, EDGE)
    up = scale_rows(up, s, x_scale, F + f, t, f < F, used, EDGE)
    product = tl.trans(silu_times(gate, up, inner)).to(inner.dtype.element_ty)
    tl.store(
        inner + place[:, None] * F + f[None, :], product, mask=used[:, None] & (f < F)[None, :]
    )


@autotune(TILE_CHOICES, key=["H", "F", "BLOCK_M", "EDGE"])
@jit
def _down_tiles_kernel(
    inner, x_scale, down, scale, order, blocks, weights, out, P, H, F,
    scale_expert, scale_row, scale_col,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, place, used = _expert_block(blocks, BLOCK_M)
    if expert < 0:
        return
    h = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = inner + place[None, :] * F + k[:, None]
    w_rows = down + (expert * H + h)[:, None] * F + k[None, :]
    s = scale + expert * scale_expert
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, F, BLOCK_K):
        left = k < F - start
        x_KM = tl.load(x_rows + start, mask=used[None, :] & left[:, None], other=0.0)
        w_NK = tl.load(w_rows + start, mask=(h < H)[:, None] & left[None, :], other=0.0)
        total = add_product(
            total, w_NK, x_KM, s, x_scale,
            h, place, h < H, used, start, P, scale_row, scale_col, EDGE,
        )  # fmt: skip
    total = scale_rows(total, s, x_scale, h, place, h < H, used, EDGE)
    pair = tl.load(order + place, mask=used, other=0)
    weight = tl.load(weights + pair, mask=used, other=0.0).to(tl.float32)
    y_MN = (tl.trans(rounded(total, out)) * weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + pair[:, None] * H + h[None, :], y_MN, mask=used[:, None] & (h < H)[None, :])
