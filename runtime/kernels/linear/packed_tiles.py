"""Several rows times weights of four bits, in tiles of the tensor cores, or decoded before.

Chosen for: `PRODUCT` of two rows or more with packed weights; `spread` and the decoding for
`EXPERTS` too.

    y[m, n] = sum_k x[m, k] * w[n, k]               summed in float32, rounded once; see packed

x is first spread: its columns come in the order of the weight's planes. From 512 rows on the weight
is decoded and rounded to x's dtype, as loading it decoded would, and cuBLAS multiplies.

Shape letters: M rows of x, N outputs, K inputs, C chunks of 256 inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from runtime.kernels.launch import autotune, jit, tl, use_triton
from runtime.kernels.linear.packed import (
    CHUNK,
    PackedWeight,
    spread_reference,
    unpacked_reference,
)
from runtime.kernels.linear.packed_parts import planes_of, row_factor, tile_sums
from runtime.kernels.linear.tiles import block_of_rows, tile_of
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_PROGRAMS = 264  # two for each of the 132 multiprocessors of an H100
_MOST_ROWS = 64


def packed_linear_reference(x_MK: Tensor, weight: PackedWeight) -> Tensor:
    """Say what `packed_linear` computes, in plain torch."""
    return (x_MK.float() @ unpacked_reference(weight).T).to(x_MK.dtype)


def packed_linear(x_MK: Tensor, weight: PackedWeight) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype, the weight decoded in registers."""
    if not use_triton(x_MK):
        return packed_linear_reference(x_MK, weight)
    (m, n), chunks = (x_MK.shape[0], weight.shape[0]), weight.chunks
    parts = max(1, min(_PROGRAMS // (-(-n // 128) * -(-m // _MOST_ROWS)), chunks // 4, 8))
    x, y_MN = spread(x_MK, weight), x_MK.new_empty((m, n))
    partial = y_MN if parts == 1 else y_MN.new_empty((parts, m, n), dtype=torch.float32)
    block_m = min(block_of_rows(m), _MOST_ROWS)
    _tiles_kernel[lambda meta: (-(-m // block_m) * -(-n // meta["BLOCK_N"]), parts)](
        x,
        weight.words,
        weight.scale,
        weight.row,
        partial,
        m,
        n,
        chunks,
        -(-chunks // parts),
        FP4=int(weight.is_nvfp4),
        GROUP=weight.group,
        BLOCK_M=block_m,
    )
    if parts > 1:
        _sum_parts_kernel[(-(-m * n // 1024),)](
            partial, y_MN, m * n, PARTS=parts, BLOCK=1024, num_warps=4, **early()
        )
    return y_MN


def unpacked_linear(x_MK: Tensor, weight: PackedWeight) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype, the weight decoded and rounded to it before."""
    return F.linear(x_MK, unpacked(weight, x_MK.dtype))


def unpacked(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [..., N, K], decoded in float32 and rounded once to `dtype`."""
    if not use_triton(weight.words):
        return unpacked_reference(weight).to(dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.words.device)
    rows = out.numel() // weight.k
    _unpacked_kernel[(-(-rows // 32), weight.chunks)](
        weight.words,
        weight.scale,
        weight.row,
        out,
        rows,
        weight.shape[-2],
        weight.k,
        weight.chunks,
        FP4=int(weight.is_nvfp4),
        GROUP=weight.group,
        BLOCK_N=32,
        num_warps=4,
    )
    return out


def spread(x_MK: Tensor, weight: PackedWeight) -> Tensor:
    """Return the rows [M, C * 256] with columns in the order of the weight's planes, then zeros."""
    (m, k), form = x_MK.shape, weight.form[0]
    if not use_triton(x_MK):
        return spread_reference(x_MK, form)
    if not weight.is_nvfp4 and k % CHUNK == 0 and x_MK.is_contiguous():
        return x_MK
    out = x_MK.new_empty((m, weight.chunks * CHUNK))
    _spread_kernel[(m, -(-weight.chunks // 4))](
        x_MK,
        out,
        k,
        x_MK.stride(0),
        weight.chunks,
        FP4=int(weight.is_nvfp4),
        num_warps=4,
        **early(),
    )
    return out


@jit
def spread_column(column, FP4: tl.constexpr):
    """Return where a column of x comes in the order of the planes."""
    place = column
    if FP4:
        within = column % 256
        place += within % 16 // 2 * 32 + within // 16 * 2 + within % 2 - within
    return place


@jit
def _spread_kernel(x, out, K, x_row, C, FP4: tl.constexpr):
    start_next()
    wait_for_inputs()
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * 1024 + tl.arange(0, 1024)
    value = tl.load(x + m * x_row + k, mask=k < K, other=0.0)
    tl.store(out + m * C * 256 + spread_column(k, FP4), value, mask=k < C * 256)


@jit
def _sum_parts_kernel(partial, y, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    start_next()
    wait_for_inputs()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + part * size + i, mask=i < size, other=0.0)
    tl.store(y + i, total.to(y.dtype.element_ty), mask=i < size)


@jit
def _unpacked_kernel(
    words,
    scale,
    row,
    out,
    ROWS,
    N,
    K,
    C,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Decode BLOCK_N of all ROWS, N for each expert, of a chunk."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    n, c = tl.minimum(rows, ROWS - 1), tl.program_id(1)
    chunk = ((n // N * C + c) * N + n % N)[:, None]
    w = tl.load(words + chunk * 32 + tl.arange(0, 32)[None, :])
    s = w
    if FP4:
        s = tl.load(scale + chunk * 16 + tl.arange(0, 16)[None, :]).to(tl.int32)
        s = tl.reshape(tl.broadcast_to(s[:, :, None], (BLOCK_N, 16, 2)), (BLOCK_N, 32))
    planes = planes_of(w, s, FP4)
    low = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
    high = tl.join(tl.join(planes[4], planes[5]), tl.join(planes[6], planes[7]))
    value = tl.join(low, high)  # the bits of a plane's number, lowest first
    k = tl.arange(0, 256)
    if FP4:
        value = tl.reshape(value, (BLOCK_N, 16, 2, 2, 2, 2))
        value = tl.reshape(tl.permute(value, (0, 1, 5, 4, 3, 2)), (BLOCK_N, 256)).to(tl.float32)
    else:
        value = tl.reshape(tl.permute(value, (0, 4, 3, 2, 1)), (BLOCK_N, 256)).to(tl.float32)
        value *= tl.load(scale + chunk * (256 // GROUP) + (k // GROUP)[None, :]).to(tl.float32)
    value = (value * row_factor(row, n, rows < ROWS, FP4)[:, None]).to(out.dtype.element_ty)
    k += c * 256
    tl.store(out + rows[:, None] * K + k[None, :], value, (rows < ROWS)[:, None] & (k < K)[None, :])


PACKED_CHOICES = [
    {"BLOCK_N": n, "num_warps": warps, "STAGES": stages}
    for n, warps, stages in (
        (64, 4, 3),
        (64, 4, 4),
        (128, 4, 2),
        (128, 4, 3),
        (128, 8, 2),
        (128, 8, 3),
        (128, 8, 4),
        (256, 8, 3),
    )
]


@autotune(PACKED_CHOICES, key=["N", "C", "BLOCK_M", "FP4", "GROUP"])
@jit
def _tiles_kernel(
    x,
    words,
    scale,
    row,
    out,
    M,
    N,
    C,
    part,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    first = tl.program_id(1) * part
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(outputs, N - 1)
    total = tile_sums(
        x,
        m,
        m < M,
        words,
        scale,
        n,
        N,
        C,
        first,
        tl.minimum(first + part, C),
        FP4,
        GROUP,
        BLOCK_N,
        BLOCK_M,
        STAGES,
    )
    total *= row_factor(row, n, n < N, FP4)[:, None]
    at = (tl.program_id(1) * M + m).to(tl.int64)[:, None] * N + outputs[None, :]
    y_MN = tl.trans(total).to(out.dtype.element_ty)
    tl.store(out + at, y_MN, mask=(m < M)[:, None] & (outputs < N)[None, :])
