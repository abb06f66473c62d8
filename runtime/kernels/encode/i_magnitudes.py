"""Magnitudes, signs and weights of blocks of IQ2 and IQ3, in the registers of one thread each.

Chosen for: never alone, see i_fit.

`quant.ggml.i_magnitudes` has the formulas, whose operations these are, in their order.

Shape letters: B blocks; LANES of a program.
"""

from __future__ import annotations

from runtime.kernels.encode.k_parts import lanes, mean_square
from runtime.kernels.launch import jit, tl


@jit
def prepared(
    w,
    importance,
    block,
    B,
    K,
    EVEN: tl.constexpr,
    SPREAD: tl.constexpr,
    PLAIN: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return |w|, what an error of each column weighs, and the signs, eight bits for eight."""
    inside = block < B
    x = lanes(w + block * COLUMNS, inside, LANES, COLUMNS)
    mean = mean_square(w + block * COLUMNS // 256 * 256, inside, SPREAD)
    v = ()
    if importance is None:
        for j in tl.static_range(COLUMNS):
            v += (PLAIN * mean + x[j] * x[j],)  # type: ignore[assignment]
    else:
        g = lanes(importance + block * COLUMNS % K, inside, LANES, COLUMNS)
        for j in tl.static_range(COLUMNS):
            v += (g[j] * tl.sqrt_rn(mean + x[j] * x[j]),)  # type: ignore[assignment]
    return magnitudes(x, v, EVEN, COLUMNS)


@jit
def magnitudes(w, v, EVEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Return |w|, v, and the signs of each eight; if EVEN, a wrong one makes |w| negative."""
    x, signs = (), (w[0] * 0.0).to(tl.int32)
    for e in tl.static_range(COLUMNS // 8):
        minus = (w[8 * e] < 0).to(tl.int32)
        count, wrong, least = minus, minus * 0, v[8 * e] * tl.abs(w[8 * e]) * tl.abs(w[8 * e])
        for j in tl.static_range(1, 8):
            negative = (w[8 * e + j] < 0).to(tl.int32)
            minus, count = minus | negative << j, count + negative
            if EVEN:
                loss = v[8 * e + j] * tl.abs(w[8 * e + j]) * tl.abs(w[8 * e + j])
                less = loss < least
                wrong, least = tl.where(less, j, wrong), tl.where(less, loss, least)
        if EVEN:
            wrong = tl.where(count % 2 == 1, wrong, 8)
            minus = (minus ^ (1 << wrong)) & 127
        for j in tl.static_range(8):
            a = tl.abs(w[8 * e + j])
            x += (tl.where(wrong == j, -a, a) if EVEN else a,)  # type: ignore[assignment]
        signs |= minus << 8 * e
    return x, v, signs


@jit
def top_of(x, LEAST: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the largest x, 0 below LEAST."""
    top = x[0]
    for j in tl.static_range(1, COLUMNS):
        top = tl.maximum(top, x[j])
    return tl.where((top >= LEAST) & (top > 0), top, 0.0)
