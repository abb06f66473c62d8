"""FP8 weights from a checkpoint, codes and scales as the kernels read them.

They stay so where the blocks of all that is stored as one weight line up. Codes in E5M2, blocks
that are cut, and weights whose parts are of several forms are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant.fp8.form import CODES, SCALE
from quant.fp8.scales import CODE_TYPE
from quant.fp8.scheme import Fp8
from quant.stored import Value
from runtime.joined import fill
from runtime.kernels.linear.weight import BLOCK, Fp8Weight


def scale_edge(values: Sequence[Value]) -> int | None:
    """Return how many rows share a scale in a weight of these, 1 or 128; None: it is decoded."""
    edges = {_edge(value) for value in values}
    edge = edges.pop() if len(edges) == 1 else None
    aligned = edge == 1 or all(value.shape[0] % BLOCK == 0 for value in values[:-1])
    return edge if aligned else None


def fp8_weight(
    shape: tuple[int, ...],
    edge: int,
    groups: Sequence[Sequence[Value]],
    device: torch.device,
    *,
    dynamic: bool,
) -> Fp8Weight:
    """Return the weight of this shape: each group of values is one of a stack, or there is one.

    edge     of all of them, see `scale_edge`
    dynamic  its inputs are quantised too, see `Fp8Weight`
    """
    *lead, rows, columns = shape
    grid = (rows, 1) if edge == 1 else (-(-rows // BLOCK), -(-columns // BLOCK))
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((*lead, *grid), dtype=torch.float32, device=device)
    codes_, scale_ = codes.view(-1, rows, columns), scale.view(-1, *grid)
    for one, its_scale, values in zip(codes_, scale_, groups, strict=True):
        its_scale.copy_(torch.cat([_scales(value)[::edge] for value in values]))
        fill(one, values, _codes)
    return Fp8Weight(codes, scale, dynamic)


def _edge(value: Value) -> int | None:
    """Return how many rows share a scale: 1, 128, or None if it is not E4M3 or cut badly."""
    if not isinstance(value.scheme, Fp8) or value.scheme.code_type != CODE_TYPE:
        return None
    scales = _scales(value)
    if scales.shape[1] == 1:
        return 1
    by_block = scales[::BLOCK].repeat_interleave(BLOCK, 0)[: len(scales)]
    return BLOCK if torch.equal(by_block, scales) else None


def _codes(value: Value, first: int, last: int) -> Tensor:
    return value.stored(first, last)[CODES]


def _scales(value: Value) -> Tensor:
    """Return the scale of every row, float32 [N, G]."""
    assert isinstance(value.scheme, Fp8), "only FP8 has scales that kernels take"
    count = value.shape[0]
    return value.scheme.scale_of_rows(value.shared_rows(SCALE, 0, count), count)
