"""FP8 from any right encoder passes; a scale, a code or a row that no encoder leaves is named."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from quant.fp8 import judge
from quant.fp8 import reference as fp8
from quant.fp8.scheme import BLOCKS, CHANNELS, TENSOR
from quant.stored import each_row

BLOCK = (128, 128)
GRIDS = {"fp8-block": BLOCK, "fp8-channel": (1, 512)}
SCHEMES = {scheme.name: scheme for scheme in (BLOCKS, CHANNELS)}
by_grid = pytest.mark.parametrize("grid", GRIDS)


@pytest.fixture(scope="module")
def w():
    """Blocks of several sizes, one of zeros, one with an outlier, some weights far below amax."""
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(384, 512, generator=draw) * 0.02
    w[:128, 128:256] *= 2.0**-6
    w[128:256, :128] = 0
    w[300, 300] = 3.0
    w[::7] *= torch.rand(55, 512, generator=draw) ** 9
    return w.bfloat16()


def faults(scheme, w, codes, scale):
    rows = each_row(scheme, {"codes": codes, "scale": scale}, w.shape)
    return scheme.judge(scheme.compare(w, rows))


def expand(scale, w, grid):
    return fp8.expand(scale.float(), GRIDS[grid], w.shape)


def cast(ratio):
    return ratio.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def base_of(w, grid):
    amax = fp8.block_amax(w.float(), GRIDS[grid])
    return torch.where(amax == 0, 1.0, amax / 448)


def block_sum(x, grid):
    rows, cols = GRIDS[grid]
    return x.double().reshape(len(x) // rows, rows, -1, cols).sum((1, 3))


@by_grid
@pytest.mark.parametrize("mode", ["pow2", "float32", "bfloat16"])
def test_our_own_modes_pass(w, grid, mode):
    assert faults(SCHEMES[grid], w, *fp8.quantize(w, GRIDS[grid], mode)) == []


@by_grid
def test_scales_rounded_after_quantising_pass(w, grid):
    """As the official files may be: codes of amax / 448, the scale stored in BF16, also as F32."""
    codes = cast(w.float() / expand(base_of(w, grid), w, grid))
    rounded = base_of(w, grid).bfloat16()
    assert faults(SCHEMES[grid], w, codes, rounded) == []
    assert faults(SCHEMES[grid], w, codes, rounded.float()) == []
    assert faults(SCHEMES[grid], w, codes, base_of(w, grid).half()) == []


@by_grid
def test_least_squares_scales_pass(w, grid):
    codes = cast(w.float() / expand(base_of(w, grid), w, grid))
    products = block_sum(w.float() * codes.float(), grid)
    squares = block_sum(codes.float().square(), grid)
    fitted = torch.where(squares > 0, products / squares, 1.0).float()
    assert faults(SCHEMES[grid], w, codes, fitted) == []
    assert faults(SCHEMES[grid], w, codes, fitted.bfloat16()) == []


@by_grid
@pytest.mark.parametrize("power", [2.0, 2.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_searched_scales_that_cut_weights_off_pass(w, grid, power, dtype):
    """As llm-compressor's MSE observer: the best of twenty scales below amax / 448."""
    best = torch.full_like(base_of(w, grid), torch.inf).double()
    scale = base_of(w, grid)
    for shrink in range(20):
        tried = (base_of(w, grid) * (1 - shrink / 100)).to(dtype).float()
        spread = expand(tried, w, grid)
        error = block_sum((w - cast(w / spread).float() * spread).abs() ** power, grid)
        scale = torch.where(error < best, tried, scale)
        best = torch.minimum(best, error)
    assert (scale < base_of(w, grid) * 0.98).any()
    assert faults(SCHEMES[grid], w, cast(w / expand(scale, w, grid)), scale) == []


@by_grid
def test_compressed_tensors_own_quantiser_passes(w, grid):
    """It computes in the weight's BF16, so ties fall elsewhere than in float32."""
    strategy = {"fp8-block": ("block", [128, 128]), "fp8-channel": ("channel", None)}[grid]
    args = QuantizationArgs(
        num_bits=8, type="float", strategy=strategy[0], block_structure=strategy[1]
    )
    top = fp8.block_amax(w.float(), GRIDS[grid]).bfloat16()
    scale, zero_point = calculate_qparams(-top, top, args)
    codes = ct_quantize(w, scale, zero_point, args, dtype=torch.float8_e4m3fn)
    assert (codes.float() != cast(w.float() / expand(scale, w, grid)).float()).any()
    assert faults(SCHEMES[grid], w, codes, scale) == []


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_transformers_own_quantiser_passes(w, scale_fmt):
    class Quantizer:
        quantization_config = FineGrainedFP8Config(scale_fmt=scale_fmt)

    stored = Fp8Quantize(Quantizer()).convert({"x.weight": w})
    assert faults(BLOCKS, w, stored["x.weight"], stored["x.weight_scale_inv"]) == []


def test_amax_raised_to_a_floor_passes():
    """DeepGEMM's encoder takes no amax below 1e-4."""
    w = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16() * 1e-7
    scale = torch.full((1, 1), 1e-4 / 448)
    assert faults(BLOCKS, w, cast(w.float() / scale), scale) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [*TENSOR.spelt((512, 256))])
def test_one_scale_for_a_tensor_or_for_all_that_engines_fuse_passes(w, dtype, scheme):
    for amax in (w.float().abs().max(), torch.tensor(17.0)):
        scale = (amax / 448).to(dtype).reshape(scheme.grid(w.shape))
        assert faults(scheme, w, cast(w.float() / scale.float()), scale) == []
        assert faults(scheme, w, cast(w.float() / (amax / 448)), scale) == []


def test_a_fitted_scale_for_a_tensor_passes(w):
    codes = cast(w.float() / (w.float().abs().max() / 448))
    fitted = (w.float() * codes.float()).sum() / codes.float().square().sum()
    assert faults(TENSOR, w, codes, fitted.reshape(1)) == []


@by_grid
@pytest.mark.parametrize("gain", [0.97, 0.99, 1.01, 1.03])
@pytest.mark.parametrize("mode", ["pow2", "float32", "bfloat16"])
def test_a_gain_of_one_percent_is_named(w, grid, gain, mode):
    codes, scale = fp8.quantize(w, GRIDS[grid], mode)
    for wrong in (scale.float() * gain, (scale.float() * gain).bfloat16()):
        named = faults(SCHEMES[grid], w, codes, wrong)
        assert judge.SCALE in named[0] or judge.CODES in named[0]


@by_grid
@pytest.mark.parametrize("mode", ["pow2", "float32", "bfloat16"])
def test_a_revision_of_one_in_a_thousand_is_named(w, grid, mode):
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    codes, scale = fp8.quantize((w * (1 + noise)).bfloat16(), GRIDS[grid], mode)
    assert judge.CODES in faults(SCHEMES[grid], w, codes, scale)[0]


@by_grid
def test_a_change_too_small_for_bfloat16_is_named_by_the_ties(w, grid):
    """An adapter merged in float32: only weights that lay between two codes have another."""
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) * 1e-4
    codes, scale = fp8.quantize(w * (1 + noise), GRIDS[grid], "pow2")
    assert any(judge.TORN in named for named in faults(SCHEMES[grid], w, codes, scale))


@by_grid
@pytest.mark.parametrize("way", ["up", "down", "ceil", "floor"])
def test_ties_that_all_went_one_way_pass(w, grid, way):
    """As under a scale a little beside the stored one, or in code that looks codes up."""
    _, scale = fp8.quantize(w, GRIDS[grid], "pow2")
    ratio = w.float() / expand(scale, w, grid)
    shift = {"up": ratio, "down": -ratio, "ceil": ratio.abs(), "floor": -ratio.abs()}[way]
    codes = cast(ratio + shift * 2.0**-20)
    assert (codes.float() != cast(ratio).float()).any()
    assert faults(SCHEMES[grid], w, codes, scale) == []


@by_grid
def test_a_row_of_zeros_is_named(w, grid):
    codes, scale = fp8.quantize(w, GRIDS[grid], "pow2")
    codes.view(torch.uint8)[5] = 0
    assert faults(SCHEMES[grid], w, codes, scale) != []


@by_grid
@pytest.mark.parametrize("step", [-1, 1])
def test_one_code_of_one_step_is_named(w, grid, step):
    codes, scale = fp8.quantize(w, GRIDS[grid], "float32")
    codes.view(torch.uint8)[260, 9] += step
    (named,) = faults(SCHEMES[grid], w, codes, scale)
    assert named.startswith("1 of ")
    assert judge.CODES in named or judge.SCALE in named


@by_grid
def test_a_minus_zero_for_a_positive_weight_is_named(w, grid):
    codes, scale = fp8.quantize(w, GRIDS[grid], "pow2")
    bits = codes.view(torch.uint8)
    bits[bits == 0] = 0x80
    assert judge.SIGN in faults(SCHEMES[grid], w, codes, scale)[0]
    codes, scale = fp8.quantize(w, GRIDS[grid], "pow2")
    bits = codes.view(torch.uint8)
    bits[bits == 0x80] = 0
    assert faults(SCHEMES[grid], w, codes, scale) == []


@by_grid
def test_the_scales_of_the_neighbours_are_named(w, grid):
    codes, scale = fp8.quantize(w, GRIDS[grid], "float32")
    assert judge.SCALE in faults(SCHEMES[grid], w, codes, scale.roll(1, 0))[0]


@by_grid
@pytest.mark.parametrize("mode", ["pow2", "float32"])
def test_a_scale_two_powers_of_two_too_large_is_named(w, grid, mode):
    scale = fp8.quantize(w, GRIDS[grid], mode)[1].float() * (2 if mode == "pow2" else 2.1)
    named = faults(SCHEMES[grid], w, cast(w.float() / expand(scale, w, grid)), scale)
    assert judge.LARGE in named[0]


@by_grid
def test_a_scale_that_cuts_off_more_than_it_wins_is_named(w, grid):
    scale = base_of(w, grid) / 2
    named = faults(SCHEMES[grid], w, cast(w.float() / expand(scale, w, grid)), scale)
    assert judge.CLIPPED in named[0]


def test_a_row_beyond_the_last_whole_block_is_judged_too():
    w = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scale = fp8.quantize(w, BLOCK, "float32")
    assert faults(BLOCKS, w, codes, scale) == []
    scale[1, 2] *= 1.03
    assert faults(BLOCKS, w, codes, scale) == [f"1 of 6 {judge.SCALE}"]


@by_grid
@pytest.mark.parametrize("ours", ["pow2", "float32", "bfloat16"])
@pytest.mark.parametrize("theirs", ["pow2", "float32"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_of_an_fp8_source_pass_in_fp8(w, grid, ours, theirs, stored):
    """Also where a power of two leaves the codes as they are, and all values a little larger."""
    again = fp8.dequantize(*fp8.quantize(w, GRIDS[grid], theirs), GRIDS[grid]).to(stored)
    assert faults(SCHEMES[grid], again, *fp8.quantize(again, GRIDS[grid], ours)) == []


@by_grid
@pytest.mark.parametrize("gain", [0.98, 1.02])
def test_scales_of_an_fp8_source_that_grew_are_named(w, grid, gain):
    codes, scale = fp8.quantize(w, GRIDS[grid], "float32")
    again = fp8.dequantize(codes, scale, GRIDS[grid]).bfloat16()
    assert faults(SCHEMES[grid], again, codes, scale * gain) != []
