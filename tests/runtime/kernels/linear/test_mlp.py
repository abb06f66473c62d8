from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from runtime.kernels.encode.rows import quantize_rows_reference
from runtime.kernels.linear.mlp import (
    gated_linear,
    gated_linear_reference,
    mlp,
    mlp_reference,
    shared_expert,
    silu_mul,
    silu_mul_quantised,
    silu_mul_reference,
)
from runtime.kernels.linear.weight import Fp8Weight

# Sums of a few hundred products in another order.
FLOAT32 = 1e-6


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def weight(*shape, stored="plain", seed=0):
    w = normal(*shape, seed=seed) / shape[-1] ** 0.5
    if stored == "plain":
        return w
    grid = (-(-shape[0] // 128), -(-shape[1] // 128)) if stored == "block" else (shape[0], 1)
    codes = (w * 400).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.exp(normal(*grid, seed=seed + 1)) / 400)


def module(dtype):
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(hidden_size=40, intermediate_size=56)
    return qwen.Qwen3_5MLP(config, 56).to(dtype).requires_grad_(requires_grad=False)


def stacked(part):
    return torch.cat([part.gate_proj.weight, part.up_proj.weight])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_feed_forward_is_that_of_transformers(dtype):
    """One matrix product for gate and up instead of two: only the order of sums may differ."""
    part, x = module(dtype), normal(6, 40, dtype=dtype)
    got = mlp(x, stacked(part), part.down_proj.weight)
    assert distance(got, part(x)) < (FLOAT32 if dtype == torch.float32 else 2**-8)


def test_swapped_gate_and_up_are_seen():
    part, x = module(torch.float32), normal(6, 40)
    swapped = stacked(part).roll(56, 0)
    assert distance(mlp(x, swapped, part.down_proj.weight), part(x)) > 1e5 * FLOAT32


def test_the_shared_expert_is_gated_by_one_number_per_token():
    part, x, gate = module(torch.float32), normal(6, 40), normal(1, 40, seed=3)
    got = shared_expert(x, stacked(part), part.down_proj.weight, gate)
    assert distance(got, torch.sigmoid(x @ gate.T) * part(x)) < FLOAT32


def test_silu_is_rounded_before_the_product():
    both = normal(5, 64, dtype=torch.bfloat16)
    gate, up = both.chunk(2, -1)
    assert torch.equal(silu_mul(both), torch.nn.functional.silu(gate) * up)


def test_the_elementwise_kernel_crosses_its_block(interpreter):
    both = normal(2, 2 * 1100)
    assert distance(silu_mul(both), silu_mul_reference(both)) < FLOAT32


@pytest.mark.parametrize("stored", ["plain", "block", "channel"])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_kernels_make_gate_and_up_as_the_reference(rows, stored, interpreter):
    """One row in one kernel; 66 rows of each half share no block of scales evenly."""
    x, gate_up = normal(rows, 140), weight(132, 140, stored=stored)
    down = weight(20, 66, stored=stored, seed=2)
    assert distance(gated_linear(x, gate_up), gated_linear_reference(x, gate_up)) < FLOAT32
    assert distance(mlp(x, gate_up, down), mlp_reference(x, gate_up, down)) < FLOAT32


def test_the_product_is_quantised_as_it_leaves(interpreter):
    """To the interpreter's own cast: it cuts off, and halves what rounds up to a power of two."""
    both = normal(21, 2 * 256)
    product = silu_mul_reference(both)
    codes, scale = silu_mul_quantised(both)
    assert codes.shape == (32, 256)
    exact = quantize_rows_reference(product, 128)[1]
    assert distance(scale[:21], exact) < FLOAT32
    decoded = codes[:21].float() * scale[:21].repeat_interleave(128, 1)
    assert distance(decoded, product) < 0.1


def test_a_quantised_feed_forward_costs_what_its_parts_cost(interpreter):
    gate_up = dataclasses.replace(weight(512, 140, stored="block"), dynamic=True)
    down = dataclasses.replace(weight(20, 256, stored="block", seed=2), dynamic=True)
    x = normal(21, 140)
    assert distance(mlp(x, gate_up, down), mlp_reference(x, gate_up, down)) < 0.125


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gates_every_bfloat16():
    """Two roundings of 2^-8 each, one of the other.

    A sigmoid below 2^-126, of a gate below -87.3, may be zero: 89 * 1.5 of these are below 2^-118.
    """
    gate = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).cuda()
    gate = torch.where(gate.isfinite(), gate, 0.0)
    up = torch.full_like(gate, 1.5)
    expected = torch.nn.functional.silu(gate.double()) * 1.5
    expected = expected.clamp(-torch.finfo(gate.dtype).max, torch.finfo(gate.dtype).max)
    got = silu_mul(torch.cat([gate, up])[None])[0].double().clamp(expected.min(), expected.max())
    bound = expected.abs() * (2**-7 + 2**-16) + 2.0**-118
    assert ((got - expected).abs() <= bound).all()
