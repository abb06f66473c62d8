"""RMSNorm of the residual stream in pieces of a row, for rows of no power of two.

Chosen for: `ADDED_NORM` of rows that are not in parts, of whole pieces, but of no power of two:
5120 numbers, as in 27B.

What it computes is in rms, whose kernel spans a row by the next power of two: of 8192 numbers of a
row of 5120 more than a third would be nothing.

Shape letters: T tokens, H hidden size, P numbers of a piece, K pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.cases import PIECE
from runtime.kernels.encode.rows import room_of, store_codes
from runtime.kernels.launch import jit, loaded, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.silu import rounded

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.encode.lined import Lined
    from runtime.kernels.encode.rows import Codes

# H200, 512 and 8192 rows of 5120: 8.2 and 99 us; 4 warps 8.6 and 99, pieces of 512 9.7 and 103, a
# whole row at once 10.1 and 119
_WARPS = 8


def add_pieces(
    x_TH: Tensor,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    codes: Codes | Lined | None,
) -> tuple[Tensor, Tensor]:
    """Return `add_rmsnorm` of rows of whole pieces, by the kernel."""
    num_rows, hidden = residual_TH.shape
    y, total = (residual_TH.new_empty((num_rows, hidden)) for _ in range(2))
    _pieces_kernel[(num_rows,)](
        x_TH,
        residual_TH,
        weight_H,
        y,
        *room_of(codes, residual_TH),
        total,
        x_TH.stride(0),
        residual_TH.stride(0),
        eps,
        H=hidden,
        PIECE=PIECE,
        num_warps=_WARPS,
        **early(),
    )
    return y, total


@jit
def _pieces_kernel(
    x,
    residual,
    weight,
    y,
    codes,
    codes_scale,
    height,
    total,
    x_row,
    residual_row,
    eps,
    H: tl.constexpr,
    PIECE: tl.constexpr,
):
    start_next()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, PIECE)
    wait_for_inputs()
    x_PK = loaded(x + row * x_row + i, i < PIECE, PIECE, H // PIECE)
    r_PK = loaded(residual + row * residual_row + i, i < PIECE, PIECE, H // PIECE)
    sums, squares = (), tl.zeros((PIECE,), tl.float32)
    for k in tl.static_range(H // PIECE):
        sum_P = rounded(x_PK[k].to(tl.float32) + r_PK[k].to(tl.float32), total)
        tl.store(total + row * H + k * PIECE + i, sum_P.to(total.dtype.element_ty))
        squares += sum_P * sum_P
        sums += (sum_P,)  # type: ignore[assignment]
    root = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    for k in tl.static_range(H // PIECE):
        w_P = tl.load(weight + k * PIECE + i).to(tl.float32)
        y_P = sums[k] * root * (1.0 + w_P)
        y_P = rounded(y_P, y)
        tl.store(y + row * H + k * PIECE + i, y_P.to(y.dtype.element_ty))
        if codes is not None:
            at, scale = codes + k * PIECE, codes_scale + k * (PIECE // 128) * height
            store_codes(y_P, at, scale, height, row, H, PIECE, 0)
