"""Codes, scales and packing against compressed-tensors, to the byte."""

from __future__ import annotations

import pytest
import torch

from quant.choices import Choices
from quant.fourbit.int4 import INT4
from quant.fourbit.int8 import INT8
from quant.fourbit.mxfp4 import MXFP4
from quant.fourbit.nvfp4 import NVFP4
from quant.fourbit.parts import GLOBAL, PACKED, SCALE, SHAPE, ZERO

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

ASYMMETRIC = INT4.with_choices(Choices(group=32, symmetric=False))


def weights(rows: int = 48, columns: int = 256) -> torch.Tensor:
    """Return numbers with a heavy tail, some rows far smaller, one group of zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(rows * columns)
        w = torch.distributions.StudentT(5.0).sample((rows, columns)) * 0.02
    w[1] *= 1e-2
    w[2, :128] = 0
    return w.bfloat16()


def scheme_of(scheme):
    """Return what compressed-tensors makes of our config entry."""
    entry = scheme.config_entry(["Linear"])
    args = QuantizationArgs(**entry["weights"])
    return QuantizationScheme(targets=["Linear"], weights=args, format=entry["format"])


def compressed(scheme, w, **qparams):
    state = {"weight": w.float(), **{f"weight{key}": value for key, value in qparams.items()}}
    compressor = BaseCompressor.get_value_from_registry(scheme.config_entry([])["format"])
    return compressor.compress(state, scheme_of(scheme))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def test_nvfp4_is_theirs_to_the_byte():
    w = weights()
    args = scheme_of(NVFP4).weights
    largest = w.float().abs().max().reshape(1)
    whole = generate_gparam(-largest, largest).reshape(1)
    assert torch.equal(NVFP4.prepare(iter([w])), whole)
    groups = w.float().unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    ours = NVFP4.encode(w, whole)
    theirs = compressed(NVFP4, w, _scale=scale, _global_scale=whole)
    assert same(ours[PACKED], theirs["weight_packed"])
    assert same(ours[SCALE], theirs["weight_scale"])
    assert same(ours[GLOBAL], theirs["weight_global_scale"])


def test_mxfp4_is_theirs_to_the_byte():
    w = weights()
    groups = w.unflatten(1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme_of(MXFP4).weights)
    ours = MXFP4.encode(w)
    theirs = compressed(MXFP4, w, _scale=scale.float())
    assert same(ours[PACKED], theirs["weight_packed"])
    assert same(ours[SCALE], theirs["weight_scale"])


@pytest.mark.parametrize("scheme", [INT4, ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_int4_is_packed_as_theirs(scheme):
    w = weights()
    ours = scheme.encode(w)
    rows = {part.key: part for part in scheme.parts("weight", tuple(w.shape))}
    zero = {} if scheme.symmetric else {"_zero_point": rows[ZERO].unpack(ours[ZERO]).to(torch.int8)}
    theirs = compressed(scheme, w, _scale=ours[SCALE].float(), **zero)
    assert same(ours[PACKED], theirs["weight_packed"])
    assert list(rows[SHAPE].constant) == theirs["weight_shape"].tolist()
    assert scheme.symmetric or same(ours[ZERO], theirs["weight_zero_point"])


def test_zero_points_are_theirs():
    w = weights()
    args, groups = scheme_of(ASYMMETRIC).weights, w.float().unflatten(1, (-1, 32))
    ends = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale, zero = calculate_qparams(*ends, args)
    ours = ASYMMETRIC.encode(w)
    assert torch.equal(ours[SCALE].float()[0], scale.bfloat16().float()[0])
    (part,) = (p for p in ASYMMETRIC.parts("", tuple(w.shape)) if p.key == ZERO)
    # theirs divide by the step before it is rounded to bfloat16: a tie may fall the other way
    gap = (part.unpack(ours[ZERO]) - zero.int()).abs()
    assert gap[3:].max() <= 1
    assert (gap[3:] == 0).float().mean() > 0.98


def test_int8_is_theirs():
    w = weights()
    ours = INT8.encode(w)
    theirs = compressed(INT8, w, _scale=ours[SCALE].float())
    assert same(ours["codes"], theirs["weight"])
    scale, _ = calculate_qparams(
        w.float().amin(1, keepdim=True), w.float().amax(1, keepdim=True), scheme_of(INT8).weights
    )
    assert torch.equal(ours[SCALE].float(), scale.bfloat16().float())
