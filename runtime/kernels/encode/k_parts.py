"""What the kernels of ggml's types share: columns in registers, and rounding as ggml rounds.

Chosen for: never alone.

Traps: a GPU's NaN has other bits than a CPU's, which ggml's rounding trick would show. Either an
infinite slope becomes 0, from which follow the same codes, all 0; or NaN is made 0 in `nearest`.
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
def lanes(w, inside, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the columns of each block as `columns` does, by one load: many compile for long."""
    j = tl.arange(0, COLUMNS)[None, :]
    x = tl.load(w[:, None] + j, mask=inside[:, None] & (j >= 0), other=0.0)
    parts = (x.to(tl.float32),)
    for level in tl.static_range(1, 6 if COLUMNS == 32 else 5):
        halves = ()
        for k in tl.static_range(len(parts)):
            pair = tl.reshape(parts[k], (LANES, 2, COLUMNS >> level))
            halves += tl.split(tl.permute(pair, (0, 2, 1)))
        parts = halves  # type: ignore[assignment]
    x = ()
    for j in tl.static_range(COLUMNS):
        x += (tl.reshape(parts[j], (LANES,)),)
    return x


@jit
def finite(slope):
    """Return 0 for an infinite slope."""
    return tl.where(tl.abs(slope) < float("inf"), slope, 0.0)


@jit
def biased(y):
    """Return 2^22 plus the nearest int32: ggml's trick, which wraps beyond 2^22."""
    return (y + 12582912.0).to(tl.int32, bitcast=True) & 0x7FFFFF


@jit
def nearest(y):
    """Return the nearest int32: ggml's trick, which makes 0 of a CPU's NaN."""
    return biased(tl.where(tl.abs(y) >= 0.0, y, 0.0)) - 0x400000


@jit
def mean_square(w, inside, SPREAD: tl.constexpr):
    """Return SPREAD times the mean of the squares of the 256 columns that begin at each w."""
    total = tl.full(inside.shape, 0.0, tl.float32)
    for j in range(256):
        a = tl.load(w + j, mask=inside, other=0.0).to(tl.float32)
        total += a * a
    return total * SPREAD * 0.00390625


@jit
def inverse(x):
    """Return 1 / x."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
