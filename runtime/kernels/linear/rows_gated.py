"""Gate and up of nine to 64 rows in one kernel: the first half of a feed-forward.

Chosen for: `GATED` of 9 to 64 rows on a GPU with float weights.

    y = silu(x W_gate) * (x W_up)               each of the four steps rounded to x's dtype

A tile has as many rows of the gate as of up, with the same numbers. How it is multiplied: see
rows_tile.

Shape letters: M rows of x, H hidden size, F inner size of the feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.launch import jit, tl, use_triton
from runtime.kernels.linear.few_gated import few_gated_reference
from runtime.kernels.linear.row_parts import gate_up_rows, silu_times
from runtime.kernels.linear.rows_tile import (
    MOST_ROWS,
    Tiles,
    rows_sums,
    store_tile,
)
from runtime.kernels.linear.weight import Stored, check_rows
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Weight


def rows_gated(x_MH: Tensor, gate_up: Weight) -> Tensor:
    """Return silu(gate) * up [M, F] of [gate | up] = x gate_up^T.

    x_MH     [M, H], M at most 64, rows contiguous in themselves
    gate_up  [2F, H] in x's dtype, gate rows first
    """
    if not use_triton(x_MH):
        return few_gated_reference(x_MH, gate_up)
    stored = Stored.of(gate_up)
    (m, hidden), inner = check_rows(x_MH, MOST_ROWS, stored), stored.values.shape[0] // 2
    assert stored.edge == 0, "gate_up must be in x's dtype"
    assert stored.values.shape[0] == 2 * inner, "gate_up must be [2F, H]"
    y_MF = x_MH.new_empty((m, inner))
    tile = Tiles.of(2 * inner, 0, 1).options(stored)
    _gated_kernel[(-(-2 * inner // tile["BLOCK_N"]),)](
        x_MH,
        m,
        hidden,
        inner,
        x_MH.stride(0),
        stored.values,
        y_MF,
        BLOCK_M=MOST_ROWS,
        EVEN=int(hidden % tile["BLOCK_K"] == 0),
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
    y,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    HALF: tl.constexpr = BLOCK_N // 2
    first, i = tl.program_id(0) * HALF, tl.arange(0, BLOCK_N)
    n = gate_up_rows(i, first, F, HALF)
    sums = rows_sums(
        x,
        None,
        0,
        M,
        x_row,
        gate_up,
        None,
        n,
        H,
        0,
        H,
        0,
        0,
        BLOCK_N,
        BLOCK_M,
        BLOCK_K,
        STAGES,
        EVEN,
    )
    gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    store_tile(y, silu_times(gate, up, y), first + tl.arange(0, HALF), M, F)
