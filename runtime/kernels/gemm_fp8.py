"""Linear layers on FP8 E4M3 weights whose scale belongs to a 128 x 128 block or to a row.

    weight only   y[m, n] = sum_k x[m, k] * codes[n, k] * scale(n, k)          summed in float32
    dynamic       the same on codes(x) * s(x) of quantize_rows, over 128 columns of a token (block
                  scales) or over the whole token (channel scales): W8A8, as vLLM and SGLang do

Source: DeepSeek-V3 technical report, section 3.3; `weight_scale_inv` of the Qwen3.5 FP8 files and
`weight_scale` of compressed-tensors hold the same numbers.
Trap: in spite of its name `weight_scale_inv` is multiplied, not divided by. And codes and scales
have to be multiplied in float32: their product, rounded to bfloat16, is another weight.

A weight byte is read once for up to 16 rows of x. Up to 4 rows that is a product in registers, for
more the weights are the left operand of the tensor cores, where they may come from registers.

Shape letters: M rows of x (tokens), N outputs, K inputs, G groups of 128 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.launch import autotune, jit, operand, power_of_two, tl, use_triton, widen
from runtime.kernels.quantize_rows import quantize_rows, quantize_rows_reference

BLOCK = 128
FEW_ROWS = 16
VECTOR_ROWS = 4
_STRIP = 8 * BLOCK
_PROGRAMS = 264  # two for each of the 132 multiprocessors of an H100


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

    def quantises(self, num_rows: int) -> bool:
        """Return whether `linear` quantises an x of so many rows."""
        return self.dynamic and num_rows > FEW_ROWS


Weight: TypeAlias = Tensor | Fp8Weight


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
        torch.mm(x, weight.T, out=y_MN[:, row:end])
    return y_MN.to(x_MK.dtype)


def linear_fp8_dynamic_reference(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Say what `linear_fp8_dynamic` computes, in plain torch."""
    group = x_MK.shape[1] if scale_edge(codes, scale) == 1 else BLOCK
    x_codes, x_scale = quantize_rows_reference(x_MK, group)
    x = x_codes.float() * x_scale.repeat_interleave(group, 1)[:, : x_MK.shape[1]]
    return linear_fp8_reference(x, codes, scale).to(x_MK.dtype)


def linear_reference(x_MK: Tensor, weight: Weight, batch: int | None = None) -> Tensor:
    """Say what `linear` computes, in plain torch.

    batch  the number of rows that decides about quantising x, where x is part of a larger batch
    """
    if not isinstance(weight, Fp8Weight):
        return F.linear(x_MK, weight)
    quantise = weight.quantises(batch or x_MK.shape[0])
    multiply = linear_fp8_dynamic_reference if quantise else linear_fp8_reference
    return multiply(x_MK, weight.codes, weight.scale)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return x @ weight.T [..., N] in x's dtype, whatever the weight is stored in.

    x       [..., K]
    weight  [N, K] in x's dtype, or an Fp8Weight
    """
    if not isinstance(weight, Fp8Weight):
        return F.linear(x, weight)
    x_MK = x.reshape(-1, x.shape[-1])
    multiply = linear_fp8_dynamic if weight.quantises(x_MK.shape[0]) else linear_fp8
    return multiply(x_MK, weight.codes, weight.scale).view(*x.shape[:-1], weight.shape[0])


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
        codes, scale, out, n, k, *scale.shape[-2:], int(edge > 1),
        EDGE=edge, ROWS=BLOCK, COLS=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


def linear_fp8(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return x @ (codes * scale).T [M, N] in x's dtype, summed in float32; x is not quantised.

    x_MK           [M, K] float, rows contiguous in themselves
    codes, scale   one weight, as in Fp8Weight
    """
    edge = _check(x_MK, codes, scale)
    if not use_triton(x_MK):
        return linear_fp8_reference(x_MK, codes, scale)
    (m, k), n = x_MK.shape, codes.shape[0]
    if m > VECTOR_ROWS:
        return _tiles(x_MK, None, codes, scale, x_MK.dtype)
    y_MN = torch.empty((m, n), dtype=x_MK.dtype, device=x_MK.device)
    _few_rows_kernel[lambda meta: (-(-n // meta["BLOCK_N"]),)](
        x_MK, codes, scale, y_MN, m, n, k, x_MK.stride(0), scale.stride(0), int(edge > 1),
        EDGE=edge, ROWS=power_of_two(m),
    )  # fmt: skip
    return y_MN


def linear_fp8_dynamic(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return x @ (codes * scale).T [M, N] in x's dtype with x quantised to E4M3 first (W8A8).

    x_MK          [M, K] float, rows contiguous in themselves; one scale for each token and 128
                  columns (block weights) or for each token (channel weights)
    codes, scale  one weight, as in Fp8Weight
    """
    edge = _check(x_MK, codes, scale)
    if not use_triton(x_MK):
        return linear_fp8_dynamic_reference(x_MK, codes, scale)
    x_codes, x_scale = quantize_rows(x_MK, x_MK.shape[1] if edge == 1 else BLOCK)
    return _tiles(x_codes, x_scale, codes, scale, x_MK.dtype)


def block_of_rows(num_rows: int) -> int:
    """Return how many rows of x a tensor-core tile takes: 16, which `tl.dot` asks for, to 128."""
    return min(max(power_of_two(num_rows), 16), 128)


def _check(x_MK: Tensor, codes: Tensor, scale: Tensor) -> int:
    edge = scale_edge(codes, scale)
    assert x_MK.ndim == codes.ndim == 2, "x and codes must be matrices"
    assert x_MK.shape[1] == codes.shape[1], "x and codes must have the same number of columns"
    assert x_MK.stride(1) == 1, "rows must be contiguous"
    return edge


def _tiles(
    x_MK: Tensor, x_scale: Tensor | None, codes: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the product [M, N] from the tensor cores; K is cut where few rows leave them idle."""
    (m, k), n, edge = x_MK.shape, codes.shape[0], scale_edge(codes, scale)
    parts = max(1, min(_PROGRAMS // -(-n // 64), k // (4 * BLOCK), 8)) if m <= FEW_ROWS else 1
    y_MN = torch.empty((m, n), dtype=dtype, device=x_MK.device)
    partial = y_MN if parts == 1 else y_MN.new_empty((parts, m, n), dtype=torch.float32)
    block_m = block_of_rows(m)
    _tiles_kernel[lambda meta: (-(-m // block_m) * -(-n // meta["BLOCK_N"]), parts)](
        x_MK, x_scale, codes, scale, partial, m, n, k, -(-k // (parts * BLOCK)) * BLOCK,
        x_MK.stride(0), scale.stride(0), int(edge > 1), EDGE=edge, BLOCK_M=block_m,
    )  # fmt: skip
    return y_MN if parts == 1 else partial.sum(0).to(dtype)


@jit
def _dequant_kernel(
    codes, scale, out, N, K, scale_rows, scale_cols, scale_col,
    EDGE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    at = (e * N + rows)[:, None] * K + cols[None, :]
    x = tl.load(codes + at, mask=inside, other=0.0).to(tl.float32)
    s_row = (e * scale_rows + rows // EDGE) * scale_cols + tl.program_id(1) * scale_col
    s = tl.load(scale + s_row, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + at, (x * s[:, None]).to(out.dtype.element_ty), mask=inside)


@jit
def row_products(
    x, weight, scale, rows, inside, M, K, x_row, scale_row, scale_col,
    EDGE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, BLOCK_N] float32: `rows` of the weight [N, K] times the first M rows of x.

    EDGE  rows that share a scale: 0 without scales, 1 or 128. Sixteen weights stay in one thread,
    so that a block's scale is applied once for them and threads meet only at the end.
    """
    VECTOR: tl.constexpr = 16
    NUM: tl.constexpr = BLOCK_K // VECTOR
    m = tl.arange(0, ROWS)[:, None, None, None]
    k_GV = tl.arange(0, NUM)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    w_rows = weight + rows.to(tl.int64)[:, None, None] * K
    total = tl.zeros((ROWS, BLOCK_N, NUM), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + k_GV)[None, :, :]
        w = tl.load(w_rows + k, mask=inside[:, None, None] & (k < K), other=0.0).to(tl.float32)
        k = k[None, :, :, :]
        x_k = tl.load(x + m * x_row + k, mask=(m < M) & (k < K), other=0.0).to(tl.float32)
        products = tl.sum(w[None, :, :, :] * x_k, 3)
        if EDGE > 1:
            g = (start + tl.arange(0, NUM) * VECTOR)[None, :]
            s = scale + (rows // EDGE)[:, None] * scale_row + g // 128 * scale_col
            s = tl.load(s, mask=inside[:, None] & (g < K), other=0.0).to(tl.float32)
            products *= s[None, :, :]
        total += products
    y = tl.sum(total, 2)
    if EDGE == 1:
        y *= tl.load(scale + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    return y


ROW_CHOICES = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps}
    for n, k, warps in ((8, 512, 4), (4, 1024, 4), (8, 1024, 8), (4, 512, 2), (16, 512, 8))
]


@autotune(ROW_CHOICES, key=["N", "K", "ROWS", "EDGE"])
@jit
def _few_rows_kernel(
    x, codes, scale, y, M, N, K, x_row, scale_row, scale_col,
    EDGE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y_MN = row_products(
        x, codes, scale, rows, rows < N, M, K, x_row, scale_row, scale_col,
        EDGE, ROWS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    m = tl.arange(0, ROWS)[:, None]
    inside = (m < M) & (rows < N)[None, :]
    tl.store(y + m * N + rows[None, :], y_MN.to(y.dtype.element_ty), mask=inside)


@jit
def _tile(program, tiles_m, tiles_n):
    """Return (tile of M, tile of N): 8 tiles of M share each weight tile while it is in L2."""
    per_group = 8 * tiles_n
    first = program // per_group * 8
    height = tl.minimum(tiles_m - first, 8)
    return first + program % per_group % height, program % per_group // height


@jit
def add_product(
    total, w, x, scale, x_scale, n, m, n_inside, m_inside, k, M, scale_row, scale_col,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Return total [N, M] plus the product of w [N, k] and x [k, M] with its block scales.

    scale  of the rows n of the weight, EDGE of which share one; 0: there are none
    x_scale  None, or [G, M] of the rows m of x, which is then in E4M3
    """
    w = operand(w.to(x.dtype))
    x = operand(x)
    if EDGE <= 1 and x_scale is None:
        return tl.dot(w, x, total, input_precision="ieee")
    # the tensor cores keep about 14 bits of an FP8 sum: each step is added in float32
    product = tl.dot(w, x, input_precision="ieee")
    if EDGE > 1:
        s_n = scale + n // EDGE * scale_row + k // 128 * scale_col
        product *= tl.load(s_n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        if x_scale is not None:
            product *= tl.load(x_scale + k // 128 * M + m, mask=m_inside, other=0.0)[None, :]
    return total + product


@jit
def scale_rows(total, scale, x_scale, n, m, n_inside, m_inside, EDGE: tl.constexpr):
    """Return total [N, M] times the scales that belong to whole rows of the weight and of x."""
    if EDGE == 1:
        total *= tl.load(scale + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        if x_scale is not None:
            total *= tl.load(x_scale + m, mask=m_inside, other=0.0)[None, :]
    return total


TILE_CHOICES = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    for n, k, warps, stages in (
        (64, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 8, 4),
        (128, 128, 8, 3), (128, 128, 8, 4),
    )
]  # fmt: skip


@autotune(TILE_CHOICES, key=["N", "K", "BLOCK_M", "EDGE"])
@jit
def _tiles_kernel(
    x, x_scale, codes, scale, out, M, N, K, part, x_row, scale_row, scale_col,
    EDGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    first = tl.program_id(1) * part
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + m.to(tl.int64)[None, :] * x_row + k[:, None]
    w_rows = codes + n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, tl.minimum(first + part, K), BLOCK_K):
        left = k < K - start
        x_KM = tl.load(x_rows + start, mask=(m < M)[None, :] & left[:, None], other=0.0)
        w_NK = tl.load(w_rows + start, mask=(n < N)[:, None] & left[None, :], other=0.0)
        total = add_product(
            total, w_NK, x_KM, scale, x_scale, n, m, n < N, m < M, start, M, scale_row, scale_col,
            EDGE,
        )  # fmt: skip
    total = scale_rows(total, scale, x_scale, n, m, n < N, m < M, EDGE)
    at = (tl.program_id(1) * M + m).to(tl.int64)[:, None] * N + n[None, :]
    y_MN = tl.trans(total).to(out.dtype.element_ty)
    tl.store(out + at, y_MN, mask=(m < M)[:, None] & (n < N)[None, :])
