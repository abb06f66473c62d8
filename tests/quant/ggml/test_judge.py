"""Blocks of ggml's own encoders pass, whatever their importance matrix; damaged ones are named."""

from __future__ import annotations

import gguf
import libgguf
import numpy as np
import pytest
import torch

from quant.ggml import codec, i_points, judge, kinds
from quant.ggml.scheme import BLOCKS, Ggml
from tests.quant.rows import heavy_tailed, normal, one_outlier

# One worker: ggml fills its tables of IQ2 at their first use, for 13 seconds of a process.
pytestmark = pytest.mark.xdist_group("ggml")
SEARCHED = (*kinds.K_QUANTS, "IQ4_NL", "IQ4_XS")
GRIDS = tuple(kinds.I_QUANTS)
LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
# Where each type keeps its float16 scales.
SCALES = kinds.K_QUANTS | dict.fromkeys(("IQ4_NL", "IQ4_XS", "Q8_0", "Q4_0", "Q5_0"), (0,))
by_type = pytest.mark.parametrize("name", SEARCHED)


@pytest.fixture(scope="module")
def w():
    return normal(64, 1024, torch.Generator().manual_seed(0))


def uneven(k, draw):
    """Mean squares as activations have them: most near each other, a few a thousand times more."""
    x = (torch.randn(k, generator=draw) * 1.5).exp()
    x[torch.randint(k, (k // 100,), generator=draw)] *= 1000
    return x


def by_ggml(name, w, weights=None):
    table = None if weights is None else weights.numpy()
    qtype = gguf.GGMLQuantizationType[name].value
    return torch.from_numpy(libgguf.quantize_rows(w.float().numpy(), qtype, imatrix=table))


def faults(name, w, blocks, **options):
    form = Ggml(name)
    return form.judge(form.compare(w, {BLOCKS: blocks}, **options))


@pytest.mark.parametrize("kind", [normal, heavy_tailed, one_outlier])
@pytest.mark.parametrize("name", [*SEARCHED, *GRIDS, *LEGACY, "Q8_0"])
def test_ggmls_own_blocks_pass_with_an_importance_that_is_not_known(name, kind):
    draw = torch.Generator().manual_seed(1)
    w, weights = kind(32, 1024, draw), uneven(1024, draw)
    assert faults(name, w, by_ggml(name, w)) == []
    assert faults(name, w, by_ggml(name, w, weights), weighed=True) == []
    if name not in LEGACY:
        assert faults(name, w, by_ggml(name, w, weights), importance=weights) == []


@pytest.mark.parametrize("gain", [0.97, 1.01, 1.03, 2.0])
@pytest.mark.parametrize("weighed", [False, True])
@by_type
def test_a_gain_is_named(name, w, gain, weighed):
    weights = uneven(1024, torch.Generator().manual_seed(1)) if weighed else None
    blocks = by_ggml(name, w, weights).reshape(-1, kinds.block(name)[1]).numpy().copy()
    for at in SCALES[name]:
        halves = blocks[:, at : at + 2].copy().view(np.float16)
        blocks[:, at : at + 2] = (halves * np.float16(gain)).view(np.uint8)
    damaged = torch.from_numpy(blocks).view(len(w), -1)
    assert any(judge.CODES in fault for fault in faults(name, w, damaged, weighed=weighed))


@pytest.mark.parametrize("weighed", [False, True])
@by_type
def test_one_wrong_code_is_named(name, w, weighed):
    blocks = by_ggml(name, w)
    blocks[3, 70] ^= 1
    (named, *_) = faults(name, w, blocks, weighed=weighed)
    assert named.startswith("1 of ")
    assert judge.CODES in named


@pytest.mark.parametrize("weighed", [False, True])
@by_type
def test_a_revision_of_one_in_a_thousand_is_named(name, w, weighed):
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    (named, *_) = faults(name, w, by_ggml(name, w * (1 + noise)), weighed=weighed)
    assert judge.CODES in named


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_signs_of_other_weights_are_named(name, weighed):
    """Rows in another order, and a bit of one: the second sign of a column's eight is wrong."""
    draw = torch.Generator().manual_seed(2)
    w = normal(16, 1024, draw)
    blocks = by_ggml(name, w, uneven(1024, draw))
    assert f"64 of 64 {judge.SIGNS}" in faults(name, w, blocks.roll(1, 0), weighed=weighed)
    damaged = blocks.view(-1, kinds.block(name)[1]).clone()
    # 34 and 74: signs of IQ2_S and IQ3_S; 6, 3 and 66: of the first 32 columns, of 8, of 32
    at = {"IQ2_S": 34, "IQ3_S": 74, "IQ2_XXS": 6, "IQ2_XS": 3, "IQ3_XXS": 66}[name]
    damaged[5, at] ^= 0x06
    named = faults(name, w, damaged.view(16, -1), weighed=weighed)
    assert f"1 of 64 {judge.SIGNS}" in named


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", [*SEARCHED, *GRIDS, *LEGACY])
def test_a_row_of_zero_blocks_is_named(name, w, weighed):
    blocks = by_ggml(name, w)
    blocks[5] = 0
    assert any(judge.ZERO in fault for fault in faults(name, w, blocks, weighed=weighed)) or (
        name in LEGACY and not weighed and faults(name, w, blocks)
    )


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K", "Q4_1", "Q5_1"])
def test_a_step_of_zero_under_a_minimum_is_named(name, w):
    size, stored = kinds.block(name)
    blocks = by_ggml(name, w, uneven(1024, torch.Generator().manual_seed(3))).view(-1, stored)
    at = SCALES.get(name, (0,))[0]
    blocks[7, at : at + 2] = 0
    named = faults(name, w, blocks.view(len(w), -1), weighed=True)
    assert f"1 of {w.numel() // size:,} {judge.FLAT}" in named
    same = torch.full((4, 1024), 0.0625)
    assert faults(name, same, by_ggml(name, same), weighed=True) == []


@pytest.mark.parametrize("gain", [0.5, 2.0])
@pytest.mark.parametrize("name", GRIDS)
def test_a_super_block_under_another_scale_is_named(name, w, gain):
    blocks = by_ggml(name, w, uneven(1024, torch.Generator().manual_seed(1))).view(
        -1, kinds.block(name)[1]
    )
    halves = blocks[7, :2].view(torch.float16)
    halves *= gain
    named = faults(name, w, blocks.view(len(w), -1), weighed=True)
    assert named == [f"1 of 256 {judge.POINTS}"]


@pytest.mark.parametrize("name", GRIDS)
def test_points_of_another_super_block_are_named(name, w):
    blocks = by_ggml(name, w, uneven(1024, torch.Generator().manual_seed(1))).view(
        -1, kinds.block(name)[1]
    )
    places = torch.tensor([at for at in i_points.PLACES[name] if name != "IQ2_XS" or at % 2 == 0])
    blocks[7, places] = blocks[8, places]
    named = faults(name, w, blocks.view(len(w), -1), weighed=True)
    assert f"1 of 256 {judge.POINTS}" in named


@pytest.mark.parametrize("name", GRIDS)
def test_columns_that_weigh_ten_thousand_times_more_leave_points_that_pass(name, w):
    """Each scale then follows one column, and so do points of the others."""
    spikes = torch.ones(1024)
    spikes[::16] = 1e4
    blocks = torch.logspace(-2, 1, 32).repeat_interleave(32)
    for values in (w, w * blocks, w * 1e-4):
        assert faults(name, values, by_ggml(name, values, spikes), weighed=True) == []


def test_a_super_block_with_steps_that_are_too_wide_is_named(w):
    """Its codes are the nearest: only its error tells."""
    blocks = by_ggml("Q4_K", w).view(-1, 144)
    wide = blocks[30].clone()
    wide[:4] = (wide[:4].view(torch.float16) * 2.5).view(torch.uint8)
    ends = []
    for code in (0x00, 0xFF):
        wide[16:] = code
        ends.append(codec.decode("Q4_K", wide[None], 256)[0])
    place = (w.view(-1, 256)[30] - ends[0]) / (ends[1] - ends[0])
    codes = (place * 15).round().clamp(0, 15).to(torch.uint8).view(4, 2, 32)
    wide[16:] = (codes[:, 0] | codes[:, 1] << 4).reshape(-1)
    blocks[30] = wide
    assert faults("Q4_K", w, blocks.view(len(w), -1)) == [f"1 of 256 {judge.ERROR}"]


def test_a_bias_is_named(w):
    """Codes that are rounded down: each is half a step off."""
    blocks = by_ggml("Q4_K", w - w.std() * 0.1)
    assert any("off on average" in fault for fault in faults("Q4_K", w, blocks))


def test_types_without_an_encoder_of_ours_are_not_bounded(w):
    signs = w.sign()
    blocks = by_ggml("TQ2_0", signs)
    assert not Ggml("TQ2_0").bounded
    assert faults("TQ2_0", signs, blocks) == []
    assert faults("TQ2_0", signs, blocks.roll(1, 0)) != []
    assert Ggml("Q4_K").bounded
