"""The sparse feed-forward of Qwen3.5 MoE: router, chosen experts, shared expert.

Chosen for: every sparse layer: it asks the table for `ONE_TOKEN`, `ROUTER` and `EXPERTS`.

    w, e = route(x W_router^T)                         (see routing)
    y = sum_j w_j * expert_{e_j}(x)  +  sigmoid(x W_sg^T) * shared(x)        (experts: linear.mlp)

Dtypes, as in transformers' Qwen3_5MoeSparseMoeBlock: logits and w in the model dtype; every linear,
silu, product and weighted term is rounded to it, and terms are added in it, in order of expert. The
kernels round the same values but add a token's terms in float32 and round their sum once.

Source: transformers, modeling_qwen3_5_moe; DeepSeekMoE (Dai et al. 2024) for the shared expert.
Traps: gate is the first half of gate_up, up the second; the shared expert has a size of its own
(shared_expert_intermediate_size).

The shared expert may be the last of the stack (`route_absorbed`): its gate is then the router's
last row. That is the same sum in the same order, in fewer kernels; it needs S = F.

Shape letters: T tokens, k experts per token, P = T*k pairs, E experts, H hidden, F expert inner
size, S inner size of the shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.cases import FLOAT, ChosenExperts, OneToken, Router
from runtime.kernels.dispatch import EXPERTS, ONE_TOKEN, ROUTER
from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import Codes
from runtime.kernels.launch import gluon_runs, use_triton
from runtime.kernels.linear.mlp import shared_expert, silu_mul_reference
from runtime.kernels.linear.packed import PackedWeight
from runtime.kernels.linear.product import linear, linear_reference
from runtime.kernels.linear.row import normed_and_linear
from runtime.kernels.linear.weight import Fp8Weight, Stored, Weight, form_of
from runtime.kernels.moe.packed import packed_tiles, packed_tokens, unpacked_pairs
from runtime.kernels.moe.packed_row import packed_routed_row
from runtime.kernels.moe.roles import roles_pairs
from runtime.kernels.moe.router import few_logits
from runtime.kernels.moe.routing import (
    route,
    route_absorbed,
)
from runtime.kernels.moe.row import routed_row
from runtime.kernels.moe.rows import few_pairs
from runtime.kernels.moe.sum import Pairs, summed
from runtime.kernels.moe.tiles import tiled_codes, tiled_pairs
from runtime.kernels.moe.w8a8 import w8a8_pairs
from runtime.kernels.norm.rms import rmsnorm

STORED = Tensor, Fp8Weight, PackedWeight


class Experts(Protocol):
    """Weights of experts by number: a Tensor [E, N, K], one in FP8 or four bits, a lazy reader."""

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

    On a GPU there is room behind the router, up to a multiple of 8 rows: see `router_logits`.
    """

    router: Tensor
    gate_up: Experts
    down: Experts
    shared_gate: Tensor | None = None
    shared_gate_up: Weight | None = None
    shared_down: Weight | None = None

    def __post_init__(self) -> None:
        if self.router.is_cuda:
            object.__setattr__(self, "router", with_room(self.router))


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
    return _total(moe_terms(x_TH, weights, k))


def moe_terms(
    x_TH: Tensor, weights: MoeWeights, k: int, codes: Codes | Lined | None = None
) -> Tensor | Pairs:
    """Return `moe_block`, or what is still to be summed where a kernel can do that with more.

    codes  those of x, from room of `codes_for` gate_up, if there are any
    """
    logits = router_logits(x_TH, weights.router)
    stacks = weights.gate_up, weights.down
    if weights.shared_gate_up is None:
        return expert_terms(x_TH, *stacks, *route_absorbed(logits, k), codes)
    assert weights.shared_gate is not None, "a shared expert of its own has a gate"
    assert weights.shared_down is not None, "a shared expert of its own has a down projection"
    shared = shared_expert(
        x_TH, weights.shared_gate_up, weights.shared_down, weights.shared_gate, codes
    )
    return _total(expert_terms(x_TH, *stacks, *route(logits, k), codes)) + shared


def _total(terms: Tensor | Pairs) -> Tensor:
    return summed(terms) if isinstance(terms, Pairs) else terms


def router_logits(x_TH: Tensor, router: Tensor) -> Tensor:
    """Return x @ router.T [T, E] in x's dtype, its rows 8 numbers or a multiple apart on a GPU.

    For an odd number of rows cuBLAS takes a far slower kernel: 8192 tokens and 257 rows of 2048:
    160 us on an H100, 264 rows 16 us. With room for 264 logits, but 257 rows, an H200 takes 162.
    """
    multiply = _router(Router(use_triton(x_TH), x_TH.shape[0], *router.shape))
    logits_TE: Tensor = multiply(x_TH, router)
    return logits_TE


def padded_logits(x_TH: Tensor, router: Tensor) -> Tensor:
    """Return `router_logits` by a product with what lies behind the router, too."""
    whole = in_eights(with_room(router))
    assert whole is not None, "there is room behind the router"
    return F.linear(x_TH, whole)[:, : router.shape[0]]


def with_room(router: Tensor) -> Tensor:
    """Return the same with room behind it in memory, up to a multiple of 8 rows."""
    if in_eights(router) is not None:
        return router
    num_experts, hidden = router.shape
    whole = router.new_zeros((num_experts + -num_experts % 8, hidden))
    whole[:num_experts] = router
    return whole[:num_experts]


def in_eights(router: Tensor) -> Tensor | None:
    """Return a router and what lies behind it, up to a multiple of 8 rows, if there is as much."""
    rows, hidden = router.shape[0] + -router.shape[0] % 8, router.shape[1]
    end = (router.storage_offset() + rows * hidden) * router.itemsize
    if not router.is_contiguous() or end > router.untyped_storage().nbytes():
        return None
    return router.as_strided((rows, hidden), (hidden, 1))


def moe_row(x_1H: Tensor, norm_H: Tensor, eps: float, weights: MoeWeights, k: int) -> Tensor:
    """Return x plus the sparse feed-forward of its norm, [1, H], of x [1, H] before the norm."""
    serve = _one_token(_one_token_case(x_1H, weights, k))
    if serve is moe_block:
        return x_1H + moe_block(rmsnorm(x_1H, norm_H, eps), weights, k)
    normed_1H, logits = normed_and_linear(x_1H, norm_H, eps, weights.router)
    if serve in (packed_routed_row, packed_tokens):
        assert isinstance(weights.gate_up, PackedWeight)
        assert isinstance(weights.down, PackedWeight)
        stacks = weights.gate_up, weights.down
        if serve is packed_routed_row:
            return packed_routed_row(normed_1H, *stacks, logits, k, x_1H)
        return packed_tokens(normed_1H, *stacks, *route_absorbed(logits, k), x_1H)
    stored = Stored.of(weights.gate_up), Stored.of(weights.down)
    return routed_row(normed_1H, *stored, logits, k, x_1H)


def _one_token_case(x_1H: Tensor, weights: MoeWeights, k: int) -> OneToken:
    form, inner = FLOAT, 0
    if isinstance(weights.gate_up, STORED):
        form, inner = form_of(weights.gate_up)[0], weights.gate_up.shape[1] // 2
    absorbed = weights.shared_gate_up is None
    return OneToken(use_triton(x_1H), absorbed, form, x_1H.shape[1], inner, k)


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
    return _total(expert_terms(x_TH, gate_up, down, weights_Tk, experts_Tk))


def expert_terms(
    x_TH: Tensor,
    gate_up: Experts,
    down: Experts,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    codes: Codes | Lined | None = None,
) -> Tensor | Pairs:
    """Return `moe_experts`, its arguments too, or what it sums.

    codes  those of x, if there are any
    """
    serve = _experts(_case(x_TH, gate_up))
    if serve is moe_experts_reference:
        return moe_experts_reference(x_TH, gate_up, down, weights_Tk, experts_Tk)
    assert x_TH.is_contiguous(), "x must be contiguous"
    assert experts_Tk.shape == weights_Tk.shape, "one weight for each chosen expert"
    assert isinstance(gate_up, STORED), "the kernels take stored weights"
    assert isinstance(down, STORED), "the kernels take stored weights"
    assert gate_up.shape[2] == x_TH.shape[1] == down.shape[1], "hidden sizes must agree"
    assert gate_up.shape[1] == 2 * down.shape[2], "gate_up has twice down's inner size"
    chosen = weights_Tk.contiguous(), experts_Tk.contiguous()
    if serve in (w8a8_pairs, roles_pairs):
        pairs: Pairs = serve(x_TH, Stored.of(gate_up), Stored.of(down), *chosen, codes)
        return pairs
    packed = serve in (packed_tokens, packed_tiles, unpacked_pairs)
    stacks = (gate_up, down) if packed else (Stored.of(gate_up), Stored.of(down))
    terms: Tensor | Pairs = serve(x_TH, *stacks, *chosen)
    return terms


def _case(x_TH: Tensor, gate_up: Experts) -> ChosenExperts:
    gpu, (num_tokens, hidden) = use_triton(x_TH), x_TH.shape
    if not gpu:  # gate_up may be anything that gives one expert's weight
        return ChosenExperts(
            gpu, num_tokens, FLOAT, dynamic=False, hidden=hidden, inner=0, gluon=False
        )
    assert isinstance(gate_up, STORED), "the kernels take stored weights"
    sizes = hidden, gate_up.shape[1] // 2
    return ChosenExperts(gpu, num_tokens, *form_of(gate_up), *sizes, gluon_runs(x_TH.get_device()))


_router = ROUTER.bind(padded_logits, few_logits, linear)
_one_token = ONE_TOKEN.bind(routed_row, packed_routed_row, packed_tokens, moe_block)
_experts = EXPERTS.bind(
    moe_experts_reference,
    packed_tokens,
    packed_tiles,
    unpacked_pairs,
    few_pairs,
    tiled_pairs,
    tiled_codes,
    w8a8_pairs,
    roles_pairs,
)
