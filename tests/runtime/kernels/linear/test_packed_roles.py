"""NVFP4 weights by warps with roles: compiled code is read, a GPU says what it computes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import silu

from runtime.kernels.encode.lined import lined_up_reference
from runtime.kernels.linear.packed_roles import (
    Tile,
    lined_gated,
    nvfp4_gated,
    nvfp4_parts,
    nvfp4_rows,
)
from tests.runtime.kernels.compiled import compiled_by
from tests.runtime.kernels.linear.stored import distance
from tests.runtime.kernels.linear.test_packed import stored
from tests.runtime.kernels.test_roles import CHIP, needs_gluon, needs_hopper

# rows of a weight and chunks of its columns: those of 27B, of 35B-A3B, small ones
WEIGHTS = [(34816, 20), (16384, 20), (14336, 20), (5120, 24), (5120, 68), (12288, 8), (64, 1)]


@pytest.fixture(scope="module")
def compiled():
    return compiled_by("linear.packed_roles_compiled")


@pytest.mark.all  # half a minute of compiling
@needs_gluon
def test_a_program_fits_a_multiprocessor_in_three_parts(compiled):
    for found in itertools.chain(*compiled.values()):
        assert found["shared"] <= CHIP
        assert found["warps"] == 12


@pytest.mark.all
@needs_gluon
def test_a_stage_expects_what_is_copied_to_it(compiled):
    """Words and scales before the wait, x, later words: else a group waits for ever."""
    for found in itertools.chain(*compiled.values()):
        words = found["blocks"] * 64 * (128 + 16)
        assert found["expected"] == found["copied"] == [words, 64 * 256 * 2, words]


@pytest.mark.all
@needs_gluon
def test_a_stage_is_full_when_its_copies_have_come(compiled):
    """Both groups empty it."""
    for found in itertools.chain(*compiled.values()):
        assert found["arrivals"] == [1, 2]


@pytest.mark.all
@needs_gluon
def test_groups_take_turns_with_the_tensor_cores_that_four_warps_share(compiled):
    """As often each, block by block; the second group gives the first its turn."""
    for found in itertools.chain(*compiled.values()):
        assert found["dots"] == found["started"] == 2 * found["blocks"]
        turns = -(-found["blocks"] // 2)
        assert found["taken"] == [turns, turns]
        assert found["passed"] == [turns + 1, turns]  # to the first group, to the second


@pytest.mark.parametrize(("rows", "chunks"), WEIGHTS)
def test_every_part_has_chunks_and_the_parts_have_all(rows, chunks):
    tile = Tile.parted(rows, chunks)
    part = -(-chunks // tile.parts)
    assert (tile.parts - 1) * part < chunks <= tile.parts * part
    assert tile.parts == 1 or -(-rows // (64 * tile.blocks)) * tile.parts <= 132


@pytest.mark.parametrize(("rows", "chunks"), WEIGHTS)
def test_a_lower_tile_would_take_two_turns(rows, chunks):
    blocks = Tile.whole(rows).blocks
    assert -(-rows // (64 * blocks)) <= 132
    assert blocks == 2 or -(-rows // (64 * (blocks - 1))) > 132


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("m", [33, 40, 64])
@pytest.mark.parametrize(("n", "k"), [(96, 256), (1000, 1280), (17000, 512), (5120, 6144)])
def test_products_by_roles_are_those_of_the_decoded_weight(m, n, k):
    """Beside float64, and the same twenty times: warps must not race.

    Products are exact; a sum of K loses less than 8 K^0.5 2^-24 of the sizes, a bfloat16 2^-8.
    """
    weight, exact = stored("nvfp4", n, k, device="cuda")
    x = torch.randn(m, k, device="cuda").bfloat16()
    expected = x.double() @ exact.cuda().double().T
    got, parts = nvfp4_rows(x, weight), nvfp4_parts(x, weight)
    assert distance(got, expected) < 2**-8
    assert distance(parts.sums.sum(0), expected) < k**0.5 * 2**-24 * 8
    for _ in range(20):
        assert torch.equal(nvfp4_rows(x, weight), got)
        assert torch.equal(nvfp4_parts(x, weight).sums, parts.sums)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("m", [33, 64])
@pytest.mark.parametrize(("f", "k"), [(80, 256), (640, 1280), (8800, 512)])
def test_gate_and_up_are_one_product(m, f, k):
    """Gate and up, silu and its product are rounded: four times 2^-8 at most."""
    weight, exact = stored("nvfp4", 2 * f, k, device="cuda")
    x = torch.randn(m, k, device="cuda").bfloat16()
    gate, up = (x.double() @ exact.cuda().double().T).chunk(2, -1)
    got = nvfp4_gated(x, weight)
    assert distance(got, silu(gate) * up) < 4 * 2**-8
    assert torch.equal(lined_gated(x, weight, None).values, lined_up_reference(got))
    for _ in range(20):
        assert torch.equal(nvfp4_gated(x, weight), got)
