"""Codes and scales against ModelOpt's, to the byte, and one way back for both dialects."""

from __future__ import annotations

import struct

import pytest
import torch

from formats.quant_methods import COMPRESSED, MODELOPT
from quant.fourbit.dialects import DIALECTS
from quant.fourbit.nvfp4 import NVFP4, NVFP4_INPUTS
from quant.fourbit.parts import GLOBAL, INPUTS, PACKED, SCALE

OURS = NVFP4.in_dialect(MODELOPT)
# NVFP4QTensor.quantize of `sample()`, ModelOpt 0.47.0: codes, scales, weight_scale_2; the second
# with the scale of a larger weight, as members of a fused matrix have it.
THEIRS = (
    (
        "2c6dbad2973b7cb0b3173a7ba2a3374a00000000000000006f59f196267ee9e3860d7dc8c3074c7cc0b4074b7ab0"
        "a41f5bf9a1851f5ae0a1162f6af2923f2ee9",
        "797b38797c7e4542",
        "4992e438",
    ),
    (
        "2c7dcbd2973b7db0b3173a7ba2a3374a00000000000000006f69f197267ee9e3860d7dc8c3074c7cc0b4074b7ab0"
        "a41f5bf9a1851f5af0a1162f7af2923f2ff9",
        "6265386266682f2b",
        "310c433a",
    ),
)


def sample() -> torch.Tensor:
    """Return BF16 [4, 32] with a group of zeros, a -0 and a row of small numbers."""
    i = torch.arange(4 * 32)
    w = (((i * 37 % 61 - 30) * (1 + i % 5)).float() / 512).reshape(4, 32)
    w[1, :16], w[2, 3] = 0, -0.0
    w[3] *= 2.0**-7
    return w.bfloat16()


def hexed(x: torch.Tensor) -> str:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


@pytest.mark.parametrize(("codes", "scale", "whole"), THEIRS, ids=["own scale", "shared scale"])
def test_codes_and_scales_are_theirs_to_the_byte(codes, scale, whole):
    w, given = sample(), torch.tensor(struct.unpack("<f", bytes.fromhex(whole))[0])
    own = (codes, scale, whole) == THEIRS[0]
    rows = OURS.encode(w, OURS.prepare(iter([w])) if own else given)
    assert (hexed(rows[PACKED]), hexed(rows[SCALE]), hexed(rows[GLOBAL])) == (codes, scale, whole)
    assert rows[GLOBAL].shape == ()


def test_they_decode_to_their_values():
    """NVFP4QTensor.dequantize of the same: code * (scale * weight_scale_2) in float32."""
    codes, scale, whole = (bytes.fromhex(x) for x in THEIRS[0])
    rows = {
        PACKED: torch.tensor(list(codes), dtype=torch.uint8).reshape(4, 16),
        SCALE: torch.tensor(list(scale), dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 2),
        GLOBAL: torch.tensor(struct.unpack("<f", whole)[0]),
    }
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    apart = torch.stack([rows[PACKED] & 15, rows[PACKED] >> 4], -1).flatten(1)
    step = (rows[SCALE].float() * rows[GLOBAL]).repeat_interleave(16, 1)
    assert torch.equal(OURS.decode(rows), values[apart.long()] * step)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_scale_is_one_that_marlin_takes_for_zero(dialect):
    """ModelOpt itself goes down to 2^-9."""
    scheme, w = NVFP4.in_dialect(dialect), sample()
    w[3] *= 2.0**-12
    rows = scheme.encode(w, scheme.prepare(iter([w])))
    assert float(rows[SCALE].float().min()) == 2.0**-6
    assert not scheme.defects(rows)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_matrix_of_zeros_decodes_to_zeros(dialect):
    scheme, w = NVFP4.in_dialect(dialect), torch.zeros(2, 32)
    rows = scheme.encode(w, scheme.prepare(iter([w])))
    assert not scheme.defects(rows)
    assert not scheme.decode(rows).any()


@pytest.mark.parametrize(
    ("dialect", "inputs", "right"),
    [
        (COMPRESSED, 2688 / 37.5, True),
        (COMPRESSED, 1.0, True),  # the fallback of compressed-tensors
        (COMPRESSED, 1.4e-45, False),
        (COMPRESSED, 4e15, False),
        (COMPRESSED, float("nan"), False),
        (COMPRESSED, -1.0, False),
        (COMPRESSED, 0.0, False),
        (MODELOPT, 37.5 / 2688, True),
        (MODELOPT, 1.0, True),
        (MODELOPT, 0.0, False),
        (MODELOPT, float("inf"), False),
        (MODELOPT, -1.0, False),
    ],
)
def test_a_scale_of_inputs_is_one_that_a_calibration_gives(dialect, inputs, right):
    scheme, w = NVFP4_INPUTS.in_dialect(dialect), sample()
    rows = scheme.encode(w, scheme.prepare(iter([w]))) | {INPUTS: torch.tensor(inputs).reshape(1)}
    assert bool(scheme.defects(rows)) is not right
