"""The GPU's I-quants against the CPU's: the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.ggml.i_quants import KINDS, encode_rows
from quant.ggml.kinds import I_QUANTS
from runtime.kernels.encode import i_quants
from runtime.kernels.encode.i_quants import encode_i, encode_i_reference
from tests.quant.ggml.test_k_quants import KINDS as SHAPES
from tests.quant.ggml.test_k_quants import importance

NAMES = tuple(I_QUANTS)


def weight(kinds, n, k, seed):
    """Rows of several kinds: zeros, constants, outliers, ties, subnormal numbers, lost scales."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy(np.concatenate([kind(n, k, draw).astype(np.float32) for kind in kinds]))


def importance_of(k, seed):
    return torch.from_numpy(importance(k, np.random.default_rng(seed)))


def by_cpu(name, w, weights=None):
    """Encode without the codec's checks: the rows hold scales beyond float16 too."""
    blocks = torch.empty_like(encode_i_reference(name, torch.zeros_like(w).cpu()))
    halves = w.dtype == torch.bfloat16
    bits = w.cpu().view(torch.uint16) if halves else w.cpu()
    encode_rows(name, bits.numpy(), None if weights is None else weights.numpy(), blocks.numpy())
    return blocks


# What takes the interpreter longest.
SLOW = dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ3_S"), pytest.mark.all)


# The interpreter's time is proportional to the number of scales that are tried: here, to fewer.
@pytest.fixture
def few_attempts(monkeypatch):
    for name, kind in KINDS.items():
        few = kind._replace(attempts=(1, 3 * kind.attempts[1]))
        monkeypatch.setitem(KINDS, name, few)


@pytest.mark.parametrize(
    ("name", "weighted"),
    [
        *(pytest.param(name, True, marks=SLOW.get(name, ())) for name in NAMES),
        ("IQ2_S", False),
        pytest.param("IQ3_XXS", False, marks=pytest.mark.all),
    ],
)
def test_the_kernel_writes_the_bytes_of_the_cpu(
    name, weighted, interpreter, few_attempts, monkeypatch
):
    monkeypatch.setattr(i_quants, "LANES", 1024)
    w = weight(SHAPES, 1, 768, 0)
    weights = importance_of(768, 1) if weighted else None
    with np.errstate(all="ignore"):
        blocks = encode_i(name, w, weights)
    assert torch.equal(blocks, by_cpu(name, w, weights))


def test_a_last_program_that_is_not_full(interpreter, few_attempts, monkeypatch):
    """Two programs, of 16 and of 8 blocks."""
    monkeypatch.setattr(i_quants, "LANES", 16)
    w = weight(SHAPES[:1], 3, 256, 2)
    with np.errstate(all="ignore"):
        blocks = encode_i("IQ3_S", w)
    assert torch.equal(blocks, by_cpu("IQ3_S", w))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_no_bytes(name, interpreter):
    none = torch.empty(0, 512)
    assert encode_i(name, none).shape == encode_i_reference(name, none).shape


@pytest.mark.gpu
@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    kinds=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    n=st.integers(1, 9),
    k=st.sampled_from([256, 512, 768, 5120]),
    seed=st.integers(0, 2**16),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_gpu_writes_the_bytes_of_the_cpu(name, kinds, n, k, seed, weighted, dtype):
    w = weight(kinds, n, k, seed).to("cuda", dtype)
    weights = importance_of(k, seed) if weighted else None
    blocks = encode_i(name, w, None if weights is None else weights.cuda())
    assert torch.equal(blocks.cpu(), by_cpu(name, w, weights))
