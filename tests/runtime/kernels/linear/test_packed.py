from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from runtime.kernels.conditions import WIDEST_WHOLE
from runtime.kernels.linear.packed import (
    E2M1_VALUES,
    packed_int4,
    packed_nvfp4,
    spread_reference,
    unpacked_reference,
)
from runtime.kernels.linear.packed_stream import (
    packed_gated,
    packed_gated_reference,
    packed_normed,
    packed_row,
    packed_row_reference,
)
from runtime.kernels.linear.packed_strips import packed_strip, packed_strips
from runtime.kernels.linear.packed_tiles import (
    packed_linear,
    packed_linear_reference,
    spread,
    unpacked,
)
from runtime.kernels.linear.row import norm_row_linear_reference
from runtime.kernels.norm.rms import rmsnorm
from tests.runtime.models import needs_cuda

# Sums of up to 1280 products in another order: sqrt(1280) * 2^-24.
FLOAT32 = 3e-6
FORMS = ["nvfp4", "32", "128"]
# a chunk and a ragged one; more chunks than a program has slices
WIDTHS = [(272,), (1280,)]
ON_GPU = [(2048, 5120), (1100, 1040), (528, 17408), (512, 512), (12288, 2048), (2048, 4096)]


def stored(form, *shape, seed=0, device="cpu"):
    """Return a packed weight and the same in float32."""
    make = torch.Generator().manual_seed(seed)
    k = shape[-1]
    if form == "nvfp4":
        codes = torch.randint(16, shape, generator=make, dtype=torch.uint8)
        scale = (torch.rand((*shape[:-1], k // 16), generator=make) * 400).to(torch.float8_e4m3fn)
        row = torch.rand(shape[:-1], generator=make) / (400 * k**0.5)
        values = torch.tensor(E2M1_VALUES)[(codes & 7).long()] * torch.where(codes > 7, -1, 1)
        exact = values * scale.float().repeat_interleave(16, -1) * row[..., None]
        return packed_nvfp4(codes.to(device), scale.to(device), row.to(device)), exact
    group = int(form)
    codes = torch.randint(-8, 8, shape, generator=make, dtype=torch.int8)
    scale = torch.randn((*shape[:-1], k // group), generator=make).bfloat16() / k**0.5
    exact = codes.float() * scale.float().repeat_interleave(group, -1)
    return packed_int4(codes.to(device), scale.to(device)), exact


def whole(*shapes):
    """Each form with each shape (..., k) whose K it divides into whole groups."""
    return [
        (form, *shape)
        for form in FORMS
        for shape in shapes
        if form == "nvfp4" or shape[-1] % int(form) == 0
    ]


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("form", "k"), whole((96,), *WIDTHS))
def test_what_was_packed_is_unpacked(form, k):
    weight, exact = stored(form, 3, 5, k)
    assert weight.shape == exact.shape
    assert weight.group == (16 if form == "nvfp4" else int(form))
    assert torch.equal(unpacked_reference(weight), exact)
    assert torch.equal(unpacked_reference(weight[1]), exact[1])


def test_every_scale_of_e4m3_is_kept_and_codes_below_a_scale_of_0_are_0():
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    codes = torch.full((1, 127 * 16), 7, dtype=torch.uint8)
    found = unpacked_reference(packed_nvfp4(codes, every, torch.ones(1)))
    assert torch.equal(found, 6 * every.float().repeat_interleave(16, -1))


@pytest.mark.parametrize("scale", [torch.nan, -1.0])
def test_rows_whose_scales_mean_nothing_are_not_numbers(scale):
    scales = torch.tensor([[1.0, 1.0], [1.0, scale]])
    codes = torch.ones((2, 32), dtype=torch.uint8)
    found = unpacked_reference(packed_nvfp4(codes, scales, torch.ones(2)))
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize(("form", "k"), whole(*WIDTHS))
def test_a_row_is_multiplied_added_and_gated_as_in_the_reference(form, k, interpreter):
    weight, _ = stored(form, 36, k)
    x, residual = normal(1, k), normal(1, 36)
    for r in (None, residual):
        assert distance(packed_row(x, weight, r), packed_row_reference(x, weight, r)) < FLOAT32
    assert distance(packed_gated(x, weight), packed_gated_reference(x, weight)) < FLOAT32


# steps of a warp: four, then two; all chunks of rows that are fewer than a unit has
@pytest.mark.parametrize(
    ("form", "n", "k"), [("nvfp4", 20, 3344), ("32", 20, 1312), ("128", 5, 256)]
)
def test_a_wide_row_is_normed_and_multiplied_step_by_step(form, n, k, interpreter):
    weight, _ = stored(form, n, k)
    x, norm, second = normal(1, k), normal(k) / 8, normal(5, k)
    expected = norm_row_linear_reference(x, norm, 1e-6, weight, second)
    for got, exact in zip(packed_normed(x, norm, 1e-6, weight, second), expected, strict=True):
        assert distance(got, exact) < FLOAT32


# a ragged chunk, two rows of warps; nine chunks, which are more than warps
@pytest.mark.parametrize(
    ("form", "n", "k"), [("nvfp4", 36, 272), ("32", 36, 288), ("nvfp4", 5, 2064)]
)
def test_a_row_is_normed_multiplied_and_added_in_strips(form, n, k, interpreter):
    weight, _ = stored(form, n, k)
    x, norm, residual, second = normal(1, k), normal(k) / 8, normal(1, n), normal(5, k)
    expected = norm_row_linear_reference(x, norm, 1e-6, weight, second)
    for got, exact in zip(packed_strips(x, norm, 1e-6, weight, second), expected, strict=True):
        assert distance(got, exact) < FLOAT32
    added = packed_row_reference(x, weight, residual)
    assert distance(packed_strip(x, weight, residual), added) < FLOAT32


@pytest.mark.parametrize(("form", "k"), whole(*WIDTHS))
def test_rows_are_multiplied_in_tiles_as_in_the_reference(form, k, interpreter):
    weight, exact = stored(form, 36, k)
    x = normal(5, k)
    assert torch.equal(spread(x, weight), spread_reference(x, weight.form[0]))
    assert distance(packed_linear(x, weight), packed_linear_reference(x, weight)) < FLOAT32
    assert torch.equal(unpacked(weight, torch.float32), exact)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("form", "n", "k"), whole(*ON_GPU))
def test_a_gpu_rounds_once(form, n, k):
    """A bfloat16 has 8 bits: rounding loses 2^-8 of a number at most."""
    weight, exact = stored(form, n, k, device="cuda")
    assert torch.equal(unpacked(weight, torch.bfloat16).cpu(), exact.bfloat16())
    for rows in (1, 2, 9, 40, 100):
        x = normal(rows, k).bfloat16()
        expected = x.double() @ exact.double().T
        for multiply in (packed_row, packed_linear)[rows > 1 :]:
            assert distance(multiply(x.cuda(), weight).cpu(), expected) < 2**-8
    if k <= WIDEST_WHOLE:
        x, norm = normal(1, k).bfloat16().cuda(), (normal(k) / 8).bfloat16().cuda()
        normed = rmsnorm(x, norm, 1e-6).double().cpu()
        got = packed_strips(x, norm, 1e-6, weight)[0], packed_strip(x, weight)
        for y, of in zip(got, (normed, x.double().cpu()), strict=True):
            assert distance(y.cpu(), of @ exact.double().T) < 2**-8
    gate, up = (normal(1, k).bfloat16().double() @ exact.double().T).chunk(2, -1)
    got = packed_gated(normal(1, k).bfloat16().cuda(), weight)
    assert distance(got.cpu(), silu(gate) * up) < 0.01
