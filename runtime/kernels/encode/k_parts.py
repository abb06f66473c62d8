"""What the K-quant kernels share: columns in registers, and rounding as ggml rounds.

Chosen for: never alone; q4_k and q6_k share it.

Traps: a GPU's NaN has other bits than a CPU's, which ggml's rounding trick would show: hence an
infinite slope becomes 0, from which follow the same codes, all 0.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, tl


@jit
def columns(w, inside, COLUMNS: tl.constexpr):
    """Return the columns of each block, one tensor each."""
    x = ()
    for j in tl.static_range(COLUMNS):
        x += (tl.load(w + j, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return x


@jit
def finite(slope):
    """Return 0 for an infinite slope."""
    return tl.where(tl.abs(slope) < float("inf"), slope, 0.0)


@jit
def biased(y):
    """Return 2^22 plus the nearest int32: ggml's trick, which wraps beyond 2^22."""
    return (y + 12582912.0).to(tl.int32, bitcast=True) & 0x7FFFFF
