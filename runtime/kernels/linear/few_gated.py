"""Gate and up of a few rows in one kernel: the first half of a feed-forward.

Chosen for: `GATED` of 2 to 8 rows on a GPU, unless packed.

    y = silu(x W_gate) * (x W_up)               each of the four steps rounded to x's dtype

A tile has as many rows of the gate as of up, with the same numbers. How it is multiplied: see
few_tile.

Shape letters: M rows of x, H hidden size, F inner size of the feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import silu

from runtime.kernels.launch import jit, tl, use_triton
from runtime.kernels.linear.few_tile import ROWS_OF_X, gated_tile_of, store_rows, tile_sums
from runtime.kernels.linear.row_parts import gate_up_rows, silu_times
from runtime.kernels.linear.weight import Stored, check_rows, product_reference
from runtime.kernels.overlap import early, start_next

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Weight


def few_gated_reference(x_MH: Tensor, gate_up: Weight) -> Tensor:
    """Say what `few_gated` computes, in plain torch."""
    gate, up = product_reference(x_MH, gate_up).chunk(2, dim=-1)
    return silu(gate) * up


def few_gated(x_MH: Tensor, gate_up: Weight) -> Tensor:
    """Return silu(gate) * up [M, F] of [gate | up] = x gate_up^T.

    x_MH     [M, H], M at most 8, rows contiguous in themselves
    gate_up  [2F, H], gate rows first
    """
    if not use_triton(x_MH):
        return few_gated_reference(x_MH, gate_up)
    stored = Stored.of(gate_up)
    (m, hidden), inner = check_rows(x_MH, ROWS_OF_X, stored), stored.values.shape[0] // 2
    assert stored.values.shape[0] == 2 * inner, "gate_up must be [2F, H]"
    y_MF = x_MH.new_empty((m, inner))
    tile = gated_tile_of(stored)
    _gated_kernel[(-(-2 * inner // tile["BLOCK_N"]),)](
        x_MH,
        m,
        hidden,
        inner,
        x_MH.stride(0),
        stored.values,
        stored.scale,
        y_MF,
        *stored.scale_strides,
        EDGE=stored.edge,
        BLOCK_M=ROWS_OF_X,
        EVEN=int(hidden % tile["STEP"] == 0),
        **tile,
        **early(),
    )
    return y_MF


@jit
def _gated_kernel(
    x,
    M,
    H,
    F,
    x_row,
    gate_up,
    scale,
    y,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    ASKED: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
):
    start_next()
    HALF: tl.constexpr = BLOCK_N // 2
    first, i = tl.program_id(0) * HALF, tl.arange(0, BLOCK_N)
    n = gate_up_rows(i, first, F, HALF)
    sums = tile_sums(
        x,
        M,
        x_row,
        gate_up,
        scale,
        n,
        H,
        0,
        H,
        scale_row,
        scale_col,
        EDGE,
        BLOCK_N,
        BLOCK_M,
        STEP,
        BLOCK_K,
        SLICES,
        STAGES,
        ASKED,
        EARLY,
        EVEN,
    )
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, BLOCK_M)), (1, 2, 0)))
    store_rows(y, silu_times(gate, up, y), first + tl.arange(0, HALF), M, F)
