"""What a program of a product with one row loads, and how it multiplies; see row.

Chosen for: `ROW_NORM` within a product. All kernels of one row share it.

    total[n, g] += scale(n, g) * sum_v w[n, g, v] * x[g, v]         g counts 16 bytes of a row

Loading and multiplying are separate functions, so that a kernel can load what no other kernel
writes before it waits.
"""

from __future__ import annotations

from runtime.kernels.launch import INTERPRET, jit, tl


@jit
def root_means(x, K, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return rsqrt(mean(x^2) + eps) of each row."""
    squares = [x_K * x_K for x_K in x_rows(x, 0, K, ROWS, WIDTH)]
    return [tl.rsqrt(total / K + eps) for total in sums(squares, 0, ROWS)]


@jit
def sums(parts, AXIS: tl.constexpr, ROWS: tl.constexpr):
    """Return the sum of one or two along their last axis; warps exchange them at once."""
    if ROWS == 1:
        totals = (tl.sum(parts[0], AXIS),)
    else:
        totals = tl.split(tl.sum(tl.join(parts[0], parts[1]), AXIS))
    return totals


@jit
def x_rows(x, start, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH columns of each row in float32."""
    parts = ()
    for row in tl.static_range(ROWS):
        parts += (x_part(x + row * K, start, K, WIDTH),)  # type: ignore[assignment]
    return parts


@jit
def x_part(x, start, K, WIDTH: tl.constexpr):
    """Return WIDTH columns of the row in float32."""
    k = start + tl.arange(0, WIDTH)
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)


@jit
def norm_part(norm, start, K, WIDTH: tl.constexpr):
    """Return WIDTH columns of the norm, or zeros if there is none."""
    k = start + tl.arange(0, WIDTH)
    w_K = tl.zeros((WIDTH,), tl.float32)
    if norm is not None:
        w_K = tl.load(norm + k, mask=k < K, other=0.0)
    return w_K


@jit
def normed(x_K, w_K, root, x, norm):
    """Return a part of the row, normed and rounded to x's dtype if there is a norm."""
    if norm is not None:
        x_K = (x_K * root * (1.0 + w_K.to(tl.float32))).to(x.dtype.element_ty).to(tl.float32)
    return x_K


@jit
def normed_rows(parts, w_K, roots, x, norm, ROWS: tl.constexpr):
    """Return `normed` of a part of each row, or the part if there is no norm."""
    ready = ()
    for row in tl.static_range(ROWS):
        x_K = parts[row]
        if norm is not None:
            x_K = normed(x_K, w_K, roots[row], x, norm)
        ready += (x_K,)  # type: ignore[assignment]
    return ready


@jit
def keep(kept, x_K, start, K, tile):
    """Write a part of the row, if this is the first tile, and if it is to be kept."""
    if kept is not None:
        k = start + tl.arange(0, x_K.shape[0])
        tl.store(kept + k, x_K.to(kept.dtype.element_ty), mask=k < tl.where(tile == 0, K, 0))


@jit
def weight_part(weight, first, last, start, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return ROWS rows of the weight, from `first` on and below `last`, in WIDTH columns."""
    n = first + tl.arange(0, ROWS)
    k = start + tl.arange(0, WIDTH)
    inside = (n < last)[:, None] & (k < K)[None, :]
    return tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)


@jit
def part_scales(
    scale, weight, first, start, K, scale_row, scale_col, EDGE: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the scales of WIDTH columns, one for each 16 bytes; zeros if blocks have none.

    The rows from `first` on lie within one block.
    """
    VECTOR: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    s = tl.zeros((WIDTH // VECTOR,), tl.float32)
    if EDGE > 1:
        g = start + tl.arange(0, WIDTH // VECTOR) * VECTOR
        at = scale + first // 128 * scale_row + g // 128 * scale_col
        s = tl.load(at, mask=g < K, other=0.0)
    return s


@jit
def row_scales(scale, first, last, EDGE: tl.constexpr, ROWS: tl.constexpr):
    """Return the scales of ROWS rows; zeros if rows have none."""
    s = tl.zeros((ROWS,), tl.float32)
    if EDGE == 1:
        n = first + tl.arange(0, ROWS)
        s = tl.load(scale + n, mask=n < last, other=0.0)
    return s


@jit
def no_products(weight, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return zeros for `add_products` to start from."""
    VECTOR: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    return tl.zeros((ROWS, WIDTH // VECTOR), tl.float32)


@jit
def widened(w):
    """Return w in float32; bfloat16 by one instruction, where the compiler takes three for two."""
    if INTERPRET or w.dtype != tl.bfloat16:
        wide = w.to(tl.float32)
    else:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r",
            [w],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return wide


@jit
def add_products(total, w, x_K, s, EDGE: tl.constexpr):
    """Return total plus w * x_K, summed over the 16 bytes of weights that a thread loaded at once.

    s  as `part_scales` gives them
    """
    NUM: tl.constexpr = total.shape[1]
    VECTOR: tl.constexpr = x_K.shape[0] // NUM
    w = widened(tl.reshape(w, (total.shape[0], NUM, VECTOR)))
    products = tl.sum(w * tl.reshape(x_K, (NUM, VECTOR))[None, :, :], 2)
    if EDGE > 1:
        products *= s.to(tl.float32)[None, :]
    return total + products


@jit
def no_row_products(weight, ROWS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """Return zeros for `add_row_products` to start from."""
    totals = ()
    for _ in tl.static_range(ROWS):
        totals += (no_products(weight, N, WIDTH),)  # type: ignore[assignment]
    return totals


@jit
def add_row_products(totals, w, parts, s, EDGE: tl.constexpr, ROWS: tl.constexpr):
    """Return `add_products` of each row of x: the weights are read and converted once."""
    after = ()
    for row in tl.static_range(ROWS):
        after += (add_products(totals[row], w, parts[row], s, EDGE),)  # type: ignore[assignment]
    return after


@jit
def finished_rows(totals, s_N, EDGE: tl.constexpr, ROWS: tl.constexpr):
    """Return the sums [N] of each row of x, times scales of whole rows of w if there are such."""
    ys = sums(totals, 1, ROWS)
    if EDGE == 1:
        ys = [y_N * s_N.to(tl.float32) for y_N in ys]
    return ys


@jit
def finished(total, s_N, EDGE: tl.constexpr):
    """Return the sums [ROWS], times the scales of whole rows if there are such."""
    y = tl.sum(total, 1)
    if EDGE == 1:
        y *= s_N.to(tl.float32)
    return y


@jit
def rounded(x, like):
    """Return x rounded to the dtype of the pointer `like`, in float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@jit
def gate_up_rows(i, first, F, HALF: tl.constexpr):
    """Return the rows of [gate | up] for the numbers i in a tile: HALF of gate, as many of up."""
    return i // HALF * F + tl.minimum(first + i % HALF, F - 1)


@jit
def silu_times(gate, up, like):
    """Return silu(gate) * up in float32, each step rounded to the dtype of the pointer `like`."""
    gate = rounded(gate, like)
    return rounded(gate * tl.sigmoid(gate), like) * rounded(up, like)
