from __future__ import annotations

import pytest
import torch

from runtime.kernels.encode.rows import Codes, quantize_rows_reference
from runtime.kernels.linear.rows import (
    coded_parts,
    coded_rows,
    rows_linear,
    rows_parts,
    rows_products,
)
from runtime.kernels.linear.rows_gated import rows_gated
from runtime.kernels.linear.rows_tile import Tiles
from runtime.kernels.linear.weight import Fp8Weight, dequant_reference
from runtime.kernels.norm.rms import Parts, add_rmsnorm, add_rmsnorm_reference
from tests.runtime.kernels.linear.stored import distance, normal, weight

# Sums of up to 1100 products in another order: sqrt(1100) * 2^-24.
FLOAT32 = 2e-6
EPS = 1e-6
CODED = ["block", "channel"]
# less than a step; beyond one tile of rows, ragged steps; all rows, whole steps
SHAPES = [(9, 7, 30), (33, 140, 600), (17, 33, 1100), (64, 40, 1024)]


def codes_of(x, stored):
    """Return codes of x, rows in sixteens of which the further ones hold NaN, and their values."""
    group = 128 if stored == "block" else x.shape[1]
    codes, scale = quantize_rows_reference(x, group)
    height = -(-x.shape[0] // 16) * 16
    room = torch.full((height, x.shape[1]), float("nan")).to(codes.dtype)
    room[: x.shape[0]] = codes
    scales = torch.full((scale.shape[1], height), float("nan"))
    scales[:, : x.shape[0]] = scale.T
    exact = codes.double() * scale.double().repeat_interleave(group, 1)[:, : x.shape[1]]
    return Codes(room, scales.T), exact


def exact(x, w):
    if isinstance(w, Fp8Weight):
        w = dequant_reference(w.codes, w.scale.double(), torch.float64)
    return x.double() @ w.double().T


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_rows_are_multiplied(m, n, k, interpreter):
    x, w = normal(m, k), weight(n, k, "plain", seed=1)
    assert distance(rows_linear(x, w), exact(x, w)) < FLOAT32


def test_rows_may_be_apart_and_nothing_else_is_read(interpreter):
    """The columns between the rows of x, and the rows after the last, hold NaN."""
    whole = torch.full((64, 700), float("nan"))
    whole[:19, :600] = normal(19, 600)
    x, w = whole[:19, :600], weight(40, 600, "plain", seed=1)
    assert distance(rows_linear(x, w), exact(x, w)) < FLOAT32


@pytest.mark.parametrize("stored", CODED)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_codes_are_multiplied(m, n, k, stored, interpreter):
    (codes, x), w = codes_of(normal(m, k), stored), weight(n, k, stored, seed=1)
    assert distance(coded_rows(codes, w, torch.float32)[:m], exact(x, w)) < FLOAT32


@pytest.mark.parametrize("stored", ["plain", *CODED])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_second_weight_takes_the_rows_themselves(m, n, k, stored, interpreter):
    x, second = normal(m, k), weight(18, k, "plain", seed=5)
    codes, coded = (None, x) if stored == "plain" else codes_of(x, stored)
    weights = weight(n, k, stored, seed=1), second
    expected = exact(coded, weights[0]), exact(x, second)
    for got, wanted in zip(rows_products(x, *weights, codes=codes), expected, strict=True):
        assert distance(got, wanted) < FLOAT32


@pytest.mark.parametrize("stored", ["plain", *CODED])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_parts_are_summed_by_the_norm(m, n, k, stored, interpreter):
    x, w, residual, norm = normal(m, k), weight(n, k, stored, seed=1), normal(m, n), normal(n)
    codes, coded = (None, x) if stored == "plain" else codes_of(x, stored)
    parts = rows_parts(x, w) if codes is None else coded_parts(codes, w, x)
    assert isinstance(parts, Parts)
    steps = -(-k // 128)
    assert len(parts.sums) == -(-steps // -(-steps // 4))
    expected = add_rmsnorm_reference(exact(coded, w), residual.double(), norm.double(), EPS)
    for got, wanted in zip(add_rmsnorm(parts, residual, norm, EPS), expected, strict=True):
        assert distance(got, wanted) < FLOAT32


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gate_and_up_are_multiplied_by_one_kernel(m, n, k, interpreter):
    x, w = normal(m, k), weight(2 * n, k, "plain", seed=1)
    gate, up = exact(x, w).chunk(2, -1)
    assert distance(rows_gated(x, w), torch.nn.functional.silu(gate) * up) < FLOAT32


@pytest.mark.parametrize(
    ("n", "beside", "most_parts", "tiles"),
    [
        (34816, 0, 1, (128, 1, 272)),  # three on a multiprocessor
        (16384, 0, 1, (128, 1, 128)),
        (16384, 6, 1, (64, 1, 262)),  # 134 would be two more than the multiprocessors of an H200
        (9216, 0, 1, (64, 1, 144)),
        (5120, 0, 4, (128, 3, 120)),
        (1024, 0, 4, (32, 4, 128)),
        (257, 0, 1, (16, 1, 17)),
    ],
)
def test_programs_fill_the_multiprocessors_and_few_are_left_over(n, beside, most_parts, tiles):
    assert Tiles.of(n, beside, most_parts) == tiles


def test_without_triton_the_references_serve():
    x, w = normal(12, 40), weight(18, 40, "plain", seed=1)
    gate, up = rows_linear(x, w).chunk(2, -1)
    assert distance(rows_linear(x, w), exact(x, w)) < FLOAT32
    assert torch.equal(rows_parts(x, w), rows_linear(x, w))
    assert torch.equal(rows_gated(x, w), torch.nn.functional.silu(gate) * up)


def test_fp8_weights_without_codes_are_refused(interpreter):
    with pytest.raises(AssertionError, match="FP8 weights take codes"):
        rows_linear(normal(12, 256), weight(18, 256, "block"))


def on_gpu(w):
    if isinstance(w, Fp8Weight):
        return Fp8Weight(w.codes.cuda(), w.scale.cuda())
    return w.bfloat16().cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", ["plain", *CODED])
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (64, 5120, 2048), (50, 257, 17408)])
def test_compiled_kernels_are_exact_to_bfloat16(m, n, k, stored):
    """A bfloat16 has 8 bits: rounding loses 2^-8 of a number at most.

    The tensor cores cut a sum to float32 once for 16 products, that of 128 codes to 14 bits, whose
    largest product may be 16 times as large as most.
    """
    x, w, second = normal(m, k).bfloat16(), weight(2 * n, k, stored), weight(18, k, "plain")
    codes, coded = (None, x) if stored == "plain" else codes_of(x, stored)
    given, (w_gpu, second_gpu) = x.cuda(), (on_gpu(w), on_gpu(second))
    codes = None if codes is None else Codes(codes.codes.cuda(), codes.scale.T.cuda().T)
    if codes is None:
        w = w.bfloat16()
    got = rows_products(given, w_gpu, second_gpu, codes=codes)
    product = exact(coded, w)
    assert distance(got[0].cpu(), product) < 2**-8
    assert distance(got[1].cpu(), exact(x, second.bfloat16())) < 2**-8
    parts = rows_parts(given, w_gpu) if codes is None else coded_parts(codes, w_gpu, given)
    bound = max(FLOAT32, k / 16 * 2**-23) if codes is None else 2**-10
    assert distance(parts.sums.sum(0).cpu(), product) < bound
    if codes is None:
        gate, up = product.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        assert distance(rows_gated(given, w_gpu).cpu(), expected) < 2**-7
