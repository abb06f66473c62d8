"""What a program of a product with 9 to 64 rows computes; see rows.

Chosen for: within `PRODUCT`, `PRODUCTS`, `UPDATE`, `CODES_PRODUCT`, `CODES_UPDATE` and `GATED` of
9 to 64 rows; never alone.

    total[m, n] += scale(n, k) * x_scale[k, m] * sum_k x[m, k] * w[n, k]      k in one step

The rows of x are the left operand of the tensor cores, which take 64 there at least; the scale of a
token then belongs to a row of the sums, of which a thread has two. What a program waits for is
memory: steps of the weight and of x are copied into shared memory ahead of their use, by one to
three programs on a multiprocessor, which start together.

Traps: x must not be read before the wait, and the compiler starts the copies of a loop before the
loop: hence the wait comes first. Asking for the weight before it, into the L2 cache, gains nothing:
on an H200 1780 us for 1784, four layers of 27B with the head, and 1822 where each sector is asked
for. The tensor cores keep about 14 bits of an FP8 sum: each 128 columns are added in float32.

Shape letters: M rows of x, N outputs, K inputs, G groups of 128 inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from runtime.kernels.cases import GROUP
from runtime.kernels.launch import jit, operand, tl

if TYPE_CHECKING:
    from runtime.kernels.linear.weight import Stored

MOST_ROWS = 64
_BYTES = 128  # of a row of the weight in a step: a line
_PLACES = 132  # multiprocessors of an H200
_FEWEST = 80  # fewer programs with tall tiles are slower than twice as many with low ones
# Stages of a tile where one, two or three programs share the memory of a multiprocessor. On an
# H200, 64 rows, with the norm: 27B gate and up 54 us by 3 stages, 67 by 4, down 31 by 6, 42 by 3.
_STAGES = {128: (6, 4, 3), 64: (8, 6, 4), 32: (8, 6, 4), 16: (6, 6, 4)}


class Tiles(NamedTuple):
    """How a weight [N, K] is divided among programs: rows of it in a tile, parts of its columns.

    programs  tiles times parts, and those of a second weight
    """

    rows: int
    parts: int
    programs: int

    @staticmethod
    def of(n: int, beside: int, most_parts: int) -> Tiles:
        """Return how a weight of n rows is divided.

        beside      programs of a second weight
        most_parts  1 where the sums are not to be split
        """
        choices = [Tiles._with(rows, n, beside, most_parts) for rows in _STAGES]
        return next((choice for choice in choices if choice._fits()), choices[-1])

    @staticmethod
    def _with(rows: int, n: int, beside: int, most_parts: int) -> Tiles:
        tiles = -(-n // rows)
        parts = max(1, min(most_parts, _PLACES // tiles))
        return Tiles(rows, parts, tiles * parts + beside)

    def _fits(self) -> bool:
        """Return whether programs are enough, and not a few more than places."""
        a_few_more = self.rows > 64 and _PLACES < self.programs < 1.4 * _PLACES
        return self.programs >= _FEWEST and not a_few_more

    def options(self, weight: Stored) -> dict[str, int]:
        """Return launch options."""
        together = min(-(-self.programs // _PLACES), 3)
        return {
            "BLOCK_N": self.rows,
            "BLOCK_K": GROUP if self.rows == 16 else _BYTES // weight.values.element_size(),
            "STAGES": _STAGES[self.rows][together - 1],
            "num_warps": 4,
        }


@jit
def rows_sums(
    x,
    x_scale,
    height,
    M,
    x_row,
    weight,
    scale,
    n,
    K,
    first,
    last,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return the products [BLOCK_M, BLOCK_N] of the rows of x with the rows n of the weight.

    x_scale      None, or of codes [G, height], height numbers apart: x is in E4M3, as the weight
    first, last  the columns: `first` begins a group of scales
    scale        begins at those of the rows n, which share them where x_scale is there and EDGE > 1
    EVEN         the columns come in whole steps
    """
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    used = m < M
    x_rows = x + (m * x_row)[:, None] + k[None, :]
    w_rows = weight + n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w_KN = tl.load(w_rows + start, eviction_policy="evict_first")
            x_MK = tl.load(x_rows + start, mask=used[:, None], other=0.0)
        else:
            left = k < last - start
            w_KN = tl.load(w_rows + start, mask=left[:, None], other=0.0)
            x_MK = tl.load(x_rows + start, mask=used[:, None] & left[None, :], other=0.0)
        w_KN, x_MK = operand(w_KN), operand(x_MK)
        if x_scale is None:
            total = tl.dot(x_MK, w_KN, total, input_precision="ieee")
        elif EDGE > 1:
            s_M = tl.load(x_scale + start // 128 * height + m, mask=used, other=0.0)
            s_M *= tl.load(scale + start // 128 * scale_col).to(tl.float32)
            total += tl.dot(x_MK, w_KN, input_precision="ieee") * s_M[:, None]
        else:
            total += tl.dot(x_MK, w_KN, input_precision="ieee")
    if x_scale is not None and EDGE == 1:
        s_M = tl.load(x_scale + m, mask=used, other=0.0)
        total *= tl.load(scale + n).to(tl.float32)[None, :] * s_M[:, None]
    return total


@jit
def store_tile(y, sums, n, M, N):
    """Write sums [BLOCK_M, BLOCK_N] to the columns n of y [M, N]."""
    m = tl.arange(0, sums.shape[0])
    at = y + m[:, None] * N + n[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
