"""Blocks of IQ2 and IQ3 on the GPU: a scale, and a point of the grid for 4 or 8 columns.

Chosen for: IQ2_XXS to IQ3_S, by i_quants.

    |w| ~ s g      g the levels 2 c + 1 of points, 1..5 or 1..15

`quant.ggml.i_fit` has the search, whose operations these are, in their order. One thread has a
block's columns in its registers; while neighbours of a point are looked at, the threads of a warp
walk lists of their own, as many steps as the longest has.

Traps: ggml's rounding trick makes 0 of a CPU's NaN, see `nearest`. Triton compiles for a time that
grows with the square of the operations, times the loads and stores: hence one search for the
scales that are tried and for what is taken again, and few, packed loads and stores.

Shape letters: B blocks; LANES of a program.
"""

from __future__ import annotations

from runtime.kernels.encode.i_magnitudes import prepared, top_of
from runtime.kernels.encode.k_parts import inverse, nearest
from runtime.kernels.encode.levels import search_levels
from runtime.kernels.launch import jit, tl

# The sum of squares of a neighbour must be below it.
MOST = tl.constexpr(3.4028234663852886e38) if tl else None
# What is taken again with the best scale: points off the grid, all if one is off, all.
OFF, ALL_IF_OFF, ALL = tuple(map(tl.constexpr, range(3))) if tl else (None,) * 3
# Where an entry of a list says how many neighbours there are; above, where they begin.
COUNT_BITS, COUNT_MASK = tuple(map(tl.constexpr, (9, 511))) if tl else (None,) * 2


@jit
def begin_by_levels_kernel(
    w,
    importance,
    scales,
    B,
    K,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    LEVELS: tl.constexpr,
    SPREAD: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the scale that a search without a grid gives each of LANES of B blocks."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    x, v, _ = prepared(w, importance, block, B, K, EVEN, SPREAD, 0.0, LANES, COLUMNS)
    scale, _ = search_levels(x, v, LEVELS, COLUMNS)
    tl.store(scales + block, scale, mask=block < B)


@jit
def fit_i_kernel(
    w,
    importance,
    lists,
    words,
    begun,
    scales,
    places,
    signs,
    B,
    K,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    LEAST: tl.constexpr,
    SPREAD: tl.constexpr,
    PLAIN: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    STEP: tl.constexpr,
    AGAIN: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write scales, places of points and signs of LANES of B blocks.

    lists   where the neighbours of a place begin in `words`, and how many there are
    begun   scales of `begin_by_levels_kernel`, None for a type that begins with the largest weight
    places  four to an int64, signs  four to an int32
    """
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = block < B
    x, v, minus = prepared(w, importance, block, B, K, EVEN, SPREAD, PLAIN, LANES, COLUMNS)
    if begun is None:
        top = top_of(x, LEAST, COLUMNS)
        scale = tl.div_rn(top, tl.full(top.shape, 15.0 if GROUP == 4 else 5.0, tl.float32))
    else:
        scale = tl.load(begun + block, mask=inside, other=0.0)
        top = tl.maximum(scale, 0.0) * 3.0
    some = top > 0
    top = tl.where(some, top, 1.0)
    scale, found = _fit(x, v, top, scale, lists, words, ATTEMPTS, STEP, AGAIN, COLUMNS, GROUP)
    tl.store(scales + block, tl.where(some, scale, 0.0), mask=inside)
    tl.store(signs + block, tl.where(some, minus, 0), mask=inside)
    for k in tl.static_range(COLUMNS // GROUP // 4 + 1):
        packed = tl.zeros((LANES,), tl.int64)
        for i in tl.static_range(min(4, COLUMNS // GROUP)):
            if 4 * k + i < COLUMNS // GROUP:
                packed |= _place(found[4 * k + i], GROUP).to(tl.int64) << 16 * i
        if 4 * k < COLUMNS // GROUP:
            to = places + block * ((COLUMNS // GROUP + 3) // 4) + k
            tl.store(to, tl.where(some, packed, 0), mask=inside)


@jit
def _fit(
    x,
    v,
    top,
    scale,
    lists,
    words,
    ATTEMPTS: tl.constexpr,
    STEP: tl.constexpr,
    AGAIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the scale and the words of the points; the last pass takes points again."""
    largest: tl.constexpr = 15.0 if GROUP == 4 else 5.0
    passes: tl.constexpr = 2 * ATTEMPTS + 2
    r, found = (), ()
    for j in tl.static_range(COLUMNS):
        r += (tl.sqrt_rn(v[j]),)  # type: ignore[assignment]
    for _ in tl.static_range(COLUMNS // GROUP):
        found += (tl.full(top.shape, 0x1111 if GROUP == 4 else 0o11111111, tl.int32),)  # type: ignore[assignment]
    off = tl.full(top.shape, 0 if AGAIN == OFF else 255, tl.int32)
    best = tl.full(top.shape, 0.0, tl.float32)
    t = best - ATTEMPTS
    for i in range(passes):
        last = i == passes - 1
        slope = tl.where(last, inverse(scale), tl.div_rn(t * STEP + largest, top))
        wanted = tl.where(last, _taken_again(off, scale, AGAIN), 255)
        near = tl.where(last, scale, inverse(slope))
        tried, missed = _points(x, r, slope, near, wanted, found, lists, words, COLUMNS, GROUP)
        dot, square = _sums(x, v, tried, COLUMNS, GROUP)
        better = (square > 0) & ((dot * dot > best * square) | last) & (wanted != 0)
        scale = tl.where(better, tl.div_rn(dot, square), scale)
        best, off = tl.where(better, scale * dot, best), tl.where(better, missed, off)
        found = _choose(better | last, tried, found)
        t += 1.0
    return scale, found


@jit
def _taken_again(off, scale, AGAIN: tl.constexpr):
    """Return which points are taken again, a bit for each."""
    if AGAIN == ALL_IF_OFF:
        off = tl.where(off == 0, 0, 255)
    if AGAIN == ALL:
        off = off | 255
    return tl.where(scale > 0, off, 0)


@jit
def _choose(mask, a, b):
    """Return a tuple of a where the mask is true, of b elsewhere."""
    chosen = ()
    for k in tl.static_range(len(a)):
        chosen += (tl.where(mask, a[k], b[k]),)  # type: ignore[assignment]
    return chosen


@jit
def _points(
    x,
    r,
    slope,
    scale,
    wanted,
    before,
    lists,
    words,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the words of the points of one scale, and which were off the grid.

    wanted  a bit for each point; others stay as `before`
    """
    base: tl.constexpr = 8 if GROUP == 4 else 3
    width: tl.constexpr = 4 if GROUP == 4 else 3
    found, off = (), wanted * 0
    for k in tl.static_range(COLUMNS // GROUP):
        place, word = wanted * 0, wanted * 0
        for back in tl.static_range(GROUP):
            y = 0.5 * (slope * x[k * GROUP + GROUP - 1 - back] - 1.0)
            code = tl.minimum(tl.maximum(nearest(y), 0), base - 1)
            place, word = place * base + code, word << width | (2 * code + 1)
        this = (wanted >> k & 1) == 1
        word = tl.where(this, word, before[k])
        entry = tl.where(this, tl.load(lists + place), 0)
        count, to = entry & COUNT_MASK, words + (entry >> COUNT_BITS)
        off |= tl.where(count > 0, 1 << k, 0)
        found += (_neighbour(x, r, k, scale, word, to, count, GROUP),)  # type: ignore[assignment]
    return found, off


@jit
def _neighbour(x, r, k: tl.constexpr, scale, word, words, count, GROUP: tl.constexpr):
    """Return the nearest of `count` neighbours, `word` where there is none."""
    width: tl.constexpr = 4 if GROUP == 4 else 3
    least = tl.full(count.shape, MOST, tl.float32)
    for i in range(tl.max(count, 0)):
        inside = i < count
        near = tl.load(words, mask=inside, other=0)
        words += 1
        total = tl.full(count.shape, 0.0, tl.float32)
        for j in tl.static_range(GROUP):
            level = (near >> width * j & ((1 << width) - 1)).to(tl.float32)
            gap = scale * level - x[k * GROUP + j]
            total += r[k * GROUP + j] * gap * gap
        less = inside & (total < least)
        word = tl.where(less | (inside & (i == 0)), near, word)
        least = tl.where(less, total, least)
    return word


@jit
def _sums(x, v, found, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return sum(v |w| g) and sum(v g^2) of the points' levels g."""
    width: tl.constexpr = 4 if GROUP == 4 else 3
    dot = tl.full(x[0].shape, 0.0, tl.float32)
    square = dot
    for j in tl.static_range(COLUMNS):
        word = found[j // GROUP] >> width * (j % GROUP)
        level = (word & ((1 << width) - 1)).to(tl.float32)
        dot += v[j] * x[j] * level
        square += v[j] * level * level
    return dot, square


@jit
def _place(word, GROUP: tl.constexpr):
    """Return the place of a word's point."""
    base: tl.constexpr = 8 if GROUP == 4 else 3
    width: tl.constexpr = 4 if GROUP == 4 else 3
    place = word * 0
    for back in tl.static_range(GROUP):
        code = word >> width * (GROUP - 1 - back) + 1 & ((1 << width - 1) - 1)
        place = place * base + code
    return place
