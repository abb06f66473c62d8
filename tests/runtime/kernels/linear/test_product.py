from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from runtime.kernels.encode.rows import quantize_rows
from runtime.kernels.linear import product
from runtime.kernels.linear.product import (
    codes_for,
    each_linear,
    joined_linear,
    linear,
    linear_fp8_dynamic_reference,
    linear_reference,
    linear_update,
    quantised_linear,
)
from runtime.kernels.linear.weight import (
    Fp8Weight,
    adjacent,
    dequant,
    dequant_reference,
    joined_rows,
    linear_fp8_reference,
)
from runtime.kernels.norm.rms import Parts

SCHEMES = ["block", "channel"]


def linear_fp8(x, codes, scale):
    return linear(x, Fp8Weight(codes, scale))


def linear_fp8_dynamic(x, codes, scale):
    return quantised_linear(x, Fp8Weight(codes, scale))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised(*shape, scheme="block", dtype=torch.float32, seed=0):
    """Codes of every size and scales over two decades, as they stand in a file."""
    *stack, n, k = shape
    codes = (normal(*shape, seed=seed) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = (-(-n // 128), -(-k // 128)) if scheme == "block" else (n, 1)
    return codes, torch.exp(normal(*stack, *grid, seed=seed + 1)).to(dtype) * 0.01


def spelled_out(codes, scale):
    """The weight in float64, element by element."""
    n, k = codes.shape
    rows, cols = torch.arange(n)[:, None], torch.arange(k)[None, :]
    at = (rows, cols * 0) if scale.shape == (n, 1) else (rows // 128, cols // 128)
    return codes.double() * scale.double()[at]


def summing_error(x, weight):
    """Two float32 sums of K products in any order: K * 2^-24 of the sum of sizes for each."""
    sizes = x.double().abs() @ weight.double().abs().T
    return 2 * (x.shape[1] + 2) * 2**-24 * sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(n=st.integers(1, 300), k=st.integers(1, 300), channel=st.booleans(), seed=st.integers(0, 99))
def test_a_weight_is_its_codes_times_their_scale(dtype, n, k, channel, seed):
    scheme = "channel" if channel else "block"
    codes, scale = quantised(n, k, scheme=scheme, dtype=dtype, seed=seed)
    exact = spelled_out(codes, scale)
    assert torch.equal(dequant(codes, scale, torch.float64), exact.float().double())
    assert torch.equal(dequant(codes, scale, torch.bfloat16), exact.float().bfloat16())


def test_dividing_by_weight_scale_inv_is_seen():
    codes, scale = quantised(130, 140)
    divided = codes.float() / scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :140]
    right = dequant(codes, scale, torch.float32)
    assert (divided - right).norm() > 10 * right.norm()
    assert dequant(torch.tensor([[2.0]]).to(codes.dtype), torch.tensor([[0.5]]), scale.dtype) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stack_is_its_experts(scheme):
    codes, scale = quantised(3, 130, 200, scheme=scheme)
    stack = Fp8Weight(codes, scale)
    for expert, whole in enumerate(dequant(codes, scale, torch.float32)):
        one = stack[expert]
        assert torch.equal(dequant(one.codes, one.scale, torch.float32), whole)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 130, 300), (5, 1100, 129)])
def test_a_linear_layer_is_exact_to_the_order_of_its_sum(shape, scheme):
    """1100 outputs are more than the reference takes at a time."""
    m, n, k = shape
    codes, scale = quantised(n, k, scheme=scheme)
    x, weight = normal(m, k), spelled_out(codes, scale)
    assert (
        (linear_fp8(x, codes, scale) - x.double() @ weight.T).abs() <= summing_error(x, weight)
    ).all()


def test_a_weight_rounded_to_bfloat16_is_another_weight():
    codes, scale = quantised(64, 256)
    x = normal(4, 256)
    rounded = x @ dequant(codes, scale, torch.bfloat16).float().T
    exact = spelled_out(codes, scale)
    assert ((rounded - x.double() @ exact.T).abs() > summing_error(x, exact)).any()


def test_bfloat16_is_rounded_once():
    codes, scale = quantised(40, 200)
    x = normal(6, 200).bfloat16()
    assert torch.equal(
        linear_fp8(x, codes, scale), linear_fp8_reference(x.float(), codes, scale).bfloat16()
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_activations_cost_at_most_half_a_step_of_each(scheme):
    """A step of E4M3 is an eighth, and for the smallest codes 2^-9 scales."""
    codes, scale = quantised(50, 300, scheme=scheme)
    x, weight = normal(7, 300), spelled_out(codes, scale)
    smallest = x.abs().amax(1, keepdim=True).double() / 448 * 2**-10
    bound = (x.abs().double() * 2**-4 + smallest) @ weight.abs().T
    exact = x.double() @ weight.T
    error = (linear_fp8_dynamic(x, codes, scale) - exact).abs()
    assert (error <= bound).all()
    assert (error > summing_error(x, weight)).any()


def test_groups_of_128_keep_an_outlier_to_themselves():
    """Block weights go with groups: a token's outlier in another group must not cost anything."""
    codes, scale = quantised(20, 256)
    x = normal(3, 256)
    x[:, 0] = 1e4
    codes[:, :128] = 0
    calm = x.clone()
    calm[:, 0] = 0
    assert torch.equal(linear_fp8_dynamic(x, codes, scale), linear_fp8_dynamic(calm, codes, scale))


@pytest.mark.parametrize("rows", [16, 17])
def test_linear_takes_what_the_weight_asks_for(rows):
    codes, scale = quantised(24, 130)
    x = normal(rows, 130)
    weight_only, dynamic = linear_fp8(x, codes, scale), linear_fp8_dynamic(x, codes, scale)
    assert not torch.equal(weight_only, dynamic)
    expected = dynamic if rows > 16 else weight_only
    assert torch.equal(linear(x, Fp8Weight(codes, scale, dynamic=True)), expected)
    assert torch.equal(linear(x, Fp8Weight(codes, scale)), weight_only)
    assert torch.equal(linear_reference(x, Fp8Weight(codes, scale, dynamic=True), 99), dynamic)


def test_linear_keeps_leading_axes():
    codes, scale = quantised(24, 30)
    x, plain = normal(2, 3, 30), normal(24, 30, seed=1)
    assert torch.equal(linear(x, plain), F.linear(x, plain))
    flat = linear_fp8(x.view(6, 30), codes, scale)
    assert torch.equal(linear(x, Fp8Weight(codes, scale)), flat.view(2, 3, 24))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_dequantising_kernel_gives_the_bits_of_the_reference(scheme, interpreter):
    codes, scale = quantised(2, 130, 200, scheme=scheme)
    got = dequant(codes, scale, torch.float32)
    assert torch.equal(got, dequant_reference(codes, scale, torch.float32))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "shape",
    [(1, 45, 530), (3, 13, 40), (5, 130, 1100), (16, 70, 200), (20, 130, 300), (131, 20, 130)],
)
def test_the_kernels_sum_what_the_reference_sums(shape, scheme, interpreter):
    """One row in registers, up to 16 with K cut in parts (1100 is enough for two), tiles."""
    m, n, k = shape
    codes, scale = quantised(n, k, scheme=scheme, dtype=torch.bfloat16)
    x = normal(m, k)
    bound = summing_error(x, spelled_out(codes, scale))
    error = linear_fp8(x, codes, scale) - linear_fp8_reference(x, codes, scale)
    assert (error.abs() <= bound).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(5, 130, 300), (131, 20, 130)])
def test_the_w8a8_kernel_sums_what_the_reference_sums(shape, scheme, interpreter):
    """On activations that E4M3 holds: the interpreter's cast is wrong where it has to round."""
    m, n, k = shape
    codes, scale = quantised(n, k, scheme=scheme)
    group = 128 if scheme == "block" else k
    x = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(2)) * 32.0
    x[:, ::group] = 448.0
    x *= torch.exp2(torch.arange(m)[:, None] % 5 - torch.arange(k) // group)
    error = linear_fp8_dynamic(x, codes, scale) - linear_fp8_dynamic_reference(x, codes, scale)
    assert (error.abs() <= summing_error(x, spelled_out(codes, scale))).all()


def test_the_kernel_takes_rows_with_a_stride(interpreter):
    codes, scale = quantised(20, 40)
    wide = normal(6, 100)
    for rows in (2, 6):
        x = wide[:rows, 30:70]
        error = linear_fp8(x, codes, scale) - linear_fp8_reference(x, codes, scale)
        assert (error.abs() <= summing_error(x, spelled_out(codes, scale))).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hopper_has_kernels_of_its_own_for_up_to_64_rows(scheme, monkeypatch, interpreter):
    """They sum the same codes in another order, and leave parts of them to the norm."""
    weight, x = Fp8Weight(*quantised(40, 640, scheme=scheme), dynamic=True), normal(20, 640)
    tiled, bound = linear(x, weight), summing_error(x, spelled_out(weight.codes, weight.scale))
    assert torch.equal(linear_update(x, weight), tiled)
    monkeypatch.setattr(product, "capability", lambda gpu: (9, 0))
    update = linear_update(x, weight)
    assert isinstance(update, Parts)
    assert update.sums.shape == (3, 20, 40)
    for got in (linear(x, weight), update.sums.sum(0)):
        assert ((got - tiled).abs() <= bound).all()


def test_a_scale_of_another_grid_is_refused():
    codes, scale = quantised(300, 260)
    with pytest.raises(AssertionError, match=r"\[3, 3\] or per row"):
        Fp8Weight(codes, scale[:2].contiguous())
    with pytest.raises(AssertionError, match="contiguous"):
        Fp8Weight(codes.T, scale)


def test_codes_in_groups_are_for_rows_that_are_multiplied_so(interpreter):
    """More than 16 rows, whole groups of 128, scales of blocks, and a weight that quantises."""
    block, channel = (Fp8Weight(*quantised(20, 256, scheme=s), dynamic=True) for s in SCHEMES)
    assert codes_for(block, normal(17, 256)).codes.shape == (32, 256)
    odd = Fp8Weight(*quantised(20, 300), dynamic=True)
    still = Fp8Weight(block.codes, block.scale)
    others = (channel, 17), (block, 16), (odd, 17), (still, 17), (normal(20, 256), 17)
    for weight, rows in others:
        assert codes_for(weight, normal(rows, weight.shape[1])) is None


def test_without_the_kernels_there_are_no_codes():
    assert codes_for(Fp8Weight(*quantised(20, 256), dynamic=True), normal(17, 256)) is None


def test_codes_of_x_take_its_place_where_the_weight_takes_codes(interpreter):
    x, (codes, scale) = normal(17, 256), quantised(20, 256)
    weight, other = Fp8Weight(codes, scale, dynamic=True), normal(20, 256)
    of_x, nothing = quantize_rows(x, 128, 16), torch.full_like(x, torch.nan)
    assert torch.equal(linear(nothing, weight, of_x), linear(x, weight))
    assert torch.equal(linear(x, other, of_x), linear(x, other))


def test_two_weights_that_lie_together_are_one_product():
    """Sums of 30 products in another order: sqrt(30) * 2^-24."""
    first, second = adjacent(normal(9, 30, seed=1), normal(4, 30, seed=2))
    assert torch.equal(joined_rows(first, second), torch.cat([first, second]))
    x = normal(70, 30)
    apart = each_linear(x, first.clone(), second.clone(), codes=None)
    for got, expected in zip(joined_linear(x, first, second, codes=None), apart, strict=True):
        assert ((got - expected).norm() / expected.norm()).item() < 4e-7


def test_only_floats_of_one_dtype_behind_one_another_are_joined():
    first, second, third = (normal(8, 32, seed=seed) for seed in range(3))
    fp8 = Fp8Weight(first.to(torch.float8_e4m3fn), torch.ones(1, 1))
    for pair in ((fp8, second), (first, second.bfloat16())):
        assert all(x is y for x, y in zip(adjacent(*pair), pair, strict=True))
        assert joined_rows(*pair) is None
    assert joined_rows(first, second) is None
    whole = torch.cat([first, second, third])
    assert joined_rows(whole[:8], whole[16:]) is None
    assert joined_rows(whole[8:16], whole[:8]) is None
    assert joined_rows(whole[:8], whole[8:].view(32, 16)) is None
