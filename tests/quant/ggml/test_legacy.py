"""The compiled encoders and decoders of ggml's types against ggml's own C, to the byte."""

import gguf
import libgguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.ggml import codec as ggml
from quant.ggml import kinds
from tests.quant.rows import heavy_tailed, normal, one_outlier

ROUNDED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "NVFP4")
SEARCHED = ("IQ4_NL", "IQ4_XS")
WEIGHTED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", *SEARCHED)


def zeros(n, k, draw):
    """Of both signs: blocks whose scale is a zero take their sign from the first."""
    return torch.zeros(n, k) * torch.randn(n, k, generator=draw)


def sparse(n, k, draw):
    return zeros(n, k, draw) + normal(n, k, draw) * (torch.rand(n, k, generator=draw) < 0.05)


def positive(n, k, draw):
    """With zeros of both signs as minimum."""
    return torch.where(torch.rand(n, k, generator=draw) < 0.9, normal(n, k, draw).abs(), -0.0)


def tiny(n, k, draw):
    """Blocks around the smallest normal float32 and below, where 1 / d overflows and logs wrap."""
    exponent = torch.randint(-149, -110, (n, k // 32), generator=draw).float()
    return normal(n, k, draw) * exponent.exp2().repeat_interleave(32, 1)


def below_powers_of_two(n, k, draw):
    """One ulp below 2^i, where ggml's float32 logarithm is i already."""
    powers = torch.randint(-20, 12, (n, k), generator=draw).float().exp2()
    return torch.nextafter(powers, torch.zeros(()))


def integers(n, k, draw):
    """Ties, of codes and of largest magnitudes."""
    return torch.randint(-9, 10, (n, k), generator=draw).float()


KINDS = (
    normal,
    heavy_tailed,
    one_outlier,
    zeros,
    sparse,
    positive,
    tiny,
    below_powers_of_two,
    integers,
)


def importance(k, draw):
    """Mean squares, some of them zero."""
    x = torch.randn(k, generator=draw) ** 2
    return torch.where(torch.rand(k, generator=draw) < 0.1, 0.0, x)


def by_ggml(name, w, weights=None):
    table = None if weights is None else weights.numpy()
    rows = w.float().contiguous().numpy()
    return libgguf.quantize_rows(rows, gguf.GGMLQuantizationType[name].value, imatrix=table)


def blocks_that_differ(name, ours, theirs):
    size = kinds.block(name)[1]
    return int((ours.reshape(-1, size) != theirs.reshape(-1, size)).any(1).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*ROUNDED, *SEARCHED])
def test_bytes_are_those_of_ggml(name, kind, dtype):
    w = kind(7, 768, torch.Generator().manual_seed(0)).to(dtype)
    assert blocks_that_differ(name, ggml.encode(name, w).numpy(), by_ggml(name, w)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTED)
def test_bytes_are_those_of_ggml_with_an_importance_matrix(name, kind):
    draw = torch.Generator().manual_seed(0)
    w, weights = kind(7, 768, draw), importance(768, draw)
    ours = ggml.encode(name, w, importance=weights)
    assert blocks_that_differ(name, ours.numpy(), by_ggml(name, w, weights)) == 0


@settings(deadline=None, max_examples=100)
@given(
    name=st.sampled_from([*ROUNDED, *SEARCHED]),
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 9),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    weighted=st.booleans(),
)
def test_bytes_are_those_of_ggml_for_every_number_of_rows(name, kind, n, blocks, seed, weighted):
    draw = torch.Generator().manual_seed(seed)
    k = blocks * kinds.block(name)[0]
    w = kind(n, k, draw)
    weights = importance(k, draw) if weighted else None
    ours = ggml.encode(name, w, importance=weights)
    expected = by_ggml(name, w, None if name in kinds.UNWEIGHTED else weights)
    assert blocks_that_differ(name, ours.numpy(), expected) == 0


@pytest.mark.parametrize("name", [name for name in ROUNDED if name != "NVFP4"])
def test_the_gguf_package_differs_in_the_sign_of_a_zero_only(name):
    draw = torch.Generator().manual_seed(0)
    w = torch.cat([kind(7, 768, draw) for kind in (normal, heavy_tailed, zeros, sparse, integers)])
    ours = ggml.encode(name, w).numpy()
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[name])
    size = kinds.block(name)[1]
    ours, theirs = ours.reshape(-1, size), theirs.reshape(-1, size)
    b, at = (ours ^ theirs).nonzero()
    # the upper bytes of a float16 scale and minimum, which are zeros
    assert set(at.tolist()) <= {"Q4_0": {1}, "Q5_0": {1}, "Q4_1": {3}, "Q5_1": {3}}.get(name, set())
    assert (ours[b, at] ^ theirs[b, at] == 0x80).all()
    assert (ours[b, at] & 0x7F | ours[b, at - 1] == 0).all()


@pytest.mark.parametrize("name", [*ROUNDED, *SEARCHED])
def test_values_are_those_of_ggml_for_any_bytes(name):
    columns, size = kinds.block(name)
    data = torch.randint(0, 256, (37, 5 * size), generator=torch.Generator().manual_seed(0))
    data = data.to(torch.uint8)
    data.view(-1, size)[:, 1] &= 0xBB  # no infinite scale, nor NaN
    if name in {"Q4_1", "Q5_1"}:
        data.view(-1, size)[:, 3] &= 0xBB
    ours = ggml.decode(name, data, 5 * columns)
    qtype = gguf.GGMLQuantizationType[name]
    assert np.array_equal(ours.numpy(), libgguf.dequantize_rows(data.numpy(), qtype.value))
    with np.errstate(over="ignore"):
        assert np.array_equal(ours.numpy(), gguf.quants.dequantize(data.numpy(), qtype))


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16)])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_are_those_of_torch(name, dtype, source):
    draw = torch.Generator().manual_seed(0)
    w = torch.cat([kind(3, 96, draw) for kind in (normal, heavy_tailed, zeros, tiny)]).to(source)
    blocks = ggml.encode(name, w)
    assert torch.equal(blocks, w.to(dtype).view(torch.uint8))
    assert torch.equal(ggml.decode(name, blocks, 96), w.to(dtype).float())
    assert torch.equal(ggml.decode(name, blocks.view(dtype), 96), w.to(dtype).float())


@settings(deadline=None)
@given(
    bits=st.lists(st.integers(0, 0x7F7F7FFF), min_size=1, max_size=40),
    sign=st.sampled_from([-1, 1]),
)
def test_bfloat16_is_rounded_to_even(bits, sign):
    w = torch.tensor(bits, dtype=torch.int32).view(torch.float32)[None] * sign
    assert torch.equal(ggml.encode("BF16", w).view(torch.bfloat16), w.bfloat16())


def test_scales_whose_inverse_overflows_have_codes_of_zero():
    """1 / (127 * 2^-149) is 2^142: float32 has no such number, and C makes the infinity a 0."""
    w = torch.full((1, 32), 127 * 2.0**-149)
    assert (ggml.encode("Q8_0", w) == 0).all()
    assert (ggml.encode("Q4_0", w)[0, 2:] == 0).all()


def test_mxfp4_takes_the_next_scale_just_below_a_power_of_two():
    """log2(2^9 - 2^-15) is 9 - 8.6e-8, which float32 rounds to 9: the exponent is 9 - 2 + 127."""
    w = torch.zeros(1, 32)
    w[0, 0] = torch.nextafter(torch.tensor(512.0), torch.zeros(()))
    assert ggml.encode("MXFP4", w)[0, 0] == 134
    w[0, 0] = 511
    assert ggml.encode("MXFP4", w)[0, 0] == 133
