from __future__ import annotations

import pytest
import torch

from runtime.kernels.encode.rows import Codes, quantize_rows
from runtime.kernels.moe.sum import (
    Pairs,
    add_pairs_rmsnorm,
    add_pairs_rmsnorm_reference,
    summed,
    summed_reference,
)
from runtime.kernels.norm.rms import add_rmsnorm

EPS = 1e-6


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("hidden", [37, 128, 1500])
@pytest.mark.usefixtures("interpreter")
def test_the_fused_kernel_gives_the_bits_of_one_after_the_other(k, hidden):
    pairs, w = Pairs(normal(3 * k, hidden), k), normal(hidden, seed=2)
    residual = normal(3, 2 * hidden, seed=1)[:, hidden:]
    y, total = add_pairs_rmsnorm(pairs, residual, w, EPS)
    assert torch.equal(summed(pairs), summed_reference(pairs))
    expected_y, expected_total = add_rmsnorm(summed(pairs), residual, w, EPS)
    assert torch.equal(total, expected_total)
    assert torch.equal(y, expected_y)
    expected_y, expected_total = add_pairs_rmsnorm_reference(pairs, residual, w, EPS)
    assert torch.equal(total, expected_total)
    assert (y - expected_y).abs().max() <= 1e-6 * expected_y.abs().max()


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (17, 640)])
@pytest.mark.usefixtures("interpreter")
def test_the_fused_kernel_leaves_codes_of_the_norm(rows, hidden):
    pairs, w = Pairs(normal(3 * rows, hidden), 3), normal(hidden, seed=2)
    args, codes = (pairs, normal(rows, hidden, seed=1), w, EPS), Codes.room(rows, hidden, w.device)
    y, total = add_pairs_rmsnorm(*args, codes)
    expected_y, expected_total = add_pairs_rmsnorm(*args)
    assert torch.equal(y, expected_y)
    assert torch.equal(total, expected_total)
    expected = quantize_rows(y, 128)
    got = codes.codes[:rows].view(torch.uint8)
    assert torch.equal(got, expected.codes.view(torch.uint8))
    assert torch.equal(codes.scale[:rows], expected.scale)


def test_terms_are_added_in_float32_and_rounded_before_the_residual_is_added():
    rows = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    residual = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    assert summed(Pairs(rows, 3)).item() == 1 + 2**-7
    total = add_pairs_rmsnorm(Pairs(rows, 3), residual, torch.zeros(1), EPS)[1]
    assert total.item() == 2**-7
    rows[1] = 2**-10
    rows[2] = 2**-10
    assert add_pairs_rmsnorm(Pairs(rows, 3), residual, torch.zeros(1), EPS)[1].item() == 0
