"""GPTQ for IQ2 and IQ3: where points are, the plain definition, what it gains, what is judged."""

from __future__ import annotations

from itertools import pairwise, product

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.fourbit.ggml_points import feed_back
from quant.fourbit.hessian import Factor, factor
from quant.fourbit.point_fields import EIGHT, FIELDS
from quant.fourbit.point_walk import REACH, Walk
from quant.fourbit.points import put_points, take_points
from quant.ggml import codec, kinds
from quant.ggml.i_grids import levels
from quant.ggml.scheme import BLOCKS
from quant.ggml_types import METHOD, GgmlTypes, ggml_type
from tests.quant.fourbit.test_ggml_codes import COLUMNS, hessian, loss, outside_values, weight
from tests.quant.rows import heavy_tailed, normal, one_outlier

types = pytest.mark.parametrize("name", FIELDS)
OF_EIGHT = [name for name, fields in FIELDS.items() if fields.group == EIGHT]


def patterns(name: str) -> torch.Tensor:
    """Return all signs that eight columns may have, float64 [patterns, 8]."""
    every = torch.tensor([*product((1.0, -1.0), repeat=EIGHT)]).double()
    return every[(every < 0).sum(1) % 2 == 0] if FIELDS[name].even else every


def known_by(seed: int) -> Factor:
    return factor(hessian(seed), group=EIGHT)


@types
@given(seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_fields_are_where_the_decoder_has_them(name, seed):
    """Whatever bytes there are: fields come back, and give what the gguf package decodes."""
    fields, size = FIELDS[name], kinds.block(name)[1]
    rng = np.random.default_rng(seed)
    blocks = torch.from_numpy(rng.integers(0, 256, (3, 2 * size), np.uint8))
    blocks.view(-1, size)[:, :2] = torch.rand(6, 1).add(0.01).half().view(torch.uint8)
    points = take_points(name, blocks)
    assert torch.equal(put_points(name, blocks, points), blocks)
    units = levels(name)[points.point].reshape(3, -1)
    minus = np.unpackbits(points.sign, axis=1, bitorder="little").astype(bool)
    values = np.where(minus, -units, units) * points.steps(fields.block).repeat(EIGHT, 1)
    assert torch.equal(torch.from_numpy(values).double(), outside_values(name, blocks))


@types
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 5))
@settings(max_examples=5)
def test_what_is_written_decodes_to_what_was_chosen(name, seed, rows):
    w, known = weight(seed, rows), known_by(seed % 7)
    blocks = feed_back(name, w, known)
    chosen = Walk.of(name, known).values(take_points(name, blocks))
    stored = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(chosen, stored)


@pytest.mark.all
@pytest.mark.parametrize("name", OF_EIGHT)
def test_gptq_is_its_definition(name):
    """In float64, of all points and signs of an eight, those that lose least are chosen.

    What an eight costs is what is left when the columns behind it make up for it as well as they
    can: the Hessian of it and them, without them.
    """
    w, known = weight(1, 4), known_by(1)
    blocks = feed_back(name, w, known, passes=0)
    q, points = outside_values(name, blocks), take_points(name, blocks)
    steps = torch.from_numpy(points.steps(FIELDS[name].block)).double()
    grid, signs = torch.from_numpy(levels(name)).double(), patterns(name)
    h = known.hessian.double() + known.added * torch.eye(COLUMNS)
    left, found, least = w.double().clone(), [], []
    for place in range(0, COLUMNS, EIGHT):
        own, behind = known.order[place : place + EIGHT], known.order[place + EIGHT :]
        solved = torch.linalg.solve(h[behind][:, behind], h[behind][:, own])
        metric = h[own][:, own] - h[own][:, behind] @ solved
        for row in range(len(w)):
            step = steps[row, own[0] // EIGHT]
            every = left[row, own] - step * signs[:, None] * grid
            least.append(((every @ metric) * every).sum(-1).min())
            missed = left[row, own] - q[row, own]
            found.append(missed @ metric @ missed)
            left[row, behind] += solved @ missed
    found, least = torch.stack(found), torch.stack(least)
    assert (found <= least * 1.001).double().mean() > 0.97
    assert found.sum() < 1.001 * least.sum()


@types
def test_no_other_point_or_sign_is_better_once_all_is_settled(name):
    w, known, fields = weight(2, 3), known_by(2), FIELDS[name]
    blocks = feed_back(name, w, known)
    walker, points = Walk.of(name, known), take_points(name, blocks)
    slope = walker.slope(w.numpy() - walker.values(points))
    for _ in range(8):
        walker.settle(points, slope, 0)
    q = torch.from_numpy(walker.values(points)).double()
    h = known.hessian.double() + known.added * torch.eye(COLUMNS)
    slopes = (w.double() - q) @ h
    steps = torch.from_numpy(points.steps(fields.block)).double()
    grid = torch.from_numpy(levels(name)).double()
    for row, place in product(range(len(w)), range(0, COLUMNS, fields.group)):
        own = slice(place, place + fields.group)
        other = steps[row, place // EIGHT] * grid * q[row, own].sign()
        change = other - q[row, own]
        cost = ((change @ h[own, own]) * change).sum(1) - 2 * change @ slopes[row, own]
        assert cost.min() > -1e-5 * (w[row].double() @ h @ w[row].double()) / COLUMNS


@types
def test_it_beats_the_importance_and_passes_beat_gptq_alone(name):
    w, h = weight(3), hessian(3)
    scheme, made = ggml_type(name), factor(h)
    weighed = loss(w, scheme.decode(scheme.encode(w, importance=h.diagonal())), h)
    alone = loss(w, codec.decode(name, feed_back(name, w, made, passes=0), COLUMNS), h)
    fed = loss(w, scheme.decode(scheme.encode(w, factor=made)), h)
    assert alone < 0.75 * weighed
    assert fed < 0.9 * alone


@types
def test_each_pass_loses_no_more_by_the_damped_hessian(name):
    w, known = weight(4), known_by(4)
    damped = known.hessian + known.added * torch.eye(COLUMNS)
    every = [feed_back(name, w, known, passes) for passes in range(len(REACH) + 1)]
    losses = [loss(w, codec.decode(name, blocks, COLUMNS), damped) for blocks in every]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(losses))


@types
def test_ranges_of_rows_are_encoded_like_the_whole(name):
    w, known = weight(5), known_by(5)
    pieces = [feed_back(name, part, known) for part in (w[:5], w[5:])]
    assert torch.equal(torch.cat(pieces), feed_back(name, w, known))


def test_an_order_of_columns_is_brought_into_one_of_eights():
    known, made = known_by(6), factor(hessian(6)).joined(EIGHT)
    assert torch.equal(made.order, known.order)
    assert torch.equal(made.upper, known.upper)
    assert known.joined(EIGHT) is known
    eights = known.order.view(-1, EIGHT)
    assert torch.equal(eights, eights[:, :1] + torch.arange(EIGHT))


@types
def test_blocks_of_zeros_stay_what_they_are(name):
    w, known = weight(7), factor(hessian(7))
    w[2], w[3, 32:64] = 0, 0
    scheme = ggml_type(name, fed_back=True)
    blocks = scheme.encode(w, factor=known)
    q = scheme.decode(blocks)
    assert (q[2] == 0).all()
    assert q.isfinite().all()
    assert scheme.judge(scheme.compare(w, blocks)) == []


@types
@pytest.mark.parametrize("kind", [normal, heavy_tailed, one_outlier])
def test_a_file_that_says_so_is_judged_by_it(name, kind):
    """Whichever way a weight of it was encoded."""
    assert GgmlTypes().told({METHOD: "gptq"}).fed_back
    scheme, h = ggml_type(name, fed_back=True), hessian(5)
    w = kind(32, COLUMNS, torch.Generator().manual_seed(5)).float()
    known = {"factor": factor(h)}, {}, {"importance": h.diagonal()}
    for given_ in known:
        rows = ggml_type(name).encode(w, **given_)
        assert scheme.judge(scheme.compare(w, rows)) == [], [*given_]


def other_points(name: str, rows: torch.Tensor) -> torch.Tensor:
    points = take_points(name, rows)
    points.point = points.point[:, ::-1].copy()
    points.sign = points.sign[:, ::-1].copy()
    return put_points(name, rows, points)


WRONG = {
    "rows of another place": lambda _, rows: rows.roll(1, 0),
    "zeros": lambda _, rows: torch.zeros_like(rows),
    "points of other columns": other_points,
}


@types
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(name, what):
    scheme, w = ggml_type(name, fed_back=True), weight(6)
    rows = scheme.encode(w, factor=factor(hessian(6)))[BLOCKS]
    assert scheme.judge(scheme.compare(w, {BLOCKS: WRONG[what](name, rows)}))


@types
@pytest.mark.parametrize("times", [0.4, 0.5, 1.5, 2.0])
def test_scales_that_are_not_their_own_are_named(name, times):
    scheme, w = ggml_type(name, fed_back=True), weight(7)
    rows = scheme.encode(w, factor=factor(hessian(7)))[BLOCKS]
    wrong = rows.clone().view(-1, kinds.block(name)[1])
    half = wrong[:, :2].clone().view(torch.float16)
    wrong[:, :2] = (half * times).view(torch.uint8)
    assert scheme.judge(scheme.compare(w, {BLOCKS: wrong.view(rows.shape)}))
