"""The compiled loops against the definition: codes, scales and values to the byte."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import numba_ops
from quant.errors import QuantError
from quant.fp8 import cpu as fp8_cpu
from quant.fp8 import reference as fp8

MODES = ("pow2", "float32", "bfloat16")
COUNTS = ("saturated", "zeros", "zero_rows", "outside", "count")


def any_bits(n, k, draw):
    """Finite bfloat16 of every exponent, subnormals and both zeros included."""
    bits = torch.randint(0, 0x7F80, (n, k), generator=draw, dtype=torch.int16)
    return bits.view(torch.bfloat16) * torch.randint(0, 2, (n, k), generator=draw).mul(2).sub(1)


def normal(n, k, draw):
    return torch.randn(n, k, generator=draw)


def spread(n, k, draw):
    """Exponents that reach from the largest code to far below the smallest."""
    return normal(n, k, draw) * normal(n, k, draw).mul(6).exp2()


def tiny(n, k, draw):
    """Weights around the smallest normal float32, where scales are clamped."""
    return spread(n, k, draw) * 2.0**-118


def sparse(n, k, draw):
    """Blocks of zeros, negative ones among them."""
    w = normal(n, k, draw) * (torch.rand(n, k, generator=draw) < 0.01)
    w[:128] *= -0.0
    return w


weights = st.builds(
    lambda kind, n, k, seed, dtype: kind(n, k, torch.Generator().manual_seed(seed)).to(dtype),
    kind=st.sampled_from([any_bits, normal, spread, tiny, sparse]),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
blocks = st.sampled_from([(128, 128), (1, 384)])


def assert_same_bytes(a, b):
    assert a.dtype == b.dtype
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same_error(fast, plain, w):
    """Counts are equal; a lane rounds each of its terms twice and each of its additions once."""
    terms = -(-w.shape[-1] // 128)
    for name in COUNTS:
        assert getattr(fast, name) == getattr(plain, name), name
    relative, lost = (terms + 2) * 2.0**-24, plain.sum_sq * 2.0**-100
    for name in ("sum_sq_error", "sum_sq", "sum_sq_q"):
        assert getattr(fast, name) == pytest.approx(getattr(plain, name), rel=relative, abs=lost)
    sums = plain.sum_sq_error + plain.sum_sq + plain.sum_sq_q
    assert fast.sum_dot == pytest.approx(plain.sum_dot, abs=sums * relative)
    largest = float(w.float().abs().max())
    assert fast.max_abs == pytest.approx(plain.max_abs, rel=0, abs=largest * 2.0**-126)


@settings(deadline=None, max_examples=150)
@given(w=weights, block=blocks, mode=st.sampled_from(MODES))
def test_loops_agree_with_the_definition(w, block, mode):
    codes, scale = fp8_cpu.quantize(w, block, mode)
    plain_codes, plain_scale = fp8.quantize(w, block, mode)
    assert_same_bytes(codes, plain_codes)
    assert_same_bytes(scale, plain_scale)
    decoded = fp8.dequantize(codes, scale, block)
    assert_same_bytes(fp8_cpu.dequantize(codes, scale, block), decoded)
    in_bfloat16 = fp8_cpu.dequantize(codes, scale, block, torch.bfloat16)
    assert_same_bytes(in_bfloat16, decoded.bfloat16())
    error = fp8_cpu.compare(w, codes, scale, block)
    assert_same_error(error, fp8.compare(w, codes, scale, block), w)
    # Near the end of float32, a weight may be rounded to a value beyond it.
    assert error.outside == decoded.isinf().sum()


@settings(deadline=None)
@given(n=st.integers(1, 300), k=st.integers(1, 300), seed=st.integers(0, 2**16), block=blocks)
def test_loops_see_the_same_damage(n, k, seed, block):
    draw = torch.Generator().manual_seed(seed)
    w = normal(n, k, draw).bfloat16()
    codes, scale = fp8.quantize(w, block, "float32")
    bits = codes.view(torch.uint8)
    bits[:: 1 + seed % 7] = torch.randint(0, 127, (k,), generator=draw, dtype=torch.uint8)
    bits[-1] = 0x80
    codes = bits.view(torch.float8_e4m3fn)
    assert_same_error(
        fp8_cpu.compare(w, codes, scale, block), fp8.compare(w, codes, scale, block), w
    )


@pytest.mark.parametrize("exponent", [-133, -127, -120, -111, -110, -60, 0, 60, 119, 127])
def test_every_bfloat16_is_rounded_alike_under_every_kind_of_scale(exponent):
    bits = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    top = torch.tensor([2.0]).pow(exponent).bfloat16()
    w = torch.cat([top, bits[bits <= top], -bits[bits <= top]])[None]
    block = (1, w.shape[1])
    assert_same_bytes(fp8_cpu.quantize(w, block, "pow2")[0], fp8.quantize(w, block, "pow2")[0])


@pytest.mark.parametrize("take", [lambda w: w.T, lambda w: w[3:200:2], lambda w: w[:, 5:190]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_views_and_other_types_are_taken(take, dtype):
    w = take(normal(201, 207, torch.Generator().manual_seed(0)).to(dtype))
    codes, scale = fp8_cpu.quantize(w, (128, 128), "bfloat16")
    plain_codes, plain_scale = fp8.quantize(w, (128, 128), "bfloat16")
    assert_same_bytes(codes, plain_codes)
    assert_same_bytes(scale, plain_scale)


def test_stacks_of_experts_are_compared_and_decoded():
    w = normal(4 * 256, 130, torch.Generator().manual_seed(0)).bfloat16()
    codes, scale = fp8_cpu.quantize(w, (128, 128), "pow2")
    stacks = w.view(4, 256, 130)[:, :200], codes.view(4, 256, 130)[:, :200], scale.view(4, 2, 2)
    decoded = fp8_cpu.dequantize(*stacks[1:], (128, 128))
    assert torch.equal(decoded, fp8.dequantize(*stacks[1:], (128, 128)))
    assert_same_error(
        fp8_cpu.compare(*stacks, (128, 128)), fp8.compare(*stacks, (128, 128)), stacks[0]
    )


def test_sums_are_added_lane_by_lane_in_one_order_only():
    """No fused multiply-add, no vector width, no thread may show in the last bit."""
    w = spread(3, 128 * 37, torch.Generator().manual_seed(0))
    w[:, 0] = 2.0**40  # the unit of every row
    codes, scale = fp8.quantize(w, (1, w.shape[1]), "pow2")
    decoded = fp8.dequantize(codes, scale, (1, w.shape[1]))
    total = np.zeros(128)
    for row in ((w - decoded) * 2.0**-40).view(3, 37, 128).numpy():
        lanes = np.zeros(128, np.float32)
        for terms in row:
            lanes += terms * terms
        total += lanes.astype(np.float64) * 2.0**80
    in_order = 0.0
    for lane in total:
        in_order += float(lane)
    assert fp8_cpu.compare(w, codes, scale, (1, w.shape[1])).sum_sq_error == in_order


def test_threads_change_nothing():
    w = normal(512, 300, torch.Generator().manual_seed(0)).bfloat16()
    codes, scale = fp8_cpu.quantize(w, (128, 128), "pow2")

    def part(i):
        rows = slice(128 * i, 128 * (i + 1))
        stored = fp8_cpu.quantize(w[rows], (128, 128), "pow2")
        return *stored, fp8_cpu.compare(w[rows], *stored, (128, 128))

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(part, range(4)))
    assert_same_bytes(torch.cat([p[0] for p in parts]), codes)
    assert_same_bytes(torch.cat([p[1] for p in parts]), scale)
    assert [asdict(p[2]) for p in parts] == [asdict(part(i)[2]) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(dtype, bad):
    w = torch.zeros(200, 200, dtype=dtype)
    w[199, 130] = bad
    with pytest.raises(QuantError, match=r"1 of 40000 weights .* first at \[199, 130\]"):
        fp8_cpu.quantize(w, (128, 128), "pow2")


@pytest.mark.parametrize("broken", ["weight", "code", "scale"])
def test_what_is_not_finite_is_outside_when_compared(broken):
    w = torch.ones(130, 130)
    codes, scale = fp8.quantize(w, (128, 128), "float32")
    if broken == "weight":
        w[0, 0] = float("nan")
    elif broken == "code":
        codes.view(torch.uint8)[0, 0] = 0x7F
    else:
        scale[1, 1] = float("inf")
    error = fp8_cpu.compare(w, codes, scale, (128, 128))
    assert error.outside == (4 if broken == "scale" else 1)
    assert np.isnan(error.relative_rms) or np.isinf(error.relative_rms)


def test_codes_of_nan_are_decoded_as_nan():
    codes = torch.tensor([[0x7F, 0xFF, 0x7E]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.bfloat16):
        decoded = fp8_cpu.dequantize(codes, torch.ones(1, 1), (128, 128), dtype)
        assert decoded.isnan().tolist() == [[True, True, False]]


def test_loops_compile_where_no_folder_can_hold_a_cache(monkeypatch):
    compile_now = numba_ops._njit

    def without_locator(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_now(**options)

    monkeypatch.setattr(numba_ops, "_njit", without_locator)
    assert numba_ops.loop(lambda x: x + 1)(1) == 2
