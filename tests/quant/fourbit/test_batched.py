"""Many matrices together: parts as good as the CPU's, and those of each matrix alone."""

from __future__ import annotations

import pytest
import torch

from quant.choices import Choices
from quant.errors import QuantError
from quant.fourbit import cpu, device
from quant.fourbit.batched import Factors, encode_together
from quant.fourbit.hessian import Factor, factor
from quant.fourbit.int4 import INT4
from quant.fourbit.int8 import INT8
from quant.fourbit.mxfp4 import MXFP4
from quant.fourbit.nvfp4 import NVFP4
from quant.stored import each_row
from runtime.kernels.gptq import BLOCKS
from tests.runtime.kernels.gptq import on_the_cpu

ASYMMETRIC = INT4.with_choices(Choices(group=32, symmetric=False))
FORMS = (NVFP4, NVFP4.in_dialect("modelopt"), MXFP4, INT4, ASYMMETRIC, INT8)
IDS = ["nvfp4", "modelopt", "mxfp4", "int4", "asym", "int8"]
schemes = pytest.mark.parametrize("scheme", FORMS, ids=IDS)
everywhere = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def problem(rows=16, columns=256, matrices=3):
    """Return weights, one far larger than the others, and the Hessians of their inputs."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(matrices, rows, columns, generator=generator) * 0.02
    w[1] *= 8
    x = torch.randn(matrices, 2 * columns, columns, generator=generator)
    x = (x + 0.5 * x.roll(1, 2)) * torch.randn(matrices, 1, columns, generator=generator).exp()
    x[0, :, 5] = 0
    return w.bfloat16(), x.mT @ x / (2 * columns)


def moved(known, where):
    tensors = known.upper, known.order, known.diagonal, known.hessian
    return Factor(*(x.to(where) for x in tensors), known.added)


def together(scheme, w, hessians, where="cpu", blocks=on_the_cpu.BLOCKS):
    prepared = [scheme.prepare(iter([one])) for one in w]
    factors = Factors.of([moved(factor(h), where) for h in hessians], blocks)
    return list(encode_together(scheme, w.to(where), prepared, factors))


def loss(scheme, parts, w, h):
    missed = w.float() - scheme.decode(each_row(scheme, parts, tuple(w.shape)))
    return float(((missed @ h) * missed).sum())


@schemes
@everywhere
def test_outputs_are_as_good_as_by_the_codes_of_the_cpu(scheme, where):
    """Sums are rounded in another order: a few units differ, the error of the output does not."""
    w, hessians = problem()
    found = together(scheme, w, hessians, where, BLOCKS)
    for one, h, parts in zip(w, hessians, found, strict=True):
        alone = scheme.encode(one, scheme.prepare(iter([one])), factor=factor(h))
        assert {k: (x.shape, x.dtype) for k, x in parts.items()} == {
            k: (x.shape, x.dtype) for k, x in alone.items()
        }
        assert loss(scheme, parts, one, h) == pytest.approx(loss(scheme, alone, one, h), rel=0.05)


@schemes
def test_a_matrix_does_not_depend_on_those_beside_it(scheme):
    """But for products, whose sums torch may order by how many matrices there are."""
    w, hessians = problem()
    whole = together(scheme, w, hessians)
    for e, parts in enumerate(whole):
        (alone,) = together(scheme, w[e : e + 1], hessians[e : e + 1])
        known = loss(scheme, alone, w[e], hessians[e])
        assert loss(scheme, parts, w[e], hessians[e]) == pytest.approx(known, rel=0.02)


@schemes
def test_the_same_matrices_give_the_same_bytes(scheme):
    w, hessians = problem()
    for one, other in zip(*(together(scheme, w, hessians) for _ in range(2)), strict=True):
        for key, tensor in one.items():
            flat = (x.reshape(-1).view(torch.uint8) for x in (tensor, other[key]))
            assert torch.equal(*flat)


def test_a_weight_that_is_not_finite_is_refused():
    w, hessians = problem()
    w[2, 3, 4] = torch.inf
    with pytest.raises(QuantError):
        together(INT4, w, hessians)


@everywhere
def test_groups_are_encoded_like_on_the_cpu(where):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 32, generator=generator)
    w[:8] = torch.arange(256).view(8, 32) / 8 - 16  # ties
    d = torch.rand(64, generator=generator) + 0.5
    d[:8], zero = 2.0, torch.arange(64.0) % 5
    there = w.to(where), d.to(where)
    assert torch.equal(device.encode_e2m1(*there), cpu.encode_e2m1(w, d))
    for bits in (4, 8):
        expected = cpu.encode_int(w, d, zero, bits)
        assert torch.equal(device.encode_int(*there, zero.to(where), bits), expected)
    for x in (w, w.bfloat16()):
        found = device.extremes(x.to(where), 16)
        for one, other in zip(found, cpu.extremes(x, 16), strict=True):
            assert torch.equal(one.cpu(), other)
