from __future__ import annotations

import pytest
import torch

from runtime.kernels.linear import few, few_tile
from runtime.kernels.linear.few import few_linear, few_parts, few_products
from runtime.kernels.linear.few_gated import few_gated, few_gated_reference
from runtime.kernels.linear.product import linear_update
from runtime.kernels.linear.weight import Fp8Weight, Stored, dequant_reference
from runtime.kernels.norm.gated import scaled_reference
from runtime.kernels.norm.rms import Parts, add_rmsnorm, add_rmsnorm_reference
from tests.runtime.kernels.linear.stored import STORED, distance, normal, unscaled, weight

# Sums of up to 1100 products in another order: sqrt(1100) * 2^-24.
FLOAT32 = 2e-6
EPS = 1e-6
# less than a slice; beyond one tile of rows and one step of columns; whole steps
SHAPES = [(2, 7, 30), (5, 140, 600), (8, 33, 1100), (3, 40, 1024)]
# early tiles, in whole steps and not; a long sum; no whole line
LARGE = [(8, 5120, 2048), (8, 2100, 4104), (4, 500, 17408), (8, 97, 999)]


def exact(x, w):
    if isinstance(w, Fp8Weight):
        w = dequant_reference(w.codes, w.scale.double(), torch.float64)
    return x.double() @ w.double().T


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_few_rows_are_multiplied(m, n, k, stored, interpreter):
    x, w = normal(m, k), weight(n, k, stored, seed=1)
    assert distance(few_linear(x, w), exact(x, w)) < FLOAT32


def test_rows_may_be_apart_and_nothing_else_is_read(interpreter):
    """The columns between the rows of x, and the rows after the last, hold NaN."""
    whole = torch.full((8, 700), float("nan"))
    whole[:3, :600] = normal(3, 600)
    x, w = whole[:3, :600], weight(40, 600, "block", seed=1)
    assert distance(few_linear(x, w), exact(x, w)) < FLOAT32


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_two_weights_need_not_be_stored_alike(m, n, k, stored, interpreter):
    x, weights = normal(m, k), (weight(n, k, stored, seed=1), weight(18, k, "plain", seed=5))
    for got, w in zip(few_products(x, *weights), weights, strict=True):
        assert distance(got, exact(x, w)) < FLOAT32


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_parts_are_summed_by_the_norm(m, n, k, stored, interpreter):
    x, w, residual, norm = normal(m, k), weight(n, k, stored, seed=1), normal(m, n), normal(n)
    parts = few_parts(x, w)
    assert isinstance(parts, Parts)
    steps, most = -(-k // 256), 4 if isinstance(w, Fp8Weight) else 8
    assert len(parts.sums) == -(-steps // -(-steps // most))
    assert distance(parts.sums.sum(0), exact(x, w)) < FLOAT32
    expected = add_rmsnorm_reference(exact(x, w), residual.double(), norm.double(), EPS)
    for got, wanted in zip(add_rmsnorm(parts, residual, norm, EPS), expected, strict=True):
        assert distance(got, wanted) < FLOAT32


@pytest.mark.parametrize(("m", "heads"), [(2, 3), (5, 9), (8, 16)])
def test_heads_are_scaled_before_they_are_summed(m, heads, interpreter):
    """In less than a step of columns, over the end of one, in whole steps."""
    x, w = unscaled(m, heads, 64), weight(33, heads * 64, "plain", seed=1)
    parts = linear_update(x, w)
    assert isinstance(parts, Parts)
    assert distance(parts.sums.sum(0), exact(scaled_reference(x), w)) < FLOAT32


def test_parts_are_rounded_once_and_then_added(interpreter):
    """2^-9 each is lost beside 1 in bfloat16; two are not, and their sum is half a step of 4."""
    sums = torch.tensor([1.0, 2**-8, 2**-8]).view(3, 1, 1)
    residual, norm = torch.full((1, 1), 4.0).bfloat16(), torch.zeros(1)
    reference = add_rmsnorm_reference(Parts(sums), residual, norm, EPS)[1]
    assert reference == add_rmsnorm_reference(sums.sum(0).bfloat16(), residual, norm, EPS)[1]
    wide = residual.float()
    assert add_rmsnorm(Parts(sums), wide, norm, EPS)[1] == 5 + 2**-7


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gate_and_up_are_multiplied_by_one_kernel(m, n, k, stored, interpreter):
    x, w = normal(m, k), weight(2 * n, k, stored, seed=1)
    gate, up = exact(x, w).chunk(2, -1)
    assert distance(few_gated(x, w), torch.nn.functional.silu(gate) * up) < FLOAT32


@pytest.mark.parametrize("many", [0, 1 << 20])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_tiles_of_large_float_weights_are_tall_where_there_are_many(
    m, n, k, many, monkeypatch, interpreter
):
    monkeypatch.setattr(few_tile, "_LITTLE", 0)
    monkeypatch.setattr(few_tile, "_MANY", many)
    x, w = normal(m, k), weight(2 * n, k, "plain", seed=1)
    rows = few_tile.tile_of(Stored.of(w))["BLOCK_N"]
    assert rows == (32 if many else 64)
    gate, up = exact(x, w).chunk(2, -1)
    assert distance(few_gated(x, w), torch.nn.functional.silu(gate) * up) < FLOAT32
    assert distance(few_linear(x, w), exact(x, w)) < FLOAT32


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_parts_of_large_float_weights_have_four_steps(m, n, k, monkeypatch, interpreter):
    monkeypatch.setattr(few_tile, "_LITTLE", 0)
    x, w = normal(m, k), weight(n, k, "plain", seed=1)
    sums = few_parts(x, w).sums
    assert len(sums) == -(-k // (4 * few_tile.tile_of(Stored.of(w), split=True)["STEP"]))
    assert distance(sums.sum(0), exact(x, w)) < FLOAT32


def test_without_triton_the_references_serve():
    x, w = normal(3, 40), weight(18, 40, "block", seed=1)
    assert distance(few_linear(x, w), exact(x, w)) < FLOAT32
    assert torch.equal(few_parts(x, w), few_linear(x, w))
    assert torch.equal(few_gated(x, w), few_gated_reference(x, w))


def test_a_small_weight_is_left_whole_where_its_columns_are_few(monkeypatch, interpreter):
    monkeypatch.setattr(few, "_PROGRAMS", 4)
    assert len(few_parts(normal(2, 1024), weight(70, 1024, "block")).sums) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, *LARGE])
def test_compiled_kernels_are_exact_to_bfloat16(m, n, k, stored):
    """A bfloat16 has 8 bits: rounding loses 2^-8 of a number at most. Sums are in float32."""
    ws = [weight(2 * n, k, stored, seed=1), weight(18, k, "plain", seed=5)]
    x = normal(m, k).bfloat16()
    ws = [w if isinstance(w, Fp8Weight) else w.bfloat16() for w in ws]
    on_gpu = [
        Fp8Weight(w.codes.cuda(), w.scale.cuda()) if isinstance(w, Fp8Weight) else w.cuda()
        for w in ws
    ]
    products = [exact(x, w) for w in ws]
    for got, wanted in zip(few_products(x.cuda(), *on_gpu), products, strict=True):
        assert distance(got.cpu(), wanted) < 2**-8
    assert distance(few_parts(x.cuda(), on_gpu[0]).sums.sum(0).cpu(), products[0]) < FLOAT32
    gate, up = products[0].chunk(2, -1)
    got = few_gated(x.cuda(), on_gpu[0]).cpu()
    assert distance(got, torch.nn.functional.silu(gate) * up) < 2**-7
