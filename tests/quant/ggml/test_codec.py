"""The API over ggml's types: sizes, fallbacks, refusals, and the bound on what may be lost."""

import subprocess
import sys

import gguf
import libgguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.errors import QuantError
from quant.ggml import codec as ggml
from quant.ggml import kinds
from tests.quant.rows import heavy_tailed, normal, one_outlier

# One worker: ggml fills its tables of IQ2 at their first use, for 13 seconds of a process.
pytestmark = pytest.mark.xdist_group("ggml")
LOSSY = tuple(name for name in kinds.WRITABLE if name != "F32")
BOUNDED = tuple(name for name in kinds.BOUNDED if name != "F32")
SEARCHED = (*kinds.K_QUANTS, "IQ4_NL", "IQ4_XS")
READ_ONLY = ("IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0")


def sparse(n, k, draw):
    return normal(n, k, draw) * (torch.rand(n, k, generator=draw) < 0.05)


def far_from_zero(n, k, draw):
    """Blocks of one sign, where minima matter."""
    return normal(n, k, draw) + torch.randint(-2, 3, (n, 1), generator=draw)


def uneven_blocks(n, k, draw):
    """Blocks whose scales are lost in that of their super-block."""
    exponent = torch.randn(n, k // 16, generator=draw) * 4
    return normal(n, k, draw) * exponent.exp2().repeat_interleave(16, 1)


def tiny(n, k, draw):
    """Scales that are subnormal in float16, or zero."""
    return normal(n, k, draw) * float(torch.rand((), generator=draw).mul(-40).exp2())


KINDS = (normal, heavy_tailed, one_outlier, sparse, far_from_zero, uneven_blocks, tiny)


def stored(name, w, weights=None):
    """Return what a weight is after it was stored; K-quants by ggml itself."""
    if name not in kinds.SUPER_BLOCKS:
        return ggml.decode(name, ggml.encode(name, w, importance=weights), w.shape[1])
    qtype = gguf.GGMLQuantizationType[name].value
    table = None if weights is None else weights.numpy()
    blocks = libgguf.quantize_rows(w.float().numpy(), qtype, imatrix=table)
    return torch.from_numpy(libgguf.dequantize_rows(blocks, qtype))


def importance(k, draw):
    """Mean squares that differ by orders of magnitude, some of them zero."""
    x = torch.randn(k, generator=draw) ** 2 * (torch.randn(k, generator=draw) * 3).exp2()
    return torch.where(torch.rand(k, generator=draw) < 0.1, 0.0, x)


@settings(deadline=None, max_examples=150)
@pytest.mark.all
@given(
    name=st.sampled_from(BOUNDED),
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 9),
    k=st.sampled_from([256, 768]),
    seed=st.integers(0, 2**16),
    weighted=st.booleans(),
)
def test_nothing_that_was_rounded_is_outside(name, kind, n, k, seed, weighted):
    draw = torch.Generator().manual_seed(seed)
    w = kind(n, k, draw)
    weights = importance(k, draw) if weighted else None
    assert ggml.outside(name, w, stored(name, w, weights), importance=weights) == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", kinds.BOUNDED)
def test_rows_or_columns_in_another_order_are_outside(name, weighted):
    draw = torch.Generator().manual_seed(0)
    w = normal(17, 1024, draw)
    weights = torch.randn(1024, generator=draw) ** 2 if weighted else None
    decoded = stored(name, w, weights)
    order = torch.randperm(1024, generator=draw)
    for wrong in (decoded.roll(1, 0), decoded.roll(1, 1), decoded[:, order], -decoded):
        assert ggml.outside(name, w, wrong, importance=weights) > w.numel() / 5


@pytest.mark.parametrize("name", kinds.BOUNDED)
def test_one_wrong_weight_is_outside(name):
    w = normal(3, 512, torch.Generator().manual_seed(0)).bfloat16()
    decoded = stored(name, w)
    for wrong in (1.0, float("nan"), float("inf")):
        damaged = decoded.clone()
        damaged[1, 300] = wrong
        assert ggml.outside(name, w, damaged) >= 1
    assert ggml.outside(name, w[:0], decoded[:0]) == 0


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "MXFP4", "NVFP4", "BF16", "F16"])
def test_the_bound_of_rounded_types_is_reached(name):
    """A weight between two codes is half a step off, to the precision of the scale."""
    w = torch.zeros(1, 64)
    w[0, :3] = {
        "Q8_0": torch.tensor([127, 63.5, 1]),
        "Q4_0": torch.tensor([-8, 0.5, 7.99]),
        "Q4_1": torch.tensor([15, 0.5, 7.5]),
        "MXFP4": torch.tensor([4, 0.25, 0.75]),
        "NVFP4": torch.tensor([6, 0.25, 0.75]),
        "BF16": torch.tensor([1 + 2**-8, 1, 1]),
        "F16": torch.tensor([1 + 2**-11, 1, 1]),
    }[name]
    decoded = stored(name, w)
    assert ggml.outside(name, w, decoded) == 0
    assert ggml.outside(name, w, w + (decoded - w) * 1.1) >= 1


@pytest.mark.parametrize("name", kinds.WRITABLE)
def test_sizes_are_those_of_the_gguf_package(name):
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert kinds.block(name) == (columns, size)
    assert kinds.row_bytes(name, 3 * columns) == 3 * size
    assert kinds.columns(name, 3 * size) == 3 * columns
    if columns > 1:
        with pytest.raises(QuantError, match=f"blocks of {columns} columns, a row has 33"):
            kinds.row_bytes(name, 33)
        with pytest.raises(QuantError, match=f"expected a multiple of {size}"):
            kinds.columns(name, size + 1)


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("Q4_K", 512, "Q4_K"),
        ("Q4_K", 288, "Q5_0"),
        ("Q5_K", 288, "Q5_1"),
        ("Q6_K", 288, "Q8_0"),
        ("Q2_K", 32, "Q4_0"),
        ("Q3_K", 32, "Q4_0"),
        ("TQ2_0", 32, "Q4_0"),
        ("IQ3_S", 32, "IQ4_NL"),
        ("IQ4_XS", 96, "IQ4_NL"),
        ("Q4_K", 40, "F16"),
        ("Q8_0", 40, "F16"),
        ("MXFP4", 33, "F16"),
        ("NVFP4", 96, "Q8_0"),
        ("BF16", 33, "BF16"),
    ],
)
def test_rows_of_odd_length_get_the_type_that_llama_quantize_takes(name, columns, expected):
    assert kinds.fallback(name, columns) == expected


@pytest.mark.parametrize("name", kinds.WRITABLE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(name, bad):
    w = torch.zeros(5, 256, dtype=torch.bfloat16)
    w[3, 130] = bad
    with pytest.raises(QuantError, match=r"1 of 1280 weights .* first at \[3, 130\]"):
        ggml.encode(name, w)


@pytest.mark.parametrize("name", [name for name in LOSSY if name not in {"BF16", "MXFP4", "NVFP4"}])
def test_a_scale_beyond_float16_is_refused(name):
    with pytest.raises(QuantError, match=rf"largest weight is 3e\+38.*\n.*{name} would store"):
        ggml.encode(name, torch.full((2, 256), 3e38))
    with pytest.raises(QuantError, match=f"{name} would store an infinity"):
        ggml.encode(name, torch.full((2, 256), 3e9), importance=torch.ones(256))


def test_values_that_round_to_an_infinity_are_refused():
    with pytest.raises(QuantError, match="F16 would store an infinity"):
        ggml.encode("F16", torch.full((1, 3), 65520.0))
    assert ggml.encode("F16", torch.full((1, 3), 65519.0)).view(torch.float16).max() == 65504


def test_types_that_cannot_be_written_or_do_not_exist_are_named():
    w = torch.zeros(1, 256)
    for call in (lambda: ggml.encode("IQ1_S", w), lambda: ggml.outside("IQ1_S", w, w)):
        with pytest.raises(QuantError, match=r"IQ1_S (cannot be written|has no bound).*\n.* Q4_K "):
            call()
    with pytest.raises(QuantError, match="IQ3_S has no bound"):
        ggml.outside("IQ3_S", w, w)
    with pytest.raises(QuantError, match=r"ggml has no type 'Q9_K'"):
        ggml.encode("Q9_K", w)
    with pytest.raises(QuantError, match=r"Q8_1 cannot be read"):
        ggml.decode("Q8_1", torch.zeros(1, kinds.row_bytes("Q8_1", 32), dtype=torch.uint8), 32)


@pytest.mark.parametrize("name", READ_ONLY)
def test_types_of_others_are_decoded_by_the_gguf_package(name):
    columns, size = kinds.block(name)
    data = torch.arange(3 * 2 * size).remainder(97).to(torch.uint8).view(3, 2 * size)
    expected = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(ggml.decode(name, data, 2 * columns).numpy(), expected)


def test_rows_of_another_length_are_refused():
    data = torch.zeros(2, 34, dtype=torch.uint8)
    with pytest.raises(QuantError, match=r"34 bytes,\n  expected 68: 64 columns of Q8_0"):
        ggml.decode("Q8_0", data, 64)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(64), r"shape \[64\],\n  expected \[256\]"),
        (torch.full((256,), -1.0), "negative"),
        (torch.full((256,), float("nan")), "NaN"),
    ],
)
@pytest.mark.parametrize("name", ["IQ4_XS", "Q8_0"])
def test_importance_that_is_none_is_refused(name, weights, message):
    with pytest.raises(QuantError, match=message):
        ggml.encode(name, torch.zeros(1, 256), importance=weights)


@pytest.mark.parametrize("take", [lambda w: w.T, lambda w: w[3:200:2], lambda w: w[:, 64:128]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_views_and_every_float_are_taken(take, dtype):
    w = take(normal(256, 256, torch.Generator().manual_seed(0)).to(dtype))
    assert torch.equal(ggml.encode("Q8_0", w), ggml.encode("Q8_0", w.float().clone()))


@pytest.mark.parametrize("name", kinds.WRITABLE)
def test_rows_are_encoded_by_themselves_and_where_they_are_wanted(name):
    w = normal(13, 512, torch.Generator().manual_seed(0))
    weights = torch.linspace(0.1, 1, 512)
    whole = ggml.encode(name, w, importance=weights)
    out = torch.zeros_like(whole)
    for rows in (slice(0, 5), slice(5, 12), slice(12, 13)):
        ggml.encode(name, w[rows], importance=weights, out=out[rows])
    assert torch.equal(out, whole)
    assert ggml.encode(name, w[:0]).shape == (0, whole.shape[1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", kinds.SUPER_BLOCKS)
def test_super_blocks_go_to_their_own_loops(name, weighted):
    w = normal(5, 512, torch.Generator().manual_seed(0)).bfloat16()
    weights = torch.linspace(0.1, 1, 512) if weighted else None
    blocks = ggml.encode(name, w, importance=weights)
    if name in kinds.WEIGHTED_ONLY and not weighted:
        weights = torch.ones(512)
    assert torch.equal(ggml.decode(name, blocks, 512), stored(name, w, weights))


def test_importing_the_table_imports_nothing_heavy():
    heavy = {"torch", "numba", "gguf", "numpy"}
    code = f"import sys, quant.ggml.codec\nprint({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
