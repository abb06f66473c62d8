"""GPTQ for ggml's types: where codes are, the plain definition, what it gains, what is judged."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quant.fourbit.ggml_codes import feed_back
from quant.fourbit.ggml_grids import CODES, put_codes, steps_of, take_codes
from quant.fourbit.hessian import Factor, factor
from quant.ggml import codec, kinds
from quant.ggml.scheme import BLOCKS
from quant.ggml_types import METHOD, GgmlTypes, ggml_type

COLUMNS = 256
types = pytest.mark.parametrize("name", CODES)


def weight(seed: int, rows: int = 16, columns: int = COLUMNS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * 0.02
    return (w * (1 + torch.rand(rows, 1, generator=generator))).bfloat16().float()


def hessian(seed: int, columns: int = COLUMNS, tokens: int = 1024) -> torch.Tensor:
    """Return the mean of x x^T of correlated inputs, some columns far larger."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ mixed
    x = x * torch.randn(columns, generator=generator).exp()
    return x.T @ x / tokens


def outside_values(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return what the gguf package decodes, float64."""
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind)).double()


def every_value(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the value of each code of each column under the scales of blocks, [codes, N, K]."""
    codes = CODES[name]
    shape = len(blocks), kinds.columns(name, blocks.shape[1])
    every = range(codes.least, codes.end)
    whole = (torch.full(shape, code, dtype=torch.int8) for code in every)
    return torch.stack([outside_values(name, put_codes(name, blocks, one)) for one in whole])


def fed_back_in_float64(w: torch.Tensor, values: torch.Tensor, known: Factor) -> torch.Tensor:
    """Return what GPTQ leaves of a weight: column by column the nearest value, its error moved on.

    values  [codes, N, K]
    """
    w, upper, out = w.double().clone(), known.upper.double(), torch.empty(w.shape).double()
    for i, column in enumerate(known.order.tolist()):
        nearest = (values[:, :, column] - w[:, column]).abs().argmin(0)
        out[:, column] = values[:, :, column].gather(0, nearest[None])[0]
        error = (w[:, column] - out[:, column]) / upper[i, i]
        w[:, known.order[i:]] -= error[:, None] * upper[i, i:]
    return out


def loss(w: torch.Tensor, q: torch.Tensor, h: torch.Tensor) -> float:
    missed = w.double() - q.double()
    return float(((missed @ h.double()) * missed).sum())


@types
def test_codes_are_where_the_decoder_has_them(name):
    """Whatever bytes there are: codes come back, and steps and zeros give what they decode to."""
    size, nbytes = kinds.block(name)
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (3, nbytes * (COLUMNS // size)), np.uint8))
    sane = codec.encode(name, weight(0, 3))
    blocks = put_codes(name, sane, take_codes(name, blocks).clamp(min=CODES[name].least))
    codes = take_codes(name, blocks)
    assert torch.equal(put_codes(name, sane, codes), blocks)
    step, zero, _ = (x.repeat_interleave(CODES[name].group, 1) for x in steps_of(name, blocks))
    units = codes.double() - zero.double()
    if CODES[name].values:
        units = torch.tensor(CODES[name].values).double()[codes.long() + CODES[name].end]
    values = units * step.double()
    assert torch.allclose(values, outside_values(name, blocks), rtol=0, atol=1e-7)


@types
def test_gptq_is_its_definition(name):
    """In float64 the same values follow, but where float32 falls on the other side of a tie.

    The largest weights are above 0, so that -128, which is left out afterwards, is never chosen.
    """
    w, known = weight(1), factor(hessian(1))
    w[:, ::32] = w.abs().max()
    blocks = feed_back(name, w, known, passes=0)
    expected = fed_back_in_float64(w, every_value(name, blocks), known)
    assert ((outside_values(name, blocks) - expected).abs() <= 1e-9).double().mean() > 0.999


@types
def test_it_beats_the_importance_and_the_importance_the_nearest(name):
    w, h = weight(2), hessian(2)
    scheme = ggml_type(name)
    known = {}, {"importance": h.diagonal()}, {"factor": factor(h)}
    nearest, weighed, fed = (loss(w, scheme.decode(scheme.encode(w, **k)), h) for k in known)
    assert fed < 0.7 * weighed
    assert weighed <= nearest * 1.001


@types
def test_ranges_of_rows_are_encoded_like_the_whole(name):
    w, known = weight(8), factor(hessian(8))
    pieces = [feed_back(name, part, known) for part in (w[:5], w[5:])]
    assert torch.equal(torch.cat(pieces), feed_back(name, w, known))


@types
def test_groups_of_one_value_stay_what_they_are(name):
    w, known = weight(3), factor(hessian(3))
    w[2], w[3, 32:64], w[4] = 0, 0, 0.25
    scheme = ggml_type(name, fed_back=True)
    blocks = scheme.encode(w, factor=known)
    q = scheme.decode(blocks)
    assert (q[2] == 0).all()
    assert q.isfinite().all()
    assert (q[4] - 0.25).abs().max() < 0.07  # half a step of two bits
    assert scheme.judge(scheme.compare(w, blocks)) == []


def test_columns_in_another_order_have_a_factor_in_that_order():
    h, order = hessian(4, 96), torch.randperm(96, generator=torch.Generator().manual_seed(4))
    moved, made = factor(h).moved(order), factor(h[order][:, order])
    for one, other in zip(
        (moved.order, moved.diagonal, moved.hessian), (made.order, made.diagonal, made.hessian),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(one, other)
    assert torch.allclose(moved.upper, made.upper, rtol=1e-4, atol=1e-5)


@types
def test_a_file_that_says_so_is_judged_by_it(name):
    told = GgmlTypes().told({METHOD: "gptq"}).told({})
    assert told.fed_back
    assert not GgmlTypes().told({METHOD: "sweep"}).fed_back
    scheme, w = ggml_type(name, fed_back=True), weight(5)
    rows = ggml_type(name).encode(w, factor=factor(hessian(5)))
    assert scheme.judge(scheme.compare(w, rows)) == []
    nearest = ggml_type(name).encode(w)
    assert scheme.judge(scheme.compare(w, nearest)) == []
    weighed = ggml_type(name).encode(w, importance=hessian(5).diagonal())
    assert scheme.judge(scheme.compare(w, weighed)) == []


WRONG = {
    "rows of another place": lambda rows: rows.roll(1, 0),
    "zeros": lambda rows: torch.zeros_like(rows),
    "codes of another row": None,
}


@types
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(name, what):
    scheme, w = ggml_type(name, fed_back=True), weight(6)
    rows = scheme.encode(w, factor=factor(hessian(6)))[BLOCKS]
    if WRONG[what]:
        wrong = WRONG[what](rows)
    else:
        wrong = put_codes(name, rows, take_codes(name, rows).roll(1, 0))
    assert scheme.judge(scheme.compare(w, {BLOCKS: wrong}))


@types
@pytest.mark.parametrize("times", [0.4, 0.5, 1.3, 2.0])
def test_scales_that_are_not_their_own_are_named(name, times):
    scheme, w = ggml_type(name, fed_back=True), weight(7)
    rows = scheme.encode(w, factor=factor(hessian(7)))[BLOCKS]
    wrong = rows.clone().view(-1, kinds.block(name)[1])
    for at in kinds.SUPER_BLOCKS.get(name, (0, 2) if name.endswith("1") else (0,)):
        half = wrong[:, at : at + 2].clone().view(torch.float16)
        wrong[:, at : at + 2] = (half * times).view(torch.uint8)
    assert scheme.judge(scheme.compare(w, {BLOCKS: wrong.view(rows.shape)}))
