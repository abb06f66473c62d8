"""The definition: what E4M3 codes and their scales are, without the compiled loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.errors import QuantError
from quant.fp8.reference import expand
from quant.measure import bound
from tests.fp8_weights import dequantize_block, dequantize_channel, quantize_block, quantize_channel

MODES = ("pow2", "float32", "bfloat16")
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def random_weight(n, k, seed, spread=4.0):
    """Normal weights, each 128x128 block with an exponent of its own."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=draw)
    exponent = torch.randn(-(-n // 128), -(-k // 128), generator=draw) * spread
    return w * expand(exponent.exp2(), (128, 128), w.shape)


def all_bfloat16_up_to_448():
    positive = torch.arange(0x43E0 + 1, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.cat([positive, -positive])[None]


def nearest_code(x):
    """The code of the nearest E4M3 value, ties to the even code, by looking at all of them."""
    above = torch.searchsorted(E4M3, x.abs().double()).clamp(1, 126)
    below = above - 1
    up, down = E4M3[above] - x.abs().double(), x.abs().double() - E4M3[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code + 128 * torch.signbit(x)).to(torch.uint8)


def test_every_bfloat16_gets_the_nearest_code():
    w = all_bfloat16_up_to_448()
    codes, scale = quantize_channel(w)
    assert scale.item() == 1.0
    assert torch.equal(codes.view(torch.uint8), nearest_code(w))


@settings(deadline=None)
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**16),
    mode=st.sampled_from(MODES),
)
def test_error_is_within_half_a_step(n, k, seed, mode):
    w = random_weight(n, k, seed)
    codes, scale = quantize_block(w, mode)
    error = (w - dequantize_block(codes, scale)).double().abs()
    assert (error <= bound(w, expand(scale, (128, 128), w.shape))).all()
    # Codes belong to the scale that is stored: half a step, without the slack for a rounded one.
    step = expand(scale, (128, 128), w.shape).double() * 2.0**-10
    saturated = codes.float().abs() == 448
    assert (error <= (w.double().abs() * 2.0**-4).maximum(step) * (1 + 1e-6))[~saturated].all()


@settings(deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 200), seed=st.integers(0, 2**16))
def test_what_was_decoded_is_encoded_without_loss(n, k, seed):
    decoded = dequantize_block(*quantize_block(random_weight(n, k, seed)))
    assert torch.equal(dequantize_block(*quantize_block(decoded)), decoded)


@settings(deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 200), seed=st.integers(0, 2**16))
def test_rounding_pow2_scales_to_ue8m0_changes_nothing(n, k, seed):
    codes, scale = quantize_block(random_weight(n, k, seed, spread=20.0))
    ue8m0 = scale.float().to(torch.float8_e8m0fnu)
    assert torch.equal(dequantize_block(codes, ue8m0), dequantize_block(codes, scale))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448.0, 1.0),
        (449.0, 2.0),
        (447.0, 1.0),
        (224.0, 0.5),
        (1.75 * 2.0**-40, 2.0**-48),
        (2.0**-130, 2.0**-126),
        (3.3895313892515355e38, 2.0**120),
        (0.0, 1.0),
    ],
)
def test_pow2_scale_is_the_smallest_power_of_two_that_holds_amax(amax, scale):
    _, stored = quantize_block(torch.tensor([[0.0, -amax]]))
    assert stored.dtype == torch.bfloat16
    assert stored.item() == scale


def test_bfloat16_scale_is_rounded_before_the_codes_are_taken():
    w = torch.full((1, 3), 300.0)
    codes, scale = quantize_block(w, "bfloat16")
    assert scale.item() == torch.tensor(300.0 / 448).bfloat16().item()
    assert torch.equal(codes, (w / scale.float()).clamp(max=448).to(torch.float8_e4m3fn))


def test_float32_scale_is_kept_in_float32_and_fills_the_range():
    codes, scale = quantize_block(random_weight(130, 257, seed=0), "float32")
    assert scale.dtype == torch.float32
    assert scale.shape == (2, 3)
    assert (codes[:128, :128].float().abs() == 448).any()


def test_zeros_keep_their_sign_and_get_scale_one():
    codes, scale = quantize_block(torch.tensor([[0.0, -0.0]]))
    assert codes.view(torch.uint8).tolist() == [[0x00, 0x80]]
    assert scale.item() == 1.0


def test_rows_have_scales_of_their_own():
    w = random_weight(5, 131, seed=1)
    codes, scale = quantize_channel(w, "float32")
    assert scale.shape == (5, 1)
    assert torch.allclose(scale[:, 0], w.abs().amax(1) / 448)
    row, row_scale = quantize_channel(w[3:4], "float32")
    assert torch.equal(row.view(torch.uint8), codes[3:4].view(torch.uint8))
    assert torch.equal(row_scale, scale[3:4])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu]
)
def test_scales_of_other_tools_and_stacks_of_experts_are_decoded(dtype):
    codes = torch.randint(0, 127, (3, 130, 140), dtype=torch.uint8).view(torch.float8_e4m3fn)
    blocks = torch.tensor([0.5, 2.0, 4.0]).repeat(4).view(3, 2, 2).to(dtype)
    decoded = dequantize_block(codes, blocks)
    assert torch.equal(
        decoded[2, 128:, 128:], codes[2, 128:, 128:].float() * blocks[2, 1, 1].float()
    )
    rows = torch.ones(3, 130, 1).to(dtype)
    assert torch.equal(dequantize_channel(codes, rows), codes.float())


def test_a_scale_of_another_grid_is_refused():
    codes, scale = quantize_block(torch.ones(256, 256))
    with pytest.raises(QuantError, match=r"shape \[2, 1\],\n  expected \[2, 2\]"):
        dequantize_block(codes, scale[:, :1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_its_place(bad):
    w = torch.ones(7, 9)
    w[3, 5:7] = bad
    with pytest.raises(QuantError, match=r"2 of 63 weights .* first at \[3, 5\]"):
        quantize_block(w)
