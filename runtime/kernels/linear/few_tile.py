"""What a program of a product with a few rows computes; see few.

Chosen for: within `PRODUCT`, `PRODUCTS`, `UPDATE` and `GATED` of 2 to 8 rows; never alone.

    total[s, n, m] += scale(n, k) * sum_k w[n, k] * x[m, k]        k in the slice s of a step

The weights are the left operand of the tensor cores, whose right one may have as few as 8 columns:
the rows of x. Each warp has a slice of a step's columns and all rows of the tile; the slices are
added once, at the end. Steps of weights are copied into shared memory ahead of their use, the first
of them while the preceding kernels still run.

Traps: the wait for x is in the loop, in its first iteration: if it came before the loop, the
compiler would start the copies after it. x must not be copied ahead, for then it would be read
before the wait: a load under a condition is not, even one that always holds. Wait and load have to
be under that one condition: the compiler moves a wait of its own to the end of the iteration. Codes
and scales have to be multiplied in float32: their product, rounded to bfloat16, is another weight.

Shape letters: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.launch import jit, operand, tl
from runtime.kernels.overlap import wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Stored

ROWS_OF_X = 8
_BYTES = 128  # of a row of the weight in a slice: a line
_SLICES = 4
_LITTLE = 64 << 20
# Measured on an H200, 8 rows. 9B gate and up 51.0 us, 57 with 4 stages, 60 with 16 rows, 53 to 68
# with others; below 64 MiB 4 stages are as fast or faster: 0.8B down 3.7, 4.1 with 3. FP8: 27B gate
# and up 59, 63 with 16 rows, 71 with 64 rows and half as wide.
_FP8, _FLOAT, _FLOAT_LITTLE = {"STAGES": 3}, {"STAGES": 3}, {"STAGES": 4}
_ROWS = 32
_SHORT = 16, 16  # slices, rows: the whole tile is on its way at once


def tile_of(weight: Stored, slices: int = _SLICES, rows: int = _ROWS) -> dict[str, int]:
    """Return launch options for a weight [N, K], of which a tile has so many rows."""
    values = weight.values
    little = _FLOAT_LITTLE if values.nbytes < _LITTLE else _FLOAT
    return (_FP8 if weight.is_fp8 else little) | {
        "BLOCK_N": rows,
        "BLOCK_K": _BYTES // values.element_size(),
        "SLICES": slices,
        "num_warps": slices,
    }


def short_tile_of(weight: Stored) -> dict[str, int]:
    """Return launch options for a weight of few rows, whose columns are not split."""
    return tile_of(weight, *_SHORT)


def check_rows(x_MK: Tensor, *weights: Stored) -> int:
    """Return the number of columns."""
    (m, k), columns = x_MK.shape, x_MK.stride(1)
    assert m <= ROWS_OF_X, f"these kernels are for up to {ROWS_OF_X} rows"
    assert columns == 1, "rows must be contiguous"
    assert all(w.values.shape[1] == k for w in weights), "as many columns as x has"
    return k


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
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return the products [BLOCK_N, BLOCK_M] of the rows n of the weight with those of x.

    first, last  the columns: `first` begins a block of scales
    EVEN         the columns come in whole steps
    """
    s, m = tl.arange(0, SLICES), tl.arange(0, BLOCK_M)
    k = (s * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    w_rows = weight + n.to(tl.int64)[None, :, None] * K + k[:, None, :]
    x_rows = x + (m * x_row)[None, None, :] + k[:, :, None]
    total = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, SLICES * BLOCK_K, num_stages=STAGES):
        used = (m < M)[None, None, :]
        if EVEN:
            w = tl.load(w_rows + start, eviction_policy="evict_first")
        else:
            left = k < last - start
            used = used & left[:, :, None]
            inside = left[:, None, :] & (n >= 0)[None, :, None]
            w = tl.load(w_rows + start, mask=inside, other=0.0, eviction_policy="evict_first")
        x_sKM = tl.zeros((SLICES, BLOCK_K, BLOCK_M), x.dtype.element_ty)
        if start < K:
            if start == first:
                wait_for_inputs()
            x_sKM = tl.load(x_rows + start, mask=used, other=0.0)
        # through float32: from E4M3 to bfloat16 a GPU goes by way of float16, a quarter as fast
        w = operand(w.to(tl.float32).to(x_sKM.dtype))
        if EDGE > 1:
            block = start + s * BLOCK_K
            at = scale + (n // EDGE * scale_row)[None, :] + (block // 128 * scale_col)[:, None]
            s_sN = tl.load(at, mask=(block < last)[:, None], other=0.0).to(tl.float32)
            total += tl.dot(w, operand(x_sKM), input_precision="ieee") * s_sN[:, :, None]
        else:
            total = tl.dot(w, operand(x_sKM), total, input_precision="ieee")
    sums = tl.sum(total, 0)
    if EDGE == 1:
        sums *= tl.load(scale + n).to(tl.float32)[:, None]
    return sums


@jit
def store_rows(y, sums, n, M, N):
    """Write sums [BLOCK_N, BLOCK_M] to the columns n of y [M, N]."""
    m = tl.arange(0, sums.shape[1])
    at = y + m[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(at, tl.trans(sums).to(y.dtype.element_ty), mask=inside)
