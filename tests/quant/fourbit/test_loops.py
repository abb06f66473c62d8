"""The compiled loops against the definitions, to the byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.choices import Choices
from quant.errors import QuantError
from quant.fourbit import cpu, reference
from quant.fourbit.int4 import INT4
from quant.fourbit.int8 import INT8
from quant.fourbit.mxfp4 import MXFP4
from quant.fourbit.nvfp4 import NVFP4
from quant.fourbit.parts import GLOBAL, PACKED, SCALE
from quant.stored import each_row

DTYPES = (torch.bfloat16, torch.float32)
FORMS = (NVFP4, MXFP4, INT4, INT4.with_choices(Choices(group=32, symmetric=False)), INT8)


def random(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, 1, generator=generator).exp()
    return (torch.randn(rows, columns, generator=generator) * spread * 0.02).to(dtype)


sizes = st.tuples(st.integers(0, 99), st.integers(1, 9), st.integers(1, 5), st.sampled_from(DTYPES))


@given(sizes)
def test_e2m1_is_the_definition(drawn):
    seed, rows, pairs, dtype = drawn
    w, d = random(seed, rows, 2 * pairs, dtype), random(seed, rows, 1, torch.float32)[:, 0].abs()
    packed = cpu.encode_e2m1(w, d)
    assert torch.equal(packed, reference.pack(reference.encode_e2m1(w, d)))
    assert torch.equal(
        cpu.decode_e2m1(packed, d), reference.decode_e2m1(reference.unpack(packed), d)
    )


def test_a_tie_of_e2m1_goes_to_the_even_code():
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 99.0]])
    for sign, bit in ((1, 0), (-1, 8)):
        codes = reference.unpack(cpu.encode_e2m1(sign * ties, torch.ones(1)))
        assert (codes - bit).tolist() == [[0, 2, 2, 4, 4, 6, 6, 7]]


@given(sizes, st.sampled_from([4, 8]))
def test_whole_numbers_are_the_definition(drawn, bits):
    seed, rows, pairs, dtype = drawn
    w, d = random(seed, rows, 4 * pairs, dtype), random(seed, rows, 1, torch.float32)[:, 0].abs()
    zero = torch.arange(rows).float() % 7 - 3
    codes = cpu.encode_int(w, d, zero, bits)
    assert torch.equal(codes, reference.encode_int(w, d, zero, bits))
    assert torch.equal(cpu.decode_int(codes, d, zero), reference.decode_int(codes, d, zero))


@given(sizes)
def test_extremes_are_the_least_the_largest_and_zero(drawn):
    seed, rows, pairs, dtype = drawn
    w = random(seed, rows, 3 * pairs, dtype)
    low, high = cpu.extremes(w, 3 * pairs)
    assert torch.equal(low, w.float().amin(1).clamp(max=0))
    assert torch.equal(high, w.float().amax(1).clamp(min=0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", FORMS, ids=lambda s: s.name)
def test_what_is_not_finite_is_refused(scheme, bad):
    w = random(0, 16, 256, torch.bfloat16)
    w[3, 7] = bad
    with pytest.raises(QuantError, match="1 of"):
        scheme.encode(w, scheme.prepare(iter([w])))


@pytest.mark.parametrize("scheme", FORMS, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_within_half_a_step(scheme, dtype):
    w = random(1, 24, 384, dtype)
    parts = scheme.encode(w, scheme.prepare(iter([w])))
    decoded = scheme.decode(each_row(scheme, parts, tuple(w.shape)))
    error = scheme.measure(w, each_row(scheme, parts, tuple(w.shape)))
    # uniform steps of amax / 8 for Gaussians of a group of 128, of E2M1 twice as wide at the end
    assert error.relative_rms < {"int8": 0.02}.get(scheme.name, 0.13)
    assert decoded.shape == w.shape


@pytest.mark.parametrize("scheme", FORMS, ids=lambda s: s.name)
def test_rows_are_encoded_alike_whole_and_in_ranges(scheme):
    w = random(2, 24, 256, torch.bfloat16)
    prepared = scheme.prepare(iter([w]))
    whole = scheme.encode(w, prepared)
    half = [scheme.encode(part, prepared) for part in (w[:8], w[8:])]
    for key, tensor in whole.items():
        joined = half[0][key] if key == GLOBAL else torch.cat([part[key] for part in half])
        assert torch.equal(joined.view(torch.uint8), tensor.view(torch.uint8))


def test_a_global_scale_is_shared_and_groups_of_zeros_have_a_scale():
    w = random(3, 8, 64, torch.bfloat16)
    w[0, :16] = 0
    prepared = NVFP4.prepare(iter([w, 4 * w]))
    assert torch.equal(prepared, NVFP4.prepare(iter([4 * w])))
    parts = NVFP4.encode(w, prepared)
    assert float(parts[SCALE][0, 0]) == 0.125
    assert not NVFP4.decode(parts)[0, :16].any()
    assert NVFP4.prepare(iter([w * 0])).item() == 1


def test_no_scale_is_so_small_that_marlin_takes_it_for_zero():
    w = random(4, 8, 64, torch.bfloat16)
    w[1] *= 1e-8
    parts = NVFP4.encode(w, NVFP4.prepare(iter([w])))
    assert parts[SCALE].float().min() == 2.0**-6
    assert not NVFP4.defects(parts)


def test_int4_makes_the_largest_weight_minus_eight():
    w = torch.zeros(2, 128)
    w[0, 3], w[1, 5] = 0.5, -0.5
    parts = INT4.encode(w)
    assert parts[SCALE].tolist() == [[-0.0625], [0.0625]]
    assert torch.equal(INT4.decode(each_row(INT4, parts, (2, 128))), w)
    assert parts[PACKED].dtype == torch.int32
