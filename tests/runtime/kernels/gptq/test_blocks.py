"""The blocks of GPTQ: the kernels against their references, and these against the CPU's loops.

In the interpreter `fma` rounds twice, so units may differ where a number is next to a tie.
"""

from __future__ import annotations

import pytest
import torch

from quant.fourbit.rows import Rows
from runtime.kernels.gptq.pairs import pair_block, pair_block_reference
from runtime.kernels.gptq.settle import settle_block, settle_block_reference
from runtime.kernels.gptq.units import as_bfloat16
from runtime.kernels.gptq.walk import walk_block, walk_block_reference
from runtime.kernels.launch import jit, tl
from tests.runtime.kernels.gptq import on_the_cpu

# matrices, rows, columns, columns of a group, bits: two blocks, the second one short; rows that do
# not fill a tile, or more than one
SHAPES = [(1, 5, 144, 16, 0), (2, 3, 160, 32, 4), (1, 5, 136, 136, 8), (1, 3, 48, 16, 4)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=["e2m1", "int4", "int8", "short"])
PAIRS = [(2, 5, 256, 128, 4), SHAPES[1], SHAPES[3]]  # whole numbers in groups up to a block
pairs = pytest.mark.parametrize(
    "shape",
    [pytest.param(PAIRS[0], marks=pytest.mark.all), *PAIRS[1:]],
    ids=["g128", "g32", "short"],
)


def problem(matrices, n, k, group, bits, device="cpu"):
    """Return rows, and a Hessian, what is added to its diagonal, and a factor that is not its."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(matrices, 2 * k, k, generator=generator)
    hessian = x.mT @ x / (2 * k)
    upper = torch.eye(k) + 0.05 * torch.randn(matrices, k, k, generator=generator).triu(1)
    step = 0.03 + 0.02 * torch.rand(matrices, n, k // group, generator=generator)
    step = (step / (16 if bits == 8 else 1)).bfloat16().float()
    zero = torch.arange(step.numel()).view(step.shape) % 3 * (1.0 if bits == 4 else 0.0)
    w = torch.randn(matrices, n, k, generator=generator) * 0.1
    order = torch.stack([torch.randperm(k, generator=generator) for _ in range(matrices)])
    added = 0.01 * torch.arange(1.0, matrices + 1)
    here = [x.to(device).contiguous() for x in (w, step, zero, torch.zeros_like(w))]
    rest = [x.to(device).contiguous() for x in (hessian, added, upper, (order // group).int())]
    return Rows(*here, bits), *rest


def walked(function, shape, device="cpu"):
    """Return the units of all blocks, and what their columns missed."""
    rows, _, _, upper, group = problem(*shape, device)
    missed = []
    for first, block in rows.blocks():
        function(rows, upper, group, first, block)
        missed.append(block)
    return rows.units.cpu(), torch.cat(missed, -1).cpu()


def settled(function, shape, device="cpu"):
    """Return units, what q moved by, and the steps, of all blocks."""
    rows, hessian, added, _, _ = problem(*shape, device)
    rows.units.copy_((rows.w / rows.d.repeat_interleave(rows.group, -1)).round())
    slope = torch.randn(rows.w.shape, generator=torch.Generator().manual_seed(5)) * 0.1
    slope, moved = slope.to(device), []
    for first, block in rows.blocks():
        function(rows, slope, hessian, added, first, block)
        moved.append(block)
    return rows.units.cpu(), torch.cat(moved, -1).cpu(), rows.d.cpu()


def same(found, expected):
    """Hold all but a hundredth of the numbers to what is expected."""
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert torch.isclose(one, other, rtol=1e-3, atol=1e-5).float().mean() > 0.99


@shapes
def test_the_reference_of_walk_is_the_loop_of_the_cpu(shape):
    same(walked(walk_block_reference, shape), walked(on_the_cpu.walk_block, shape))


@shapes
def test_the_reference_of_settle_is_the_loop_of_the_cpu(shape):
    same(settled(settle_block_reference, shape), settled(on_the_cpu.settle_block, shape))


@shapes
def test_the_kernel_of_walk_is_its_reference(shape, interpreter):
    same(walked(walk_block, shape), walked(walk_block_reference, shape))


@shapes
def test_the_kernel_of_settle_is_its_reference(shape, interpreter):
    same(settled(settle_block, shape), settled(settle_block_reference, shape))


@pairs
def test_the_reference_of_pairs_is_the_loop_of_the_cpu(shape):
    found = settled(pair_block_reference, shape)
    assert found[1].any()
    same(found, settled(on_the_cpu.pair_block, shape))


@pairs
def test_the_kernel_of_pairs_is_its_reference(shape, interpreter):
    same(settled(pair_block, shape), settled(pair_block_reference, shape))


@jit
def _round_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, as_bfloat16(tl.load(x + i)))


def test_steps_are_rounded_as_torch_rounds_to_bfloat16(interpreter):
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    x[::4] = x[::4].bfloat16().float() * (1 + 2**-8)  # halfway
    out = torch.empty_like(x)
    _round_kernel[(1,)](x, out, SIZE=256)
    assert torch.equal(out, x.bfloat16().float())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [*SHAPES, (3, 100, 640, 16, 0), (3, 100, 640, 128, 4), (2, 40, 640, 640, 8)]
)
def test_a_gpu_walks_as_the_cpu_does(shape):
    same(walked(walk_block, shape, "cuda"), walked(on_the_cpu.walk_block, shape))
    same(settled(settle_block, shape, "cuda"), settled(on_the_cpu.settle_block, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*PAIRS, (3, 100, 640, 128, 4)])
def test_a_gpu_pairs_as_the_cpu_does(shape):
    same(settled(pair_block, shape, "cuda"), settled(on_the_cpu.pair_block, shape))
