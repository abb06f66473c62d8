"""Rows that make up for one another: against the definition, and what it gains for readers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quant.choices import Choices
from quant.fourbit.batched import Factors, encode_together
from quant.fourbit.hessian import factor
from quant.fourbit.int4 import INT4
from quant.fourbit.nvfp4 import NVFP4
from quant.fourbit.outputs import DAMP, outputs
from quant.stored import each_row
from tests.runtime.kernels.gptq.on_the_cpu import BLOCKS

ASYMMETRIC = INT4.with_choices(Choices(group=32, symmetric=False))
schemes = pytest.mark.parametrize(
    "scheme", [NVFP4, INT4, ASYMMETRIC], ids=["nvfp4", "int4", "asym"]
)


def gram(seed, rows, readers=None):
    """Return what readers of unequal, correlated outputs make of errors."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(readers or 2 * rows, rows, generator=generator)
    r = (r + r.roll(1, 1) + 0.5 * r.roll(3, 1)) * torch.randn(rows, generator=generator).exp()
    return r.T @ r


def problem(rows=96, columns=256):
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()
    x = torch.randn(2 * columns, columns, generator=generator)
    x += 0.5 * x.roll(1, 1)
    return w, x.T @ x / len(x)


def damped(g):
    return g.double() + DAMP * float(g.diagonal().mean()) * torch.eye(len(g))


def decoded(scheme, w, known):
    parts = scheme.encode(w, scheme.prepare(iter([w])), factor=known)
    return scheme.decode(each_row(scheme, parts, tuple(w.shape)))


def loss(w, q, h, g):
    missed = (w.float() - q).double()
    return float((g.double() * (missed @ h.double() @ missed.T)).sum())


@pytest.mark.parametrize("rows", [1, 16, 40, 300])
def test_each_slice_tells_the_rest_what_is_best_for_them(rows):
    g = gram(1, rows)
    known, exact, before = outputs(g), damped(g), 0
    for part, share in known.slices():
        assert part.start == before
        before = part.stop
        rest = slice(part.stop, rows)
        wanted = -torch.linalg.solve(exact[rest, rest], exact[rest, part])
        assert torch.allclose(share.double(), wanted, rtol=1e-4, atol=1e-5)
    assert before == rows


@schemes
def test_readers_of_the_outputs_see_less_of_the_error(scheme):
    w, h = problem()
    g, known = gram(2, len(w), readers=8), factor(h)
    alone = decoded(scheme, w, known)
    told = decoded(scheme, w, replace(known, outputs=outputs(g)))
    assert loss(w, told, h, damped(g)) < 0.95 * loss(w, alone, h, damped(g))


@schemes
def test_outputs_that_are_read_apart_are_independent(scheme):
    w, h = problem()
    known = factor(h)
    told = replace(known, outputs=outputs(torch.eye(len(w))))
    assert torch.equal(decoded(scheme, w, told), decoded(scheme, w, known))


@schemes
def test_many_matrices_together_do_as_well(scheme):
    w, h = problem()
    g = gram(3, len(w))
    known = replace(factor(h), outputs=outputs(g))
    prepared = scheme.prepare(iter([w]))
    both = Factors.of([known, known], BLOCKS)
    for parts in encode_together(scheme, torch.stack([w, w]), [prepared, prepared], both):
        q = scheme.decode(each_row(scheme, parts, tuple(w.shape)))
        expected = loss(w, decoded(scheme, w, known), h, damped(g))
        assert loss(w, q, h, damped(g)) == pytest.approx(expected, rel=0.05)


@schemes
def test_right_weights_pass_the_judge(scheme):
    w, h = problem(128, 512)
    known = replace(factor(h), outputs=outputs(gram(4, len(w))))
    parts = scheme.encode(w, scheme.prepare(iter([w])), factor=known)
    rows = each_row(scheme, parts, tuple(w.shape))
    assert scheme.judge(scheme.compare(w, rows)) == []


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_readers_of_nothing_leave_rows_independent(value):
    assert outputs(torch.full((8, 8), value)) is None
