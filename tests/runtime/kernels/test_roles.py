"""Kernels in Gluon have no interpreter: what is compiled is read, a GPU says what it computes."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.kernels.encode.rows import quantize_rows
from runtime.kernels.launch import HAS_GLUON, gluon_runs
from runtime.kernels.linear.weight import Fp8Weight, Stored
from runtime.kernels.moe.roles import roles_pairs
from runtime.kernels.moe.w8a8 import w8a8_pairs
from tests.runtime.kernels.compiled import compiled_by
from tests.runtime.kernels.moe.test_w8a8 import COUNTS, chosen, normal

CHIP = 227 << 10  # bytes that a program may have of a multiprocessor of Hopper
COPIES = 128  # threads that load, each of which says that its own copies have come
GATE_UP, DOWN = 0, 1

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="Triton 3.6 or later is not installed")
needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and gluon_runs(0)), reason="needs a Hopper GPU"
)


@pytest.fixture(scope="module")
def compiled():
    return compiled_by("roles_compiled")


@pytest.mark.all  # half a minute of compiling
@needs_gluon
def test_a_program_fits_a_multiprocessor_in_three_parts(compiled):
    for found in itertools.chain(*compiled.values()):
        assert found["shared"] <= CHIP
        assert found["warps"] == 12


@pytest.mark.all
@needs_gluon
def test_a_stage_expects_what_is_copied_to_it(compiled):
    """Else a group waits for ever, or reads what has not come."""
    for found in itertools.chain(*compiled.values()):
        assert found["expected"] == found["copied"] != []


@pytest.mark.all
@needs_gluon
def test_a_stage_is_full_when_all_that_load_have_said_so(compiled):
    """One for the bulk copies, and each thread where threads copy; both groups empty it."""
    for gate_up, down in compiled.values():
        assert gate_up["arrivals"] == [2, 1 + COPIES]
        assert down["arrivals"] == [1, 2]


@pytest.mark.all
@needs_gluon
def test_every_barrier_is_waited_for(compiled):
    """One that nobody waits for shares its place with what is written there later."""
    for found in itertools.chain(*compiled.values()):
        assert found["unshared"] == []


@pytest.mark.all
@needs_gluon
def test_products_are_started_and_waited_for_later(compiled):
    """Of down a product runs while the one before it is scaled, but for the last."""
    both = 2  # groups of warps
    for name, kernels in compiled.items():
        for found in kernels:
            assert found["dots"] == found["started"] == len(found["left"])
        groups = int(name.split()[1]) // 128
        assert kernels[GATE_UP]["left"] == both * [0, 0]
        assert kernels[DOWN]["left"] == both * ([1] * (groups - 1) + [0])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("counts", "hidden", "inner"),
    [
        (COUNTS, 384, 128),
        ((1, 65, 129), 256, 256),
        ((513, 0, 300), 2048, 512),
        ((3, 130, 71), 1024, 1024),
        ((3, 130, 70, 0, 64) * 90, 768, 128),  # several blocks for each program
    ],
)
def test_experts_by_roles_compute_what_others_do(counts, hidden, inner):
    """Beside the kernels whose warps do all: sums of other orders, then codes next to a tie."""

    def stack(n, k, seed):
        codes = normal(len(counts), n, k, seed=seed).mul(100).clamp(-448, 448)
        scale = normal(len(counts), n // 128, k // 128, seed=seed + 1).exp() / (100 * k**0.5)
        weight = Fp8Weight(codes.to(torch.float8_e4m3fn).cuda(), scale.cuda(), dynamic=True)
        return Stored.of(weight)

    experts = chosen(counts, 3).contiguous().cuda()
    x = normal(len(experts), hidden).bfloat16().cuda()
    weights = normal(*experts.shape, seed=1).softmax(-1).bfloat16().cuda()
    codes = quantize_rows(x, 128, 16)
    args = x, stack(2 * inner, hidden, 2), stack(hidden, inner, 4), weights, experts, codes
    got, expected = roles_pairs(*args).rows, w8a8_pairs(*args).rows
    assert ((got - expected).float().norm() / expected.float().norm()) < 0.01
    assert torch.equal(roles_pairs(*args).rows, got)
