"""What a GPU encodes of ggml's types, and what it refuses: as the CPU's encoder does."""

from __future__ import annotations

import pytest
import torch

from quant.errors import QuantError
from quant.ggml import codec
from runtime.kernels.encode.ggml import ENCODERS, encode, encodes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def normal(n, k):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02


def test_types_are_encoded_with_an_importance_if_their_kernels_know_one():
    importance = torch.ones(256)
    for name, encoder in ENCODERS.items():
        assert encodes(name, None)
        assert encodes(name, importance) == encoder.weighted
    assert not encodes("Q8_0", None)
    assert not encodes("FP8-BLOCK", None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENCODERS)
def test_bytes_are_those_of_the_codec(name, device):
    w = normal(5, 768).bfloat16()
    assert torch.equal(encode(name, w.to(device)).cpu(), codec.encode(name, w))
    if ENCODERS[name].weighted:
        importance = torch.rand(768, generator=torch.Generator().manual_seed(1))
        blocks = encode(name, w.to(device), importance).cpu()
        assert torch.equal(blocks, codec.encode(name, w, importance=importance))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "NaN or infinite"), (1e30, "largest weight"), (2e9, "largest weight")],
)
def test_a_weight_that_cannot_be_stored_is_refused(name, device, value, message):
    w = normal(2, 512)
    w[1, 300] = value
    with pytest.raises(QuantError, match=message):
        encode(name, w.to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_an_importance_that_is_none_is_refused(device):
    w = normal(2, 512).to(device)
    with pytest.raises(QuantError, match="shape"):
        encode("IQ3_S", w, torch.ones(256))
    with pytest.raises(QuantError, match="negative"):
        encode("IQ3_S", w, -torch.ones(512))
