"""The GPU's K-quants against the CPU's: the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.kernels.encode.k_quants import encode_k, encode_k_reference


def weight(n, k):
    """Blocks of every kind: zeros, constants, outliers, ties, lost scales, subnormal numbers."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02
    w[0, :288] = 0
    w[0, 288:352] = -0.5
    w[0, 360] *= 1000
    w[1, :256] *= 1e-38
    w[1, 256:512] = -0.1
    w[1, 300] = -0.2
    w[2, :200] = torch.arange(200) % 5 - 2.5
    w[2, 300:320] *= 1e-6
    w[2, 400:416] = 1e-20
    return w


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_the_kernel_writes_the_bytes_of_the_cpu(name, interpreter):
    """18 super-blocks: more than one program, and a last one that is not full."""
    w = weight(3, 1536)
    with np.errstate(all="ignore"):
        blocks = encode_k(name, w)
    assert torch.equal(blocks, encode_k_reference(name, w))


def test_a_bfloat16_weight_gives_the_bytes_of_its_float32_values():
    w = weight(3, 512).bfloat16()
    assert torch.equal(encode_k("Q4_K", w), encode_k("Q4_K", w.float()))


def test_no_rows_are_no_bytes():
    assert encode_k("Q4_K", torch.empty(0, 512)).shape == (0, 288)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_a_gpu_writes_the_bytes_of_the_cpu(name, dtype):
    w = torch.cat([weight(3, 5120), torch.randn(61, 5120)]).to("cuda", dtype)
    assert torch.equal(encode_k(name, w), encode_k_reference(name, w))
