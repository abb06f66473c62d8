from __future__ import annotations

import pytest
import torch

from runtime.kernels.encode.lined import Lined, lined_up, lined_up_reference
from runtime.kernels.launch import interpreting
from runtime.kernels.linear.packed import (
    E2M1_BITS,
    E2M1_VALUES,
    packed_nvfp4,
    turned,
    unpacked_reference,
)
from runtime.kernels.moe.sum import Pairs, add_pairs_rmsnorm
from runtime.kernels.norm.rms import Parts, add_rmsnorm, rmsnorm

EPS = 1e-6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def number(word, half, pair):
    """Return what a code of a pair is."""
    word = turned(word, half)
    code = sum(((word >> place) & 1) << 3 - i for i, place in enumerate(E2M1_BITS[pair]))
    return torch.tensor(E2M1_VALUES)[code & 7] * torch.where(code > 7, -1, 1)


def test_x_lies_where_a_thread_has_the_same_columns_of_a_weight():
    """Word 8 t + 4 u + 2 v + q of a row, pair p, half i: place i + 2 t + 8 v + 16 u + 32 p + 128 q.

    That is what the tensor cores sum over of a thread: 2 t + i and 8 more of each 16.
    """
    codes = torch.randint(16, (5, 512), generator=torch.Generator().manual_seed(1)).byte()
    weight = packed_nvfp4(codes, torch.ones(5, 512 // 16), torch.ones(5))
    got = torch.full((5, 512), torch.nan)
    for word in range(32):
        q, v, u, t = word % 2, word // 2 % 2, word // 4 % 2, word // 8
        for pair in range(4):
            for i in range(2):
                place = i + 2 * t + 8 * v + 16 * u + 32 * pair + 128 * q
                got[:, place::256] = number(weight.words[:, :, word].T, i, pair).float()
    assert torch.equal(got, lined_up_reference(unpacked_reference(weight)))


@pytest.mark.parametrize("k", [256, 512, 1300])
def test_the_kernel_lines_up_as_the_reference_does(k, interpreter):
    x = normal(3, k + 5)[:, :k]
    with interpreting():
        got = lined_up(x)
    assert torch.equal(got.values, lined_up_reference(x))


@pytest.mark.parametrize("k", [512, 300])
def test_norms_line_up_what_they_write(k, interpreter):
    x, residual, w = normal(2, k), normal(2, k, seed=1), normal(k, seed=2)
    parts, pairs = Parts(normal(3, 2, k, seed=3)), Pairs(normal(6, k, seed=4), 3)
    made = []
    for write in (
        lambda room: (rmsnorm(x, w, EPS, room),),
        lambda room: add_rmsnorm(x, residual, w, EPS, room),
        lambda room: add_rmsnorm(parts, residual, w, EPS, room),
        lambda room: add_pairs_rmsnorm(pairs, residual, w, EPS, room),
    ):
        room = Lined.room(2, k, x)
        with interpreting():
            made.append((write(room)[0], room.values))
    for normed, lined in made:
        assert torch.equal(lined, lined_up_reference(normed))
