from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from runtime.kernels.encode.rows import Codes, quantize_rows
from runtime.kernels.norm import gated
from runtime.kernels.norm.gated import gated_rmsnorm, gated_rmsnorm_codes, gated_rmsnorm_reference
from runtime.kernels.norm.rms import add_rmsnorm, add_rmsnorm_reference, rmsnorm, rmsnorm_reference

EPS = 1e-6
# A sum of H squares in any order, one rsqrt and three products: a few units of 2^-24.
FLOAT32 = 1e-6


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got, expected):
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers_to_the_bit(dtype):
    x, w = normal(7, 37, dtype=dtype), normal(37, seed=1, dtype=dtype)
    module = qwen.Qwen3_5RMSNorm(37, eps=EPS)
    module.weight.data = w
    assert torch.equal(rmsnorm(x, w, EPS), module(x))


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_the_gated_norm_is_that_of_transformers_to_the_bit(dtype, weight_dtype):
    """The hub stores the factor in float32 or in bfloat16: the product keeps the wider dtype."""
    o, z = normal(5, 3, 20, dtype=dtype), normal(5, 3, 20, seed=1, dtype=dtype)
    module = qwen.Qwen3_5RMSNormGated(20, eps=EPS)
    module.weight.data = normal(20, seed=2, dtype=weight_dtype)
    assert torch.equal(gated_rmsnorm(o, z, module.weight.data, EPS), module(o, z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_add_rounds_the_residual_before_it_is_normed(dtype):
    x, residual = normal(4, 33, dtype=dtype), normal(4, 33, seed=1, dtype=dtype)
    w = normal(33, seed=2, dtype=dtype)
    y, total = add_rmsnorm(x, residual, w, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rmsnorm(x + residual, w, EPS))


def test_float32_is_close_to_float64():
    x, w = normal(9, 1000), normal(1000, seed=1)
    assert distance(rmsnorm(x, w, EPS), rmsnorm(x.double(), w.double(), EPS)) < FLOAT32
    o, z, d = normal(3, 4, 100), normal(3, 4, 100, seed=1), normal(100, seed=2)
    exact = gated_rmsnorm(o.double(), z.double(), d.double(), EPS)
    assert exact.dtype == torch.float64
    assert distance(gated_rmsnorm(o, z, d, EPS), exact) < FLOAT32


@given(scale=st.floats(0.1, 100.0), seed=st.integers(0, 99))
def test_the_norm_does_not_see_the_scale_of_its_input(scale, seed):
    """Up to eps, which is 1e-6 beside a mean square of 0.01 at the least."""
    x, w = normal(3, 50, seed=seed), normal(50, seed=seed + 1)
    assert distance(rmsnorm(x * scale, w, EPS), rmsnorm(x, w, EPS)) < 1e-3


def test_taking_one_kind_of_norm_for_the_other_is_seen():
    """Zero-centred weights are near 0 and plain ones near 1: both mistakes are of order one."""
    x = normal(4, 32)
    near_zero, near_one = 0.1 * normal(32, seed=1), 1 + 0.1 * normal(32, seed=1)
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * near_zero
    assert distance(plain, rmsnorm(x, near_zero, EPS)) > 0.5
    o, z = normal(4, 2, 32), normal(4, 2, 32, seed=2)
    assert (
        distance(gated_rmsnorm(o, z, 1 + near_one, EPS), gated_rmsnorm(o, z, near_one, EPS)) > 0.5
    )


@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (5, 37), (3, 640), (2, 3072)])
@pytest.mark.usefixtures("interpreter")
def test_the_norm_kernels_agree_with_their_references(rows, hidden):
    x, residual = normal(rows, 2 * hidden)[:, :hidden], normal(rows, hidden, seed=1)
    w = normal(hidden, seed=2)
    assert distance(rmsnorm(x, w, EPS), rmsnorm_reference(x, w, EPS)) < FLOAT32
    y, total = add_rmsnorm(x, residual, w, EPS)
    expected_y, expected_total = add_rmsnorm_reference(x, residual, w, EPS)
    assert torch.equal(total, expected_total)
    assert distance(y, expected_y) < FLOAT32


@pytest.mark.parametrize("few", [1 << 20, 0])
@pytest.mark.parametrize(("num_tokens", "num_heads", "d"), [(1, 3, 16), (5, 2, 24), (70, 1, 128)])
@pytest.mark.usefixtures("interpreter")
def test_the_gated_kernel_agrees_with_its_reference(num_tokens, num_heads, d, few, monkeypatch):
    """In small tiles and in large ones."""
    monkeypatch.setattr(gated, "_FEW_NUMBERS", few)
    o = normal(num_tokens, num_heads, d)
    z = normal(num_tokens, num_heads * d + 5, seed=1)[:, 2:-3].unflatten(1, (num_heads, d))
    w = normal(d, seed=2)
    got, expected = gated_rmsnorm(o, z, w, EPS), gated_rmsnorm_reference(o, z, w, EPS)
    assert distance(got, expected) < FLOAT32


@pytest.mark.usefixtures("interpreter")
def test_the_norm_kernel_casts_once():
    """The interpreter truncates to bfloat16, which is within one step, 2^-7, of rounding."""
    x, w = normal(3, 40, dtype=torch.bfloat16), normal(40, seed=1, dtype=torch.bfloat16)
    got, expected = rmsnorm(x, w, EPS).float(), rmsnorm_reference(x, w, EPS).float()
    assert ((got - expected).abs() <= expected.abs() * 2**-7).all()


def assert_codes_of(codes, x):
    """The rows of x quantised on their own, to the bit, in room for a multiple of 16."""
    expected, rows = quantize_rows(x, 128), len(x)
    assert codes.codes.shape == (-(-rows // 16) * 16, x.shape[1])
    assert codes.scale.stride() == (1, len(codes.codes))
    assert torch.equal(codes.codes[:rows].view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(codes.scale[:rows], expected.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (17, 640), (130, 128), (3, 3072)])
@pytest.mark.usefixtures("interpreter")
def test_the_norms_leave_codes_of_what_they_return(rows, hidden, dtype):
    x, residual = normal(rows, 2 * hidden, dtype=dtype)[:, :hidden], normal(rows, hidden, seed=1)
    residual, w = residual.to(dtype), normal(hidden, seed=2, dtype=dtype)
    x[0, :128] = residual[0, :128] = 0
    codes = Codes.room(rows, hidden, x.device)
    y = rmsnorm(x, w, EPS, codes)
    assert torch.equal(y, rmsnorm(x, w, EPS))
    assert_codes_of(codes, y)
    codes = Codes.room(rows, hidden, x.device)
    y, total = add_rmsnorm(x, residual, w, EPS, codes)
    expected_y, expected_total = add_rmsnorm(x, residual, w, EPS)
    assert torch.equal(y, expected_y)
    assert torch.equal(total, expected_total)
    assert_codes_of(codes, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 3), (17, 2), (130, 1)])
@pytest.mark.usefixtures("interpreter")
def test_the_gated_norm_can_leave_codes_alone(num_tokens, num_heads, dtype):
    o = normal(num_tokens, num_heads, 128, dtype=dtype)
    z = normal(num_tokens, num_heads * 128 + 5, seed=1, dtype=dtype)[:, 2:-3]
    z, w = z.unflatten(1, (num_heads, 128)), normal(128, seed=2)
    codes = gated_rmsnorm_codes(o, z, w, EPS)
    assert_codes_of(codes, gated_rmsnorm(o, z, w, EPS).flatten(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "hidden"), [(17, 2048), (300, 5120)])
def test_a_gpu_leaves_the_codes_of_what_the_norms_return(rows, hidden):
    """The gated norm's squares are summed in another order: it may be rounded twice elsewhere."""
    x = normal(rows, hidden, dtype=torch.bfloat16).cuda()
    w = normal(hidden, seed=2, dtype=torch.bfloat16).cuda()
    for norm in (rmsnorm, lambda x, *rest: add_rmsnorm(x, x, *rest)[0]):
        codes = Codes.room(rows, hidden, x.device)
        assert_codes_of(codes, norm(x, w, EPS, codes))
    heads, factor = x.unflatten(1, (-1, 128)), normal(128, seed=3).cuda()
    codes, scale = gated_rmsnorm_codes(heads, heads, factor, EPS)
    y = gated_rmsnorm(heads, heads, factor, EPS).flatten(1).float()
    s = scale[:rows].repeat_interleave(128, 1)
    error = (codes[:rows].float() * s - y).abs()
    rounded = (1 + 2**-6) * y.abs()
    assert (error <= torch.maximum(rounded * 2**-4, s * 2**-10) + y.abs() * 2**-6).all()
