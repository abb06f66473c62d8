"""What the kernels of GPTQ share: how they are launched, units, and rounding to bfloat16.

Chosen for: never alone; walk and settle share it.

A unit is a decoded weight over its step. END is 2^(bits-1) of whole numbers, 0 of E2M1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.fourbit.rows import BLOCK
from runtime.kernels.launch import jit, tl

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.rows import Rows

# One warp holds a tile, so that sums of its columns wait for no other warp.
TILE_ROWS = 4


def launch(kernel, rows: Rows, tensors: tuple[Tensor, ...], first: int, **more: float) -> None:
    """Run a kernel over all rows of all matrices, for the block of columns from `first` on.

    tensors  the kernel's, contiguous; the last is [E, N, b], of the block
    """
    assert all(x.is_contiguous() for x in tensors), "rows must follow one another"
    matrices, num_rows, columns = rows.w.shape
    kernel[(-(-num_rows // TILE_ROWS), matrices)](
        *tensors,
        num_rows,
        columns,
        rows.d.shape[2],
        first,
        tensors[-1].shape[-1],
        END=rows.end,
        ROWS=TILE_ROWS,
        SIZE=BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
        **more,
    )


@jit
def nearest_unit(y, zero, END: tl.constexpr):
    """Return the units nearest to y, ties to the even code."""
    if END > 0:
        code = tl.minimum(tl.maximum(y + zero, -1.0 * END), END - 1.0)
        return _whole(code) - zero
    bits = y.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(y), 6.0)
    gap = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    magnitude = (_whole(tl.div_rn(size, gap)) * gap).to(tl.int32, bitcast=True)
    return (magnitude | (bits & -2147483648)).to(tl.float32, bitcast=True)


@jit
def _whole(x):
    """Return the whole number nearest to x, ties to even; the added number's last bit is 1."""
    return (x + 12582912.0) - 12582912.0


@jit
def as_bfloat16(x):
    """Return x as bfloat16 holds it, ties to even, in float32: the interpreter's cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@jit
def column(x, at):
    """Return one column of a tile, by the mask that is true there alone."""
    return tl.sum(tl.where(at, x, 0.0), 1)
