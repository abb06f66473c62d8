"""Weights as they are stored: in a float dtype, in FP8 E4M3 with scales, or in four bits (packed).

Chosen for: every product: `form_of` gives what a choice depends on, `dequant` decodes for `PRODUCT`
with 512 rows or more.

    w[n, k] ~ codes[n, k] * scale(n, k)

The scale belongs to a 128 x 128 block or to a row. Source: DeepSeek-V3 technical report, section
3.3; `weight_scale_inv` of the Qwen3.5 FP8 files and `weight_scale` of compressed-tensors hold the
same numbers. Trap: in spite of its name `weight_scale_inv` is multiplied, not divided by.

Shape letters: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from runtime.kernels.cases import FLOAT, FP8_BLOCK, FP8_CHANNEL
from runtime.kernels.conditions import FEW_ROWS
from runtime.kernels.launch import jit, tl, use_triton, widen
from runtime.kernels.linear.cpu import times_rows
from runtime.kernels.linear.packed import PackedWeight, unpacked_reference

BLOCK = 128
_STRIP = 8 * BLOCK
_FLOAT = FLOAT, False


@dataclass(frozen=True)
class Fp8Weight:
    """An FP8 weight [N, K], or a stack of them [E, N, K].

    codes    [..., N, K] float8_e4m3fn, contiguous
    scale    [..., ceil(N/128), ceil(K/128)] (block) or [..., N, 1] (channel), contiguous
    dynamic  `linear` quantises x too when x has more than 16 rows
    """

    codes: Tensor
    scale: Tensor
    dynamic: bool = False

    def __post_init__(self) -> None:
        scale_edge(self.codes, self.scale)

    def __getitem__(self, expert: int) -> Fp8Weight:
        return Fp8Weight(self.codes[expert], self.scale[expert], self.dynamic)

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the codes, the weight's own."""
        return self.codes.shape

    @cached_property
    def edge(self) -> int:
        """Return how many rows share a scale: 1 (channel) or 128 (block)."""
        return scale_edge(self.codes, self.scale)

    @cached_property
    def form(self) -> tuple[str, bool]:
        """Return how it is stored, and whether many rows of x are quantised too."""
        return FP8_CHANNEL if self.edge == 1 else FP8_BLOCK, self.dynamic

    def quantises(self, num_rows: int) -> bool:
        """Return whether `linear` quantises an x of so many rows."""
        return self.dynamic and num_rows > FEW_ROWS


Weight: TypeAlias = Tensor | Fp8Weight | PackedWeight


# what a kernel of two products takes where there is but one
NO_PRODUCT: tuple[object, ...] = (None, None, None, 0, 0, 0)


class Stored(NamedTuple):
    """A weight [N, K], or a stack of them [E, N, K], as the kernels are told about it.

    edge  rows that share a scale: 0 where there are no scales, else 1 or 128
    """

    values: Tensor
    scale: Tensor
    edge: int

    @staticmethod
    def of(weight: object) -> Stored:
        """Return what the kernels need; the layout is asserted."""
        if isinstance(weight, Fp8Weight):
            return Stored(weight.codes, weight.scale, weight.edge)
        assert isinstance(weight, Tensor), "the kernels take Tensors and Fp8Weights"
        assert weight.is_contiguous(), "weights must be contiguous"
        return Stored(weight, weight, 0)

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """Return the scale's strides; that of columns is 0 where a row has one scale."""
        return *self.scale.stride()[:-1], int(self.edge > 1)

    @property
    def is_fp8(self) -> bool:
        """Return whether a number takes one byte."""
        return self.values.element_size() == 1

    def to_product(self, y: Tensor) -> tuple[object, ...]:
        """Return what a kernel takes of a weight and of its product y [1, N]."""
        return self.values, self.scale, y, y.shape[1], *self.scale_strides


def form_of(weight: Weight) -> tuple[str, bool]:
    """Return how a weight is stored, and whether many rows of x are quantised too."""
    return _FLOAT if isinstance(weight, Tensor) else weight.form


def stored_bytes(weight: Weight) -> int:
    """Return the bytes of a weight's numbers, without those of scales."""
    if isinstance(weight, Fp8Weight):
        return weight.codes.nbytes
    return weight.nbytes if isinstance(weight, Tensor) else weight.words.nbytes


def adjacent(first: Weight, second: Weight) -> tuple[Weight, Weight]:
    """Return both weights, the second behind the first in memory if they are floats of one dtype.

    `joined_rows` then finds the one weight [N1 + N2, K] that they are.
    """
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return first, second
    if first.dtype != second.dtype:
        return first, second
    whole = torch.cat([first, second])
    return whole[: first.shape[0]], whole[first.shape[0] :]


def joined_rows(first: Weight, second: Weight) -> Tensor | None:
    """Return the one weight that two are in memory, if they are."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return None
    storages = first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()
    behind = second.data_ptr() == first.data_ptr() + first.nbytes
    alike = first.dtype == second.dtype and first.shape[1:] == second.shape[1:]
    if not (behind and alike and storages[0] == storages[1] and first.is_contiguous()):
        return None
    rows = first.shape[0] + second.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def check_rows(x_MK: Tensor, most: int, *weights: Stored) -> tuple[int, int]:
    """Return the numbers of rows, at most so many, and of columns."""
    rows, k = x_MK.shape
    assert 1 <= rows <= most, f"these kernels are for {most} rows or fewer"
    assert x_MK.stride(1) == 1, "rows must be contiguous"
    assert all(w.values.shape[1] == k for w in weights), "as many columns as x has"
    return rows, k


def scale_edge(codes: Tensor, scale: Tensor) -> int:
    """Return how many rows share a scale, 1 (channel) or 128 (block), from the scale's shape."""
    *stack, n, k = codes.shape
    assert codes.dtype == torch.float8_e4m3fn, f"codes must be float8_e4m3fn, not {codes.dtype}"
    assert codes.is_contiguous(), "codes must be contiguous"
    assert scale.is_contiguous(), "the scale must be contiguous"
    assert scale.dtype in (torch.bfloat16, torch.float32, torch.float64), "the scale must be float"
    if scale.shape == (*stack, n, 1):
        return 1
    grid = (*stack, -(-n // BLOCK), -(-k // BLOCK))
    assert scale.shape == grid, f"a scale of {list(codes.shape)} codes is {list(grid)} or per row"
    return BLOCK


def dequant_reference(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Say what `dequant` computes, in plain torch."""
    n, k = codes.shape[-2:]
    factor = widen(scale)
    if scale_edge(codes, scale) == BLOCK:
        factor = factor.repeat_interleave(BLOCK, -2)[..., :n, :]
        factor = factor.repeat_interleave(BLOCK, -1)[..., :k]
    return (codes.to(factor.dtype) * factor).to(dtype)


def linear_fp8_reference(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Say what `linear_fp8` computes, in plain torch; 1024 rows of the weight at a time."""
    edge = scale_edge(codes, scale)
    x = widen(x_MK)
    y_MN = x.new_empty((x.shape[0], codes.shape[0]))
    for row in range(0, codes.shape[0], _STRIP):
        end = row + _STRIP
        weight = dequant_reference(codes[row:end], scale[row // edge : end // edge], x.dtype)
        y_MN[:, row:end] = times_rows(x, weight)
    return y_MN.to(x_MK.dtype)


def product_reference(x_MK: Tensor, weight: Weight) -> Tensor:
    """Return x @ weight.T in x's dtype, x not being quantised, in plain torch."""
    if isinstance(weight, Fp8Weight):
        return linear_fp8_reference(x_MK, weight.codes, weight.scale)
    if isinstance(weight, PackedWeight):
        x = widen(x_MK)
        return times_rows(x, unpacked_reference(weight).to(x.dtype)).to(x_MK.dtype)
    return times_rows(x_MK, weight)


def dequant(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes * scale [..., N, K], multiplied in float32 and rounded once to `dtype`.

    codes, scale  as in Fp8Weight
    """
    edge = scale_edge(codes, scale)
    if not use_triton(codes):
        return dequant_reference(codes, scale, dtype)
    n, k = codes.shape[-2:]
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    grid = (-(-n // BLOCK), -(-k // BLOCK), codes.numel() // (n * k))
    _dequant_kernel[grid](
        codes,
        scale,
        out,
        n,
        k,
        *scale.shape[-2:],
        int(edge > 1),
        EDGE=edge,
        ROWS=BLOCK,
        COLS=BLOCK,
        num_warps=8,
    )
    return out


@jit
def _dequant_kernel(
    codes,
    scale,
    out,
    N,
    K,
    scale_rows,
    scale_cols,
    scale_col,
    EDGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    e = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    at = (e * N + rows)[:, None] * K + cols[None, :]
    x = tl.load(codes + at, mask=inside, other=0.0).to(tl.float32)
    s_row = (e * scale_rows + rows // EDGE) * scale_cols + tl.program_id(1) * scale_col
    s = tl.load(scale + s_row, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + at, (x * s[:, None]).to(out.dtype.element_ty), mask=inside)
