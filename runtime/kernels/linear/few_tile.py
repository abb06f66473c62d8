"""A tile of a product with a few rows: what a program of few and few_gated computes.

Chosen for: within `PRODUCT`, `PRODUCTS`, `UPDATE` and `GATED` of 2 to 8 rows; never alone.

A tile is early, whole or sliced: see few_sums. Sliced are those of small weights, whose steps are
few.

Shape letters: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.launch import jit, tl
from runtime.kernels.linear.few_sums import early_sums, sliced_sums, whole_sums
from runtime.kernels.linear.weight import BLOCK
from runtime.kernels.waves import MULTIPROCESSORS

if TYPE_CHECKING:
    from runtime.kernels.linear.weight import Stored

ROWS_OF_X = 8
# Measured on an H200, 8 rows, 4 layers as a graph, microseconds. 35B-A3B in FP8: 449 with sliced
# tiles, 410 with whole ones; 27B's products without gate and up: 273, 247. 0.8B, sliced: 160, 176
# with half the columns; 168 whole. Whole tiles have few stages, so that all programs are on the GPU
# at once.
_ROWS = 32
_FP8 = {"STAGES": 5, "ASKED": 2, "EARLY": 0}
# All of 9B in BF16, milliseconds: 4.67 with early tiles, 4.96 with whole ones of 32 rows and 256
# columns; 4.69 if only tall tiles are early. Few tall ones have too little on its way: those of
# 12288 rows take 31 us, low ones with longer steps 29.
_FLOAT = {"STAGES": 3, "ASKED": 0, "EARLY": 1}
_TALL, _TALL_BYTES, _LOW_BYTES = 64, 512, 1024
# three of them share the memory of a multiprocessor; rows of which there are tall tiles for two
TOGETHER = 3 * MULTIPROCESSORS
_MANY = 2 * MULTIPROCESSORS * _TALL
_LITTLE = 32 << 20
_SLICED = {"SLICES": 4, "BLOCK_N": _ROWS, "num_warps": 4, "STAGES": 3, "ASKED": 0, "EARLY": 0}
# of a weight of few rows, whose columns are not split: the whole tile is on its way at once
SHORT_ROWS = 16
_SHORT = _SLICED | {"SLICES": 16, "BLOCK_N": SHORT_ROWS, "num_warps": 16}
# of a row of the weight in a step: of a whole tile, of a slice
_FP8_BYTES, _SLICE_BYTES, _SHORT_SLICE_BYTES = 256, 256, 128
# 27B in FP8, 8 rows: 49 us, 54 with 32 rows; early, with half the columns, 52.2 for 54.6 with the
# norm
_GATED, _GATED_BYTES = {"STAGES": 6, "ASKED": 0, "EARLY": 1}, 128


def tile_of(weight: Stored, *, split: bool = False) -> dict[str, int]:
    """Return launch options for a weight [N, K] of many rows.

    split  its columns are split among programs
    """
    if weight.is_fp8:
        return _FP8 | _whole(_ROWS) | columns_of(weight, _FP8_BYTES, 1)
    if weight.values.nbytes < _LITTLE:
        return _SLICED | columns_of(weight, _SLICE_BYTES, _SLICED["SLICES"])
    if split or weight.values.shape[0] >= _MANY:
        return _FLOAT | _whole(_TALL) | columns_of(weight, _TALL_BYTES, 1)
    return _FLOAT | _whole(_ROWS) | columns_of(weight, _LOW_BYTES, 1)


def gated_tile_of(weight: Stored) -> dict[str, int]:
    """Return launch options for gate and up."""
    if weight.is_fp8:
        return _GATED | _whole(_TALL) | columns_of(weight, _GATED_BYTES, 1)
    return tile_of(weight)


def _whole(rows: int) -> dict[str, int]:
    """Return launch options for a tile of which each warp has 16 rows."""
    return {"SLICES": 1, "BLOCK_N": rows, "num_warps": rows // 16}


def short_tile_of(weight: Stored) -> dict[str, int]:
    """Return launch options for a weight of few rows, whose columns are not split."""
    return _SHORT | columns_of(weight, _SHORT_SLICE_BYTES, _SHORT["SLICES"])


def columns_of(weight: Stored, row_bytes: int, slices: int) -> dict[str, int]:
    """Return the columns of a step, and those of a slice or of an FP8 block that are multiplied.

    row_bytes  what a row of a slice has in a step
    """
    columns = row_bytes // weight.values.element_size()
    block = min(columns, BLOCK) if weight.is_fp8 else columns
    return {"STEP": (columns if slices == 1 else block * slices), "BLOCK_K": block}


@jit
def tile_sums(
    x,
    M,
    x_row,
    weight,
    scale,
    n,
    K,
    first,
    last,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    ASKED: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
    squares=None,
    eps=0.0,
    HEAD: tl.constexpr = 1,
    PARTS: tl.constexpr = 1,
):
    """Wait, and return the products [BLOCK_N, BLOCK_M] of rows n of the weight with those of x.

    first, last  the columns: `first` begins a block of scales
    EVEN         the columns come in whole steps
    squares      only of a sliced tile: see `sliced_sums`
    """
    w_rows = weight + n.to(tl.int64) * K
    x_rows, used = x + tl.arange(0, BLOCK_M) * x_row, tl.arange(0, BLOCK_M) < M
    s_rows = scale + n // max(EDGE, 1) * scale_row
    if EARLY:
        sums = early_sums(
            x_rows,
            used,
            w_rows,
            s_rows,
            first,
            last,
            scale_col,
            EDGE,
            BLOCK_N,
            BLOCK_M,
            BLOCK_K,
            STAGES,
            EVEN,
        )
    elif SLICES == 1:
        sums = whole_sums(
            x_rows,
            used,
            w_rows,
            s_rows,
            first,
            last,
            scale_col,
            EDGE,
            BLOCK_N,
            BLOCK_M,
            STEP,
            BLOCK_K,
            STAGES,
            ASKED,
            EVEN,
        )
    else:
        sums = sliced_sums(
            x_rows,
            used,
            w_rows,
            s_rows,
            K,
            first,
            last,
            scale_col,
            EDGE,
            BLOCK_N,
            BLOCK_M,
            BLOCK_K,
            SLICES,
            STAGES,
            EVEN,
            squares,
            eps,
            HEAD,
            PARTS,
        )
    if EDGE == 1:
        sums *= tl.load(s_rows).to(tl.float32)[:, None]
    return sums


@jit
def store_rows(y, sums, n, M, N):
    """Write sums [BLOCK_N, BLOCK_M] to the columns n of y [M, N]."""
    m = tl.arange(0, sums.shape[1])
    at = y + m[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(at, tl.trans(sums).to(y.dtype.element_ty), mask=inside)
