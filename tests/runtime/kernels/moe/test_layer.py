from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from runtime.kernels.encode.rows import quantize_rows_reference
from runtime.kernels.linear.cpu import FEW
from runtime.kernels.linear.weight import Fp8Weight
from runtime.kernels.moe import row, tiles
from runtime.kernels.moe.layer import (
    MoeWeights,
    in_eights,
    moe_block,
    moe_experts,
    moe_experts_reference,
    moe_row,
    padded_logits,
    router_logits,
    with_room,
)
from runtime.kernels.moe.routing import route, route_absorbed_reference, route_reference
from runtime.kernels.norm.rms import rmsnorm_reference

E, K, H, F = 7, 3, 40, 24
# Sums of a few hundred products in another order.
FLOAT32 = 1e-6
BFLOAT16 = 2**-8


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def block(dtype=torch.float32, shared=56):
    """A sparse block of transformers whose shared expert has a size of its own."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=H,
        moe_intermediate_size=F,
        shared_expert_intermediate_size=shared,
        num_experts=E,
        num_experts_per_tok=K,
    )
    config._experts_implementation = "eager"
    part = qwen.Qwen3_5MoeSparseMoeBlock(config).to(dtype).requires_grad_(requires_grad=False)
    for seed, parameter in enumerate(part.parameters()):
        parameter.data = (
            normal(*parameter.shape, seed=seed, dtype=dtype) / parameter.shape[-1] ** 0.5
        )
    return part


def weights_of(part):
    shared = part.shared_expert
    return MoeWeights(
        router=part.gate.weight,
        gate_up=part.experts.gate_up_proj,
        down=part.experts.down_proj,
        shared_gate=part.shared_expert_gate.weight,
        shared_gate_up=torch.cat([shared.gate_proj.weight, shared.up_proj.weight]),
        shared_down=shared.down_proj.weight,
    )


def absorbed(weights):
    return MoeWeights(
        router=torch.cat([weights.router, weights.shared_gate]),
        gate_up=torch.cat([weights.gate_up, weights.shared_gate_up[None]]),
        down=torch.cat([weights.down, weights.shared_down[None]]),
    )


def stack(*shape, stored="plain", seed=0):
    experts, n, k = shape
    w = normal(*shape, seed=seed) / k**0.5
    if stored == "plain":
        return w
    grid = (-(-n // 128), -(-k // 128)) if stored == "block" else (n, 1)
    codes = (w * 400).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.exp(normal(experts, *grid, seed=seed + 1)) / 400)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_is_that_of_transformers_to_the_bit(dtype):
    part, x = block(dtype), normal(50, H, dtype=dtype)
    logits, weights, experts = part.gate(x)
    got_weights, got_experts = route(logits, K)
    assert got_weights.dtype == dtype
    assert torch.equal(got_weights, weights)
    assert torch.equal(got_experts, experts)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, 0.0)])
def test_the_experts_are_those_of_transformers(dtype, bound):
    """To the bit in bfloat16; in float32 many rows are multiplied by another BLAS than torch's."""
    part, x = block(dtype), normal(50, H, dtype=dtype)
    _, weights, experts = part.gate(x)
    got = moe_experts(x, part.experts.gate_up_proj, part.experts.down_proj, weights, experts)
    assert distance(got, part.experts(x, experts, weights)) <= bound


def test_few_tokens_have_experts_of_transformers_to_the_bit():
    part, x = block(), normal(FEW - 1, H)
    _, weights, experts = part.gate(x)
    got = moe_experts(x, part.experts.gate_up_proj, part.experts.down_proj, weights, experts)
    assert torch.equal(got, part.experts(x, experts, weights))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_the_block_is_that_of_transformers(dtype, bound):
    part, x = block(dtype), normal(50, H, dtype=dtype)
    assert distance(moe_block(x, weights_of(part), K), part(x[None])[0]) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_absorbed_shared_expert_gives_the_same_sum(dtype):
    """Its term is the last of the sum in both."""
    weights, x = weights_of(block(dtype, shared=F)), normal(50, H, dtype=dtype)
    separate, one_stack = moe_block(x, weights, K), moe_block(x, absorbed(weights), K)
    assert distance(one_stack, separate) < (FLOAT32 if dtype == torch.float32 else BFLOAT16)


def test_swapped_gate_and_up_are_seen():
    part, x = block(), normal(50, H)
    weights = weights_of(part)
    for name in ("gate_up", "shared_gate_up"):
        swapped = getattr(weights, name).roll(getattr(weights, name).shape[-2] // 2, -2)
        got = moe_block(x, dataclasses.replace(weights, **{name: swapped}), K)
        assert distance(got, part(x[None])[0]) > 1e4 * FLOAT32


def test_weights_that_are_not_renormalised_are_seen():
    part, x = block(), normal(50, H)
    logits, weights, experts = part.gate(x)
    raw = logits.softmax(-1).gather(1, experts)
    args = x, part.experts.gate_up_proj, part.experts.down_proj
    right = part.experts(x, experts, weights)
    assert distance(moe_experts(*args, raw, experts), right) > 1e5 * FLOAT32
    assert distance(moe_experts(*args, *route(logits, K)), right) < FLOAT32


def test_a_shared_expert_of_the_routed_size_is_seen():
    part, x = block(), normal(50, H)
    weights = weights_of(part)
    gate, up = weights.shared_gate_up.chunk(2)
    cut = dataclasses.replace(
        weights,
        shared_gate_up=torch.cat([gate[:F], up[:F]]),
        shared_down=weights.shared_down[:, :F].contiguous(),
    )
    assert distance(moe_block(x, cut, K), part(x[None])[0]) > 1e4 * FLOAT32


def test_only_experts_with_tokens_are_asked_for():
    class Reader:
        def __init__(self, weights):
            self.weights, self.asked = weights, []

        def __getitem__(self, expert):
            self.asked.append(expert)
            return self.weights[expert]

    gate_up, down = Reader(stack(E, 2 * F, H)), Reader(stack(E, H, F))
    experts = torch.tensor([[5, 0], [2, 5]])
    moe_experts(normal(2, H), gate_up, down, torch.full((2, 2), 0.5), experts)
    assert gate_up.asked == down.asked == [0, 2, 5]


@pytest.mark.parametrize("stored", ["plain", "block", "channel"])
@pytest.mark.parametrize("tokens", [2, 9, 40])
def test_the_expert_kernels_sum_what_the_reference_sums(tokens, stored, interpreter):
    """Row kernels up to 8 tokens, tiles above; 70 rows of each half cross a block of scales."""
    inner = 20 if tokens < 9 else 70
    gate_up = stack(4, 2 * inner, 130, stored=stored)
    down = stack(4, 130, inner, stored=stored, seed=2)
    x = normal(tokens, 130)
    weights, experts = route_reference(normal(tokens, 4, seed=5), 2)
    got = moe_experts(x, gate_up, down, weights, experts)
    expected = moe_experts_reference(x, gate_up, down, weights, experts)
    assert distance(got, expected) < FLOAT32


@pytest.mark.parametrize("stored", ["block", "channel"])
def test_the_kernels_quantise_activations_as_the_reference(stored, interpreter, monkeypatch):
    """With the codes of torch, for the interpreter's own are wrong where they are rounded."""

    def quantise(x, group):
        codes, scale = quantize_rows_reference(x, group)
        return codes, scale.T.contiguous().T

    monkeypatch.setattr(tiles, "quantize_rows", quantise)
    gate_up = dataclasses.replace(stack(4, 280, 150, stored=stored), dynamic=True)
    down = dataclasses.replace(stack(4, 150, 140, stored=stored, seed=2), dynamic=True)
    x = normal(20, 150)
    weights, experts = route_reference(normal(20, 4, seed=5), 2)
    got = moe_experts(x, gate_up, down, weights, experts)
    expected = moe_experts_reference(x, gate_up, down, weights, experts)
    # a last-bit difference in an inner activation can move its code by one step of an eighth
    assert distance(got, expected) < 1e-3
    exact = dataclasses.replace(gate_up, dynamic=False), dataclasses.replace(down, dynamic=False)
    assert distance(moe_experts_reference(x, *exact, weights, experts), expected) > 1e-2


def test_the_block_runs_on_kernels(interpreter):
    part, x = block(shared=F), normal(9, H)
    expected = part(x[None])[0]
    assert distance(moe_block(x, weights_of(part), K), expected) < FLOAT32
    assert distance(moe_block(x, absorbed(weights_of(part)), K), expected) < FLOAT32


def test_a_single_token_takes_its_norm_and_residual_along(interpreter):
    """With the shared expert in the stack in three kernels, else as a block."""
    part, x, norm = block(shared=F), normal(1, H) * 3, normal(H, seed=4) * 0.1
    expected = x + part(rmsnorm_reference(x, norm, 1e-6)[None])[0]
    for weights in (weights_of(part), absorbed(weights_of(part))):
        assert distance(moe_row(x, norm, 1e-6, weights, K), expected) < FLOAT32


@pytest.mark.parametrize(
    ("stored", "hidden", "inner", "part"),
    [("plain", 40, 4, 16), ("channel", 40, 6, 64), ("block", 130, 4, 128), ("block", 16, 68, 16)],
)
def test_a_single_token_finds_its_experts_and_their_scales(
    stored, hidden, inner, part, interpreter, monkeypatch
):
    """Two of three experts and the shared one; gate and up in different blocks of scales."""
    monkeypatch.setattr(row, "_PART", part)
    x, norm, router = normal(1, hidden) * 3, normal(hidden, seed=4) * 0.1, normal(4, hidden, seed=5)
    gate_up = stack(4, 2 * inner, hidden, stored=stored)
    down = stack(4, hidden, inner, stored=stored, seed=2)
    weights, normed = MoeWeights(router, gate_up, down), rmsnorm_reference(x, norm, 1e-6)
    chosen = route_absorbed_reference(normed @ router.T, 2)
    expected = x + moe_experts_reference(normed, gate_up, down, *chosen)
    assert distance(moe_row(x, norm, 1e-6, weights, 2), expected) < FLOAT32


def test_tiles_of_codes_find_the_scales_of_tokens_and_weights(interpreter):
    """To the interpreter's own cast: it cuts off, and halves what rounds up to a power of two."""
    gate_up = dataclasses.replace(stack(4, 512, 256, stored="block"), dynamic=True)
    down = dataclasses.replace(stack(4, 256, 256, stored="block", seed=2), dynamic=True)
    x = normal(40, 256) * torch.exp2(-(torch.arange(40)[:, None] % 7).float())
    weights, experts = route_reference(normal(40, 4, seed=5), 2)
    got = moe_experts(x, gate_up, down, weights, experts)
    expected = moe_experts_reference(x, gate_up, down, weights, experts)
    rows = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert rows.max() < 0.25
    undynamic = [dataclasses.replace(w, dynamic=False) for w in (gate_up, down)]
    assert distance(moe_experts(x, *undynamic, weights, experts), got) > 1e-3


def test_the_router_scores_many_tokens_alike():
    """Also with what lies behind it, for cuBLAS, be it no number."""
    x, router = normal(300, H), normal(E, H, seed=1)
    behind = torch.full((E + 8, H), torch.nan)
    behind[:E] = router
    for score, given in (
        (router_logits, router),
        (padded_logits, router),
        (padded_logits, behind[:E]),
    ):
        assert score(x, given).shape == (300, E)
        assert distance(score(x, given), x @ router.T) < FLOAT32


def test_a_router_is_copied_only_where_there_is_no_room_behind_it():
    for rows in (7, 8, 9):
        router = normal(rows, H)
        roomy = with_room(router)
        assert torch.equal(roomy, router)
        assert with_room(roomy).data_ptr() == roomy.data_ptr()
        assert (roomy.data_ptr() == router.data_ptr()) == (rows == 8)
        whole = in_eights(roomy)
        assert whole.shape == (rows + -rows % 8, H)
        assert not whole[rows:].any()
