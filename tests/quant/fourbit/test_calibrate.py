"""The scale search and GPTQ, against the plain definition in float64, and what they promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.choices import Choices
from quant.errors import QuantError
from quant.fourbit import calibrate, cpu, reference
from quant.fourbit.hessian import Factor, factor
from quant.fourbit.int4 import INT4
from quant.fourbit.int8 import INT8
from quant.fourbit.mxfp4 import MXFP4
from quant.fourbit.nvfp4 import NVFP4
from quant.fourbit.parts import GLOBAL
from quant.fourbit.rows import Rows
from quant.fp8.scheme import BLOCKS
from quant.registry import SCHEMES
from quant.stored import each_row

ASYMMETRIC = INT4.with_choices(Choices(group=32, symmetric=False))
FORMS = (NVFP4, MXFP4, INT4, ASYMMETRIC, INT8)
E2M1 = (NVFP4, NVFP4.in_dialect("modelopt"), MXFP4)
METHODS = ("sweep", "gptq")
# Codes that llm-compressor 0.14.0.1 gives (`quantize_weight`, static order, blocks of 128, damping
# 0.01 of the mean) with steps of 2^-8: four rows of int4 in groups of 32, plus 8, and of NVFP4.
THEIRS = {
    4: (
        "d5454485c39a47c7dea2d7a8a3344c3b9def6b18c7a7898922ec7deb513943ea"
        "865eae7b8a9e634697fb6e46d67697382c6ebb926bb9ca282d84935457f38a9b"
        "753eb151699f97e2f4a556d3460e6679d65d857b1fcda6ea5cb75c2e68377859"
        "362729d37751a3249936e997ddfa445a2f644b34564f39b62542816bc528ba8b"
        "75bad85ac5d62837d965b4ab8d1fa39966b2e2daba7e5b747a4fab99863bc047"
        "72cea9ea4743c15adcead99793ca6672add943d7db86c3f759bda8e934969fd3"
        "844bc4b3bcd3ca7f6c7a76b92dad744ba8346426a587cb6ba72b38d97a6362f3"
        "988b8d531b55687615373816ab994e3bc8d578f7cb484aac45d8354df2b45748"
    ),
    0: (
        "7eeded8d6f58db6c773f44123feee6d1467732f96a3a8202ff67d776eff3fe74"
        "0bd747c60437bfeb8175c7f96c3e4ce0f6c7461fc54364dee60f5fdef66e8225"
        "8ee75fefd3472a7b5b1cf45eeef7bcd56bd53e95d5764956e66ad6f52cea5ea8"
        "ebf9f16eb9df1efea5fb7a6d7674eed0e7cef7fedf36e25cfddfbfd56ef85415"
        "5f637ad46d7df1fc72cd5e4519a65f5b9d5f7f7345a7d49eb4d7352d6ee51ef9"
        "af573357f9ec8ee5576566c20e55ccaf6671df7a77e15e78e3565973fe3b177f"
        "bde56b2e566e64a714832e61f556aef793fecefc3d0a64b549f7f26c41affd7e"
        "22a697cff4dbe2acffece9fd4541e7f87c7db27856e1e427fc62fce77f5edae0"
    ),
}
schemes = pytest.mark.parametrize("scheme", FORMS, ids=["nvfp4", "mxfp4", "int4", "asym", "int8"])


def weight(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()


def inputs(seed: int, columns: int, tokens: int = 512) -> torch.Tensor:
    """Return inputs of a layer, correlated, some columns far larger."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator)
    return x @ mixed * torch.randn(columns, generator=generator).exp()


def hessian(seed: int, columns: int) -> torch.Tensor:
    x = inputs(seed, columns)
    return x.T @ x / len(x)


def encoded(scheme, w, method, h):
    """Return the parts of a weight and its values."""
    known = {"sweep": {"importance": h.diagonal()}, "gptq": {"factor": factor(h)}, "nearest": {}}
    parts = scheme.encode(w, scheme.prepare(iter([w])), **known[method])
    return parts, scheme.decode(each_row(scheme, parts, tuple(w.shape)))


def loss(w, q, h) -> float:
    missed = (w.float() - q).double()
    return float(((missed @ h.double()) * missed).sum())


def test_the_factor_is_that_of_the_damped_inverse():
    h = hessian(0, 48)
    known = factor(3 * h, damp=0.02)
    damped = 3 * h.double() + 0.02 * 3 * h.diagonal().median().double() * torch.eye(48)
    ordered = damped[known.order][:, known.order]
    upper = known.upper.double()
    assert torch.equal(known.upper, known.upper.triu())
    assert (upper.T @ upper @ ordered - torch.eye(48)).abs().max() < 1e-3
    assert torch.equal(known.diagonal[known.order], known.diagonal.sort(descending=True).values)


def test_a_hessian_of_few_tokens_is_damped_until_it_has_a_factor():
    x = inputs(1, 64, tokens=3)
    assert factor(x.T @ x, damp=0.0).upper.isfinite().all()


def test_one_column_of_huge_inputs_does_not_decide_the_damping():
    h = hessian(0, 64)
    usual, largest = factor(h).added, h.diagonal().argmax()
    h[largest, largest] *= 1e6
    assert factor(h).added == usual


def test_damping_grows_beyond_what_rounding_took():
    """Sums of huge inputs can leave a negative eigenvalue, large beside the other columns."""
    h = torch.eye(8)
    h[:2, :2] = torch.tensor([[1e6, 1e6 + 3], [1e6 + 3, 1e6]])
    known = factor(h)
    assert known.upper.isfinite().all()
    assert 3 < known.added < 100


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_hessian_of_nothing_is_refused(value):
    with pytest.raises(QuantError, match="Hessian"):
        factor(torch.full((8, 8), value))


def test_one_that_no_damping_makes_positive_is_refused():
    h = torch.full((8, 8), -100.0).fill_diagonal_(1.0)
    with pytest.raises(QuantError, match="positive definite"):
        factor(h)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_gptq_is_its_definition(bits):
    """In float64 the same units follow, but where float32 falls on the other side of a tie."""
    w, known = weight(2, 24, 176).float(), factor(hessian(2, 176))
    step = torch.full((24 * 11,), {0: 0.01, 4: 0.008, 8: 0.0005}[bits])
    zero = torch.arange(24.0 * 11) % 3 if bits == 4 else torch.zeros(24 * 11)
    grid = calibrate.Grid(step, zero, step)
    units, kept = calibrate.choose_units(w, grid, known, bits, passes=0)
    assert torch.equal(kept, step)
    d, shift = (x.view(24, 11).repeat_interleave(16, 1)[:, known.order] for x in (step, zero))
    w64, upper = w.double()[:, known.order], known.upper.double()
    expected = reference.feed_back(w64, d.double(), shift.double(), upper, bits)
    assert (units[:, known.order] == expected).float().mean() > 0.999


@pytest.mark.parametrize("bits", [4, 0], ids=["int4", "nvfp4"])
def test_gptq_is_that_of_llm_compressor(bits):
    generator = torch.Generator().manual_seed(16)
    w = torch.randint(-9999, 10000, (4, 128), generator=generator) / 400000
    x = torch.randint(-3, 4, (512, 128), generator=generator)
    x = (x + x.roll(1, 1) * (torch.arange(128) % 5)).float()
    step = torch.full((4 * 128 // (32 if bits else 16),), 2.0**-8)
    grid = calibrate.Grid(step, torch.zeros_like(step), step)
    h = x.T @ x / 512
    known = factor(h, damp=0.01 * float(h.diagonal().mean() / h.diagonal().median()))
    units, _ = calibrate.choose_units(w, grid, known, bits, passes=0)
    codes = (units + 8).int() if bits else reference.encode_e2m1(units, torch.ones(4))
    assert "".join(f"{code:x}" for code in codes.flatten().tolist()) == "".join(THEIRS[bits])


@schemes
@pytest.mark.parametrize("method", METHODS)
@given(cut=st.integers(0, 5), seed=st.integers(0, 2))
def test_ranges_of_rows_are_encoded_like_the_whole(scheme, method, cut, seed):
    w, h = weight(seed, 40, 256), hessian(seed, 256)
    prepared = scheme.prepare(iter([w]))
    known = {"importance": h.diagonal()} if method == "sweep" else {"factor": factor(h)}
    whole = scheme.encode(w, prepared, **known)
    pieces = [scheme.encode(x, prepared, **known) for x in (w[: 8 * cut], w[8 * cut :]) if len(x)]
    for key, tensor in whole.items():
        joined = pieces[0][key] if key == GLOBAL else torch.cat([piece[key] for piece in pieces])
        assert torch.equal(joined.view(torch.uint8), tensor.view(torch.uint8))


@schemes
@given(seed=st.integers(0, 50))
def test_a_sweep_is_never_worse_than_the_nearest_by_its_own_weights(scheme, seed):
    w, h = weight(seed, 8, 256), torch.diag(hessian(seed, 256).diagonal())
    nearest, swept = (loss(w, encoded(scheme, w, m, h)[1], h) for m in ("nearest", "sweep"))
    assert swept <= nearest * (1 + 1e-6)


@schemes
@pytest.mark.parametrize("columns", [128, 384])
def test_gptq_beats_the_sweep_and_the_sweep_the_nearest(scheme, columns):
    w, h = weight(3, 32, columns), hessian(3, columns)
    nearest, swept, fed = (loss(w, encoded(scheme, w, m, h)[1], h) for m in ("nearest", *METHODS))
    assert fed < 0.8 * swept
    assert swept <= nearest


@schemes
def test_settling_never_adds_error(scheme):
    w, h = weight(4, 16, 256), hessian(4, 256)
    known = factor(h)
    damped = h + known.added * torch.eye(256)
    group = getattr(scheme, "size", lambda _: scheme.group)(256)
    step = torch.full((16 * 256 // group,), 0.0078125)
    grid = calibrate.Grid(step, torch.zeros_like(step), step)
    losses = []
    for passes in range(4):
        units, d = calibrate.choose_units(w, grid, known, getattr(scheme, "bits", 0), passes=passes)
        q = units * d.view(16, -1).repeat_interleave(group, 1)
        losses.append(loss(w, q, damped))
    assert losses == sorted(losses, reverse=True)
    assert losses[1] < losses[0]


@schemes
def test_a_column_that_no_token_moved_keeps_its_weights(scheme):
    """Nor does it change the others: their codes are those of any other weights in it."""
    h = hessian(5, 256)
    h[7], h[:, 7] = 0, 0
    w, other = weight(5, 16, 256), weight(5, 16, 256)
    other[:, 7] *= 0.5
    q = encoded(scheme, w, "gptq", h)[1]
    step = w.float().abs().amax() / 4
    assert ((q - w.float())[:, 7].abs() < step).all()
    assert q[:, 7].any()


@schemes
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_right_pass_the_judge(scheme, method):
    """The more the columns of inputs differ, the farther off single weights may be."""
    x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(6))
    x += 0.3 * x.roll(1, 1)
    w, h = weight(6, 64, 512), x.T @ x
    parts, _ = encoded(scheme, w, method, h)
    rows = each_row(scheme, parts, tuple(w.shape))
    assert not scheme.defects(rows)
    assert scheme.judge(scheme.compare(w, rows)) == []


def test_an_importance_of_zero_is_none():
    w, zero = weight(7, 8, 256), torch.zeros(256)
    for scheme in FORMS:
        prepared = scheme.prepare(iter([w]))
        parts = [scheme.encode(w, prepared, x) for x in (zero, torch.ones(256))]
        for key, tensor in parts[0].items():
            assert torch.equal(tensor.view(torch.uint8), parts[1][key].view(torch.uint8))


def test_only_four_and_eight_bits_are_calibrated():
    calibrated = {name for name, scheme in SCHEMES.items() if scheme.calibrated}
    assert calibrated == {"nvfp4", "nvfp4a16", "mxfp4a16", "int4", "int8"}
    assert not BLOCKS.calibrated
    assert isinstance(factor(torch.eye(4)), Factor)


@pytest.mark.parametrize("scheme", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize("seed", range(3))
def test_steps_that_are_searched_for_again_leave_less_error(scheme, seed):
    w, h = weight(seed, 16, 256), hessian(seed, 256)
    known, group = factor(h), scheme.group
    low, high = cpu.extremes(w, group)
    prepared = scheme.prepare(iter([w]))
    scale, _ = scheme.scales(low.neg().maximum(high), prepared)
    tried = list(scheme.candidates(scale, prepared))
    grid = calibrate.sweep(w, calibrate.weights_of(known.diagonal), tried, 0)
    damped, losses = h + known.added * torch.eye(256), []
    for among in (None, torch.stack([each.step for each in tried])):
        units, d = calibrate.choose_units(w, grid, known, 0, tried=among)
        losses.append(loss(w, units * d.view(16, -1).repeat_interleave(group, 1), damped))
    assert losses[1] < losses[0]
    stored = encoded(scheme, w, "gptq", h)[1]
    assert loss(w, stored, damped) == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("scheme", [INT4, ASYMMETRIC], ids=["int4", "asym"])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_leave_less_error_than_units_one_by_one(scheme, seed, monkeypatch):
    w, h = weight(seed, 16, 256), hessian(seed, 256)
    damped = h + factor(h).added * torch.eye(256)
    paired = loss(w, encoded(scheme, w, "gptq", h)[1], damped)
    monkeypatch.setattr(calibrate.OneMatrix, "pair", lambda *_: None)
    assert paired < loss(w, encoded(scheme, w, "gptq", h)[1], damped)


@schemes
def test_settling_keeps_slopes_up_to_date(scheme):
    w, known, group = weight(8, 16, 256), factor(hessian(8, 256)), 16 if scheme is NVFP4 else 32
    step = torch.full((16, 256 // group), 0.0078125)
    zero, bits = torch.zeros_like(step), getattr(scheme, "bits", 0)
    rows = Rows(w.float(), step, zero, torch.empty(16, 256), bits)
    walker = calibrate.OneMatrix(known)
    walker.feed_back(rows)
    slope = walker.slope(rows)
    for _ in range(3):
        walker.settle(rows, slope)
        if rows.refit:
            walker.pair(rows, slope)
    assert torch.allclose(
        slope, walker.slope(rows), rtol=1e-3, atol=1e-5 * float(slope.abs().max())
    )


@pytest.mark.parametrize("scheme", E2M1, ids=lambda scheme: scheme.label)
def test_a_step_says_what_is_stored_of_it(scheme):
    w = weight(9, 64, 256)
    w[3] = 0
    low, high = cpu.extremes(w, scheme.group)
    prepared = scheme.prepare(iter([w]))
    for grid in scheme.candidates(scheme.scales(low.neg().maximum(high), prepared)[0], prepared):
        found = scheme.stored(grid.step, prepared)
        assert torch.equal(found.view(torch.uint8), grid.stored.view(torch.uint8))


@pytest.mark.parametrize("scheme", E2M1, ids=lambda scheme: scheme.label)
def test_the_best_steps_are_those_of_a_sweep(scheme):
    w, known = weight(10, 16, 256), hessian(10, 256).diagonal()
    low, high = cpu.extremes(w, scheme.group)
    prepared = scheme.prepare(iter([w]))
    near = list(scheme.candidates(scheme.scales(low.neg().maximum(high), prepared)[0], prepared))
    expected = calibrate.sweep(w, known, near, 0).step
    tried = torch.stack([grid.step for grid in near])
    assert torch.equal(calibrate.best_steps(w, known, tried, 0), expected)
