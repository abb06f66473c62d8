"""Codes of a prompt times an FP8 weight, by warps with roles: some load, some multiply.

Chosen for: `CODES_PRODUCT` of prompts on Hopper, block scales, where tiles of cuBLAS would leave
most multiprocessors without one in the end.

    y[m, n] = sum_g x_scale[m, g] * scale[n / 128, g] * (sum over 128 columns of products of codes)

What a program computes is in roles_tile, how warps work together in ring. A program is as large as
a multiprocessor and walks along tiles of 128 rows of x and 160 or 192 of the weight.

Shape letters: M rows of x, N rows of the weight, K columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.linear.roles_tile import kernel
from runtime.kernels.linear.weight import BLOCK
from runtime.kernels.overlap import early
from runtime.kernels.ring import PARTS, TILE, multiprocessors, tiles
from runtime.kernels.waves import best_width

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.encode.rows import Codes
    from runtime.kernels.linear.weight import Fp8Weight

# what fits a multiprocessor, by the width of a tile
_STAGES = {160: 5, 192: 4}
# arrivals at a stage: the bulk copies, and each thread that loads a scale
_OPTIONS = {"ARRIVALS": 1 + 128, "MULTIPLY": 232, "LOAD": 40, **PARTS}
_TOGETHER = 16  # rows of tiles, whose codes stay in the L2 cache


def roles_linear(
    x: Codes, weight: Fp8Weight, dtype: torch.dtype, width: int | None = None
) -> Tensor:
    """Return the product of codes with the weight [M, N], M the rows of the codes.

    weight  block scales, N and K in whole blocks of 128
    dtype   of 16 bits
    width   of a tile, 160 or 192; None: what suits the size
    """
    (m, k), n = x.codes.shape, weight.shape[0]
    assert n % BLOCK == k % BLOCK == 0, "the weight must come in whole blocks"
    assert x.scale.stride(0) == 1, "columns of scales must be contiguous"
    y_MN = torch.empty((m, n), dtype=dtype, device=x.codes.device)
    width = width or best_width(m, n)
    rows, columns, further = -(-m // TILE), -(-n // width), width - TILE
    programs = min(multiprocessors(x.codes.get_device()), rows * columns)
    kernel[(programs,)](
        tiles(x.codes),
        x.scale,
        tiles(weight.codes),
        tiles(weight.codes, further),
        weight.scale,
        tiles(y_MN, TILE // 2),
        tiles(y_MN, TILE // 2, further),
        x.scale.stride(1),
        weight.scale.stride(0),
        m,
        n,
        k // BLOCK,
        rows,
        columns,
        min(rows, _TOGETHER),
        FURTHER=further,
        STAGES=_STAGES[width],
        **_OPTIONS,
        **early(),
    )
    return y_MN
