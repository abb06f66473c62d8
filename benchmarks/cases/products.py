"""Cases of the products with stored weights: linear layers, the feed-forward and the experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases.setting import (
    BITS,
    DEEP,
    EPS,
    ONCE,
    Bound,
    Case,
    Part,
    Setting,
    poisoned,
    size,
)
from runtime.kernels.encode.rows import quantize_rows_reference
from runtime.kernels.linear import mlp, product
from runtime.kernels.linear import weight as weights
from runtime.kernels.linear.weight import BLOCK, Fp8Weight, dequant_reference
from runtime.kernels.moe import layer, routing, sort
from runtime.kernels.moe import sum as expert_sum
from runtime.kernels.norm.rms import rmsnorm_reference

if TYPE_CHECKING:
    from torch import Tensor

PRODUCT = Bound(0.005)


def _weight(s: Setting, *shape: int, scheme: str) -> Tensor | Fp8Weight:
    """Return a weight of variance 1 / K: `plain`, `block` or `channel`."""
    *stack, n, k = shape
    if scheme == "plain":
        return s.normal(*shape, dtype=torch.float32).div_(k**0.5).to(s.dtype)
    grid = (-(-n // BLOCK), -(-k // BLOCK)) if scheme == "block" else (n, 1)
    codes = s.normal(*shape, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448)
    scale = s.normal(*stack, *grid, dtype=torch.float32).mul_(0.5).exp_() / (100 * k**0.5)
    return Fp8Weight(codes.to(torch.float8_e4m3fn), scale)


def _exact(weight: Tensor | Fp8Weight) -> Tensor:
    if isinstance(weight, Fp8Weight):
        return dequant_reference(weight.codes, weight.scale.double(), torch.float64)
    return weight.double()


def _stored(weight: Tensor | Fp8Weight) -> int:
    return size(weight.codes, weight.scale) if isinstance(weight, Fp8Weight) else size(weight)


@dataclass(frozen=True)
class Exact:
    """Experts in float64, one at a time."""

    stack: Tensor | Fp8Weight

    def __getitem__(self, expert: int) -> Tensor:
        return _exact(self.stack[expert])


def dequant(s: Setting, n: int, k: int, scheme: str) -> Case:
    """Return a weight in the model dtype."""
    weight = _weight(s, n, k, scheme=scheme)
    assert isinstance(weight, Fp8Weight), "only FP8 weights are dequantised"
    call = partial(weights.dequant, weight.codes, weight.scale, s.dtype)

    def check() -> list[Part]:
        expected = dequant_reference(weight.codes, weight.scale, s.dtype)
        return [Part("w", poisoned(call), expected, BITS)]

    return Case(call, check, _stored(weight) + n * k * s.dtype.itemsize)


def linear_fp8(s: Setting, m: int, n: int, k: int, scheme: str) -> Case:
    """Return a linear layer that leaves x as it is."""
    x, weight = s.normal(m, k), _weight(s, n, k, scheme=scheme)
    assert isinstance(weight, Fp8Weight), "the weight must be FP8"
    call = partial(product.linear, x, weight)

    def check() -> list[Part]:
        return [Part("y", poisoned(call), x.double() @ _exact(weight).T, PRODUCT)]

    return Case(call, check, _stored(weight) + size(x) + m * n * x.element_size(), 2 * m * n * k)


def linear_fp8_dynamic(s: Setting, m: int, n: int, k: int, scheme: str) -> Case:
    """Return a linear layer that quantises x first, beside the product with the codes of torch."""
    x, weight = s.normal(m, k), _weight(s, n, k, scheme=scheme)
    assert isinstance(weight, Fp8Weight), "the weight must be FP8"
    call = partial(product.quantised_linear, x, weight)
    group = BLOCK if scheme == "block" else k

    def check() -> list[Part]:
        codes, scale = quantize_rows_reference(x, group)
        exact = codes.double() * scale.double().repeat_interleave(group, 1)[:, :k]
        return [Part("y", poisoned(call), exact @ _exact(weight).T, PRODUCT)]

    return Case(call, check, _stored(weight) + size(x) + m * n * x.element_size(), 2 * m * n * k)


def gated_linear(s: Setting, tokens: int, scheme: str) -> Case:
    """Return gate, up and their product, for one token in one kernel."""
    x, gate_up = s.normal(tokens, s.hidden), _weight(s, 2 * s.inner, s.hidden, scheme=scheme)
    call = partial(mlp.gated_linear, x, gate_up)

    def check() -> list[Part]:
        expected = mlp.silu_mul_reference(x.double() @ _exact(gate_up).T)
        return [Part("y", poisoned(call), expected, DEEP)]

    return Case(call, check, _stored(gate_up), 4 * tokens * s.hidden * s.inner)


def route(s: Setting, tokens: int, *, absorbed: bool) -> Case:
    """Return the choice of experts; ties, which bfloat16 logits have, go to the lower number."""
    logits = s.normal(tokens, s.experts + int(absorbed))
    call = partial(routing.route_absorbed if absorbed else routing.route, logits, s.top)

    def check() -> list[Part]:
        exact = logits[:, : s.experts].double().softmax(1)
        top, chosen = (
            x[:, : s.top] for x in torch.sort(exact, dim=1, descending=True, stable=True)
        )
        weights = top / top.sum(1, keepdim=True)
        if absorbed:
            weights = torch.cat([weights, logits[:, -1:].double().sigmoid()], 1)
            chosen = torch.cat([chosen, torch.full_like(chosen[:, :1], s.experts)], 1)
        got, experts = poisoned(call)
        return [Part("weights", got, weights, ONCE), Part("experts", experts, chosen, BITS)]

    return Case(call, check, size(logits) + tokens * s.top * (8 + logits.element_size()))


def sort_pairs(s: Setting, tokens: int, block: int) -> Case:
    """Return the pairs of the chosen experts and the absorbed one, in blocks of one expert."""
    chosen = routing.route_absorbed_reference(s.normal(tokens, s.experts + 1), s.top)[1]
    args = chosen, s.experts + 1, block
    call = partial(sort.expert_blocks, *args)

    def check() -> list[Part]:
        order, blocks = poisoned(call)
        expected_order, expected = sort.expert_blocks_reference(*args)
        unused = expected[:, :1] < 0
        return [
            Part("order", order, expected_order, BITS),
            Part("blocks", blocks.masked_fill(unused, -1), expected.masked_fill(unused, -1), BITS),
        ]

    return Case(call, check, 2 * size(chosen))


def add_pairs_norm(s: Setting, tokens: int) -> Case:
    """Return the sum over each token's experts, the residual add and the norm in one."""
    pairs = expert_sum.Pairs(s.normal(tokens * (s.top + 1), s.hidden), s.top + 1)
    residual, w = s.normal(tokens, s.hidden), s.normal(s.hidden)
    call = partial(expert_sum.add_pairs_rmsnorm, pairs, residual, w, EPS)

    def check() -> list[Part]:
        y, total = poisoned(call)
        expected = expert_sum.summed_reference(pairs) + residual
        normed = rmsnorm_reference(expected.double(), w.double(), EPS)
        return [Part("y", y, normed, ONCE), Part("total", total, expected, BITS)]

    return Case(call, check, size(pairs.rows) + 3 * size(residual))


def moe_experts(s: Setting, tokens: int, scheme: str, *, dynamic: bool = False) -> Case:
    """Return the weighted experts of each token."""
    gate_up: Any = _weight(s, s.experts, 2 * s.inner, s.hidden, scheme=scheme)
    down: Any = _weight(s, s.experts, s.hidden, s.inner, scheme=scheme)
    if dynamic:
        gate_up, down = replace(gate_up, dynamic=True), replace(down, dynamic=True)
    x = s.normal(tokens, s.hidden)
    chosen = routing.route_reference(s.normal(tokens, s.experts), s.top)
    call = partial(layer.moe_experts, x, gate_up, down, *chosen)

    def check() -> list[Part]:
        if dynamic:  # in float64 inner activations next to a tie would get another code
            expected = layer.moe_experts_reference(x, gate_up, down, *chosen)
        else:
            weights, experts = chosen
            expected = layer.moe_experts_reference(
                x.double(), Exact(gate_up), Exact(down), weights.double(), experts
            )
        return [Part("y", poisoned(call), expected, DEEP)]

    used = chosen[1].unique().numel() / s.experts
    moved = used * (_stored(gate_up) + _stored(down)) + 2 * size(x)
    return Case(call, check, moved, 6 * tokens * s.top * s.hidden * s.inner)
