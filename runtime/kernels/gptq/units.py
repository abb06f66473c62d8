"""What the kernels of GPTQ share: units, and rounding to bfloat16.

Chosen for: never alone; walk and settle share it.

A unit is a decoded weight over its step. END is 2^(bits-1) of whole numbers, 0 of E2M1.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, tl


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
