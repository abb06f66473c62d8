"""The sums of a tile of a product with a few rows, by the tensor cores; see few_tile.

Chosen for: within `PRODUCT`, `PRODUCTS`, `UPDATE` and `GATED` of 2 to 8 rows; never alone.

    total[n, m] += scale(n, k) * sum_k w[n, k] * x[m, k]        k in a block of a step's columns

The weights are the left operand of the tensor cores, whose right one may have as few as 8 columns:
the rows of x.

early   Each warp has 16 rows of the tile and all columns. Weights are copied into shared memory
        steps ahead of their use, the first steps while the preceding kernels still run. x is loaded
        into registers one step ahead, which takes long steps or many programs.
whole   The same, but x is copied ahead too, once it is there; before, the first steps of weights
        are asked for.
sliced  Each warp has all rows and a slice of a step's columns; the slices are added at the end.
        Weights are copied ahead, the first steps of them while the preceding kernels still run; x
        is loaded when it is used, which a long loop pays for.

Where heads of x are still to be scaled by the roots of their norm, the sums of a step are scaled,
as by the scales of FP8.

Traps: the compiler puts the copies of a loop's first steps before the loop. `whole` therefore waits
before the loop, the others in its first turn, where x must not be copied ahead, for then it would
be read before the wait. A load under a condition is not, even one that always holds: `sliced`. Wait
and load have to be under that one condition: the compiler moves a wait of its own to the end of the
turn. In `early` the mask of the next step's load depends on what the wait returns. Under a
condition, x would become an operand at once: the turn would wait for what it has just asked for.
Codes and scales have to be multiplied in float32: their product, rounded to bfloat16, is another
weight. A whole tile needs products of two dimensions: of one with three the compiler gives each
warp all rows, and all warps do the same.

Shape letters: M rows of x, N outputs, K inputs, S slices.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, operand, tl
from runtime.kernels.overlap import ask, wait_for_inputs, zero_when_ready


@jit
def early_sums(
    x_rows,
    used,
    w_rows,
    s_rows,
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
    """Wait, and return the products [BLOCK_N, BLOCK_M], each warp having 16 rows of the weight.

    x_rows, w_rows, s_rows  where the rows begin
    used                    which rows of x there are
    """
    k = tl.arange(0, BLOCK_K)
    w_at, x_at = w_rows[:, None] + k[None, :], x_rows[None, :] + k[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    x_KM = tl.zeros((BLOCK_K, BLOCK_M), x_rows.dtype.element_ty)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_at + start)
        else:
            w = tl.load(w_at + start, mask=(k < last - start)[None, :], other=0.0)
        following = start + BLOCK_K
        if start == first:
            following += zero_when_ready()
            x_KM = _step_of_x(x_at, used, k, start, last, EVEN)
        there = used & (following < last)
        x_next = _step_of_x(x_at, there, k, start + BLOCK_K, last, EVEN)
        w = _converted(w, x_KM)
        if EDGE > 1:
            s_N = tl.load(s_rows + tl.minimum(start, last - 1) // 128 * scale_col).to(tl.float32)
            total += tl.dot(w, operand(x_KM), input_precision="ieee") * s_N[:, None]
        else:
            total = _added(total, tl.dot(w, operand(x_KM), input_precision="ieee"))
        x_KM = x_next
    return total


@jit
def _step_of_x(x_at, used, k, start, last, EVEN: tl.constexpr):
    """Return a step of the rows of x [BLOCK_K, BLOCK_M], 0 where there is nothing."""
    inside = used[None, :]
    if not EVEN:
        inside = inside & (k < last - start)[:, None]
    return tl.load(x_at + start, mask=inside, other=0.0)


@jit
def whole_sums(
    x_rows,
    used,
    w_rows,
    s_rows,
    first,
    last,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASKED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Wait, and return `early_sums`, x being copied ahead.

    ASKED  steps of the weight that are asked for before the wait
    """
    _ask_for_steps(w_rows, first, last, STEP, ASKED)
    wait_for_inputs()
    k = tl.arange(0, BLOCK_K)
    w_at, x_at = w_rows[:, None] + k[None, :], x_rows[None, :] + k[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(first, last, STEP, num_stages=STAGES):
        for block in tl.static_range(0, STEP, BLOCK_K):
            start = step + block
            if EVEN:
                w = tl.load(w_at + start)
                x_KM = tl.load(x_at + start, mask=used[None, :], other=0.0)
            else:
                left = k < last - start
                w = tl.load(w_at + start, mask=left[None, :], other=0.0)
                x_KM = tl.load(x_at + start, mask=left[:, None] & used[None, :], other=0.0)
            w = _converted(w, x_KM)
            if EDGE > 1:
                s_at = s_rows + tl.minimum(start, last - 1) // 128 * scale_col
                s_N = tl.load(s_at).to(tl.float32)
                total += tl.dot(w, operand(x_KM), input_precision="ieee") * s_N[:, None]
            else:
                total = _added(total, tl.dot(w, operand(x_KM), input_precision="ieee"))
    return total


@jit
def sliced_sums(
    x_rows,
    used,
    w_rows,
    s_rows,
    K,
    first,
    last,
    scale_col,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    squares,
    eps,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Wait, and return `whole_sums`, each warp having a slice of the columns.

    squares  None, or of x the parts of the sum of squares of each head, which it is normed by
    HEAD     columns of a head: whole slices
    """
    s = tl.arange(0, SLICES) * BLOCK_K
    k = s[:, None] + tl.arange(0, BLOCK_K)[None, :]
    w_at, x_at = w_rows[None, :, None] + k[:, None, :], x_rows[None, None, :] + k[:, :, None]
    total = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, SLICES * BLOCK_K, num_stages=STAGES):
        inside = used[None, None, :]
        if EVEN:
            w = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            left = k < last - start
            inside = inside & left[:, :, None]
            kept = left[:, None, :]
            w = tl.load(w_at + start, mask=kept, other=0.0, eviction_policy="evict_first")
        x_sKM = tl.zeros((SLICES, BLOCK_K, BLOCK_M), x_rows.dtype.element_ty)
        root_sM = tl.zeros((SLICES, BLOCK_M), tl.float32)
        if start < K:
            if start == first:
                wait_for_inputs()
            x_sKM = tl.load(x_at + start, mask=inside, other=0.0)
            if squares is not None:
                root_sM = _roots(squares, used, start + s, K, eps, HEAD, PARTS, BLOCK_M)
        w = _converted(w, x_sKM)
        if EDGE > 1:
            group = tl.minimum(start + s, last - 1) // 128
            s_sN = tl.load(s_rows[None, :] + (group * scale_col)[:, None]).to(tl.float32)
            total += tl.dot(w, operand(x_sKM), input_precision="ieee") * s_sN[:, :, None]
        elif squares is not None:
            total += tl.dot(w, operand(x_sKM), input_precision="ieee") * root_sM[:, None, :]
        else:
            total = _added(total, tl.dot(w, operand(x_sKM), input_precision="ieee"))
    return tl.sum(total, 0)


@jit
def _roots(squares, used, k, K, eps, HEAD: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr):
    """Return rsqrt(mean square + eps) of the heads [S, M] that hold the columns k [S] of x."""
    head = tl.arange(0, M)[None, :] * (K // HEAD) + k[:, None] // HEAD
    inside = used[None, :] & (k < K)[:, None]
    total = tl.zeros(inside.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(squares + head * PARTS + part, mask=inside, other=0.0)
    return tl.rsqrt(total / HEAD + eps)


@jit
def _added(total, sums):
    """Return total + sums, rounded to nearest.

    Tensor cores cut what they cannot hold: emulated, sums of 2304 columns of BF16 are off by 2.8e-6
    if they add all of them, by 2.5e-7 if they add 256. H200, 12288 columns: by 4.1e-7 if they add
    256, by 5.8e-7 if 512. The compiler gives a plain sum to them.
    """
    return tl.fma(sums, 1.0, total)


@jit
def _converted(w, x):
    """Return weights as an operand of x's dtype.

    Through float32: from E4M3 to bfloat16 a GPU goes by way of float16, a quarter as fast.
    """
    return operand(w.to(tl.float32).to(x.dtype))


@jit
def _ask_for_steps(rows, first, last, STEP: tl.constexpr, ASKED: tl.constexpr):
    """Ask for the lines of the first steps of some rows."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, STEP // LINE) * LINE
    for step in tl.static_range(ASKED):
        k = tl.minimum(first + step * STEP + lines, last - 1)
        ask(rows[:, None] + k[None, :])
