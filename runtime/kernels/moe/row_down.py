"""The second kernel of `row`: down of a single token's experts, their sum and the residual.

Chosen for: `ONE_TOKEN`, after the first kernel of row.

    y = x + sum_j w_j * down_e_j(inner[j])                  the last j is the shared expert, E

A program has the same rows of all experts and loads them while the first kernel still runs.

Trap: it reads logits and residual before it waits for the first kernel. That kernel lets it start
only after it has itself waited, when all kernels before it have finished. Both are read past the
nearest cache, which may still hold those of an earlier layer.

Shape letters: E routed experts, H hidden, F inner size.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, tl
from runtime.kernels.linear.row_parts import rounded
from runtime.kernels.moe.routing import likeliest
from runtime.kernels.overlap import start_next, wait_for_inputs


@jit
def row_products(w, x, s, EDGE: tl.constexpr):
    """Return w * x [..., NUM], summed over the 16 bytes of weights that a thread loaded at once.

    w  [..., NUM, VECTOR], x that can be multiplied with it, the scales s with the sums
    """
    products = tl.sum(w.to(tl.float32) * x, len(w.shape) - 1)
    if EDGE > 1:
        products *= s.to(tl.float32)
    return products


@jit
def _down_rows(weight, experts, used, first, H, F, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return BLOCK_N rows of some experts, [experts, BLOCK_N, BLOCK_K]."""
    n, k = first + tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_K)[None, None, :]
    inside = used[:, None, None] & (n < H) & (k < F)
    at = (experts[:, None, None] * H + n) * F + k
    return tl.load(weight + at, mask=inside, other=0.0)


@jit
def _down_scales(
    scale,
    weight,
    experts,
    used,
    first,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return their scales: [experts, 1, one for 16 bytes], or [experts, BLOCK_N] for whole rows."""
    VECTOR: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    s = tl.zeros((1, 1), tl.float32)
    if EDGE > 1:
        g = (tl.arange(0, BLOCK_K // VECTOR) * VECTOR)[None, None, :]
        at = scale + experts[:, None, None] * scale_expert + first // 128 * scale_row
        s = tl.load(at + g // 128 * scale_col, mask=used[:, None, None] & (g < F), other=0.0)
    elif EDGE == 1:
        n = first + tl.arange(0, BLOCK_N)[None, :]
        at = scale + experts[:, None] * scale_expert + n
        s = tl.load(at, mask=used[:, None] & (n < H), other=0.0)
    return s


@jit
def _inner_rows(inner, place, used, F, BLOCK_K: tl.constexpr):
    """Return the rows `place` of inner, [places, BLOCK_K]."""
    k = tl.arange(0, BLOCK_K)[None, :]
    return tl.load(inner + place[:, None] * F + k, mask=used[:, None] & (k < F), other=0.0)


@jit
def _down_sums(w, x, s, like, EDGE: tl.constexpr):
    """Return the products of w and x, one row for each expert, rounded: [experts, BLOCK_N]."""
    NUM_J: tl.constexpr = w.shape[0]
    VECTOR: tl.constexpr = 128 // w.dtype.primitive_bitwidth
    NUM: tl.constexpr = w.shape[2] // VECTOR
    w = tl.reshape(w, (NUM_J, w.shape[1], NUM, VECTOR))
    x = tl.reshape(x.to(tl.float32), (NUM_J, 1, NUM, VECTOR))
    y = tl.sum(row_products(w, x, s, EDGE), 2)
    if EDGE == 1:
        y *= s.to(tl.float32)
    return rounded(y, like)


@jit
def down_kernel(
    inner,
    down,
    scale,
    logits,
    residual,
    y,
    E,
    H,
    F,
    scale_expert,
    scale_row,
    scale_col,
    EDGE: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    LATE: tl.constexpr,
):
    """BLOCK_K spans F. LATE: the next kernel starts when these weights have been asked for."""
    if not LATE:
        start_next()
    first = tl.program_id(0) * BLOCK_N
    n, j = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J)
    experts, used = likeliest(logits, E, TOP, BLOCK_J, BLOCK_E, WARPS).to(tl.int64), j < TOP
    shared = tl.zeros((1,), tl.int64) + E
    w = _down_rows(down, experts, used, first, H, F, BLOCK_N, BLOCK_K)
    w_shared = _down_rows(down, shared, shared == E, first, H, F, BLOCK_N, BLOCK_K)
    s = _down_scales(
        scale,
        down,
        experts,
        used,
        first,
        H,
        F,
        scale_expert,
        scale_row,
        scale_col,
        EDGE,
        BLOCK_N,
        BLOCK_K,
    )
    s_shared = _down_scales(
        scale,
        down,
        shared,
        shared == E,
        first,
        H,
        F,
        scale_expert,
        scale_row,
        scale_col,
        EDGE,
        BLOCK_N,
        BLOCK_K,
    )
    if LATE:
        start_next()
    r_N = tl.load(residual + n, mask=n < H, other=0.0, cache_modifier=".cg").to(tl.float32)
    p = tl.load(logits + experts, mask=used, other=-float("inf"), cache_modifier=".cg")
    p = p.to(tl.float32)
    p = tl.exp(p - tl.max(p, 0))
    p = rounded(p / tl.sum(p, 0), logits)
    p_shared = rounded(tl.sigmoid(tl.load(logits + E, cache_modifier=".cg").to(tl.float32)), logits)
    wait_for_inputs()
    x = _inner_rows(inner, j, used, F, BLOCK_K)
    x_shared = _inner_rows(inner, shared * 0 + TOP, shared == E, F, BLOCK_K)
    out = _down_sums(w, x, s, y, EDGE)
    out_shared = _down_sums(w_shared, x_shared, s_shared, y, EDGE)
    y_N = tl.sum(rounded(out * p[:, None], y), 0) + tl.sum(rounded(out_shared * p_shared, y), 0)
    tl.store(y + n, (r_N + rounded(y_N, y)).to(y.dtype.element_ty), mask=n < H)
