"""The loops that fit blocks of IQ2 and IQ3: a scale, and a point of the grid for 4 or 8 columns.

    |w| ~ s g      g the levels 2 c + 1 of points, 1..5 or 1..15

`i_magnitudes` has |w|, and the weight v of each column. `fit` tries the scales top / (n + t step)
for t = -a..a, n the largest level, top the largest |w| (IQ2_XXS: what a search without a grid makes
of it). For each it rounds to levels, takes of those off the grid the neighbour of least
sum(sqrt(v) (s g - |w|)^2), and the scale of least squares; the one that leaves the least
sum(v (|w| - s g)^2) wins. Its points off the grid, or all, are taken again with that scale.

Bytes are those of ggml's C (`quantize_row_iq2_*_impl`, `quantize_row_iq3_*_impl`): the same float32
operations in the same order. What makes them fast: each lane of a vector has a block of its own,
but while a neighbour is looked for, a neighbour of one block.

Arrays: x and v float32, |w| and weights of n blocks. In loops j counts columns, k points, i lanes.
A word holds the levels of a point, see `i_grids`.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.lane_types import LANES
from quant.ggml.lanes import (
    bits,
    choose,
    first,
    floats,
    gather,
    load,
    lowest,
    nearest,
    root,
    splat,
    store,
)
from quant.numba_ops import as_bits, inline, loop

u64, i32, f32 = np.uint64, np.int32, np.float32

W = u64(LANES)
# The sum of squares of a neighbour must be below it.
MOST = f32(np.finfo(f32).max)
# What is taken again with the best scale: points off the grid, all if one is off, all.
OFF, ALL_IF_OFF, ALL = i32(0), i32(1), i32(2)


@loop
def fit(x, v, tops, lists, table, columns, group, attempts, step, again, scales, words):
    """Fill in the scales of blocks, and the words of their points, int32 [columns / group, n].

    x, v      flat
    tops      [n], 0 of a block that is nothing
    lists     `first` of `i_grids.Neighbours`
    table     its `words`, flat
    attempts  a
    again     OFF, ALL_IF_OFF or ALL
    scales    [n], what a block begins with; a negative one, at the end, inverts the signs
    """
    shape = _shape(columns, group)
    size, num_points = u64(columns * W), u64(columns // group)
    planes = np.empty(size, f32), np.empty(size, f32), np.empty(size, f32), np.empty(size, f32)
    grid = lists, table, np.empty(W, i32)
    tried = np.empty(u64(num_points * W), i32), np.empty(W, i32)
    kept = np.empty(u64(num_points * W), i32), np.empty(W, i32)
    out = words.reshape(-1)
    for block in range(u64(0), u64(tops.size), W):
        _load_blocks(x, v, block, columns, planes)
        top = load(tops, block)
        some = splat(f32(0)) < top
        # Any number will do for blocks that are nothing.
        top = choose(some, top, splat(f32(1)))
        scale = load(scales, block)
        scale = _search(planes, grid, shape, top, scale, attempts, step, again, tried, kept)
        scale = _take_again(planes, grid, shape, scale, again, tried, kept)
        store(scales, block, choose(some, scale, splat(f32(0))))
        for k in range(num_points):
            word = choose(some, load(kept[0], u64(k * W)), _lowest_levels(shape))
            store(out, u64(u64(k * u64(tops.size)) + block), word)


@inline
def _shape(columns, group):
    """Return columns of a point, points of a block, largest code, base of places, bits of a level.

    The last three as vectors.
    """
    three = group == u64(4)
    most, base, width = (i32(7), i32(8), i32(4)) if three else (i32(2), i32(3), i32(3))
    return group, u64(columns // group), splat(most), splat(base), splat(width)


@inline
def _load_blocks(x, v, block, columns, planes):
    """Lay LANES blocks side by side: |w|, sqrt(v), v, v |w|."""
    a, r, b, ba = planes
    for j in range(columns):
        to, at = u64(j * W), u64(u64(block * columns) + j)
        store(a, to, gather(x, at, columns))
        store(b, to, gather(v, at, columns))
        store(r, to, root(load(b, to)))
        store(ba, to, load(b, to) * load(a, to))


@inline
def _lowest_levels(shape):
    """Return the word of a point whose codes are all 0."""
    group, _, _, _, width = shape
    word, one = splat(i32(0)), splat(i32(1))
    for _ in range(group):
        word = word << width | one
    return word


@inline
def _search(planes, grid, shape, top, scale, attempts, step, again, tried, kept):
    """Fill in the points of the best scale, and which were off the grid; return it."""
    _, num_points, most, _, _ = shape
    all_off, zero, one = splat(i32(255)), splat(f32(0)), splat(f32(1))
    store(kept[1], u64(0), splat(i32(0)) if again == OFF else all_off)
    for k in range(num_points):
        store(kept[0], u64(k * W), _lowest_levels(shape))
    largest = floats(most + most) + one
    best = zero
    for t in range(i32(-attempts), i32(attempts + i32(1))):
        inverse = (largest + splat(f32(f32(t) * step))) / top
        _find_points(planes, grid, shape, inverse, one / inverse, all_off, tried)
        dot, square = _sums(planes, shape, tried[0])
        better = (square > zero) & (dot * dot > best * square)
        scale = choose(better, dot / square, scale)
        best = choose(better, scale * dot, best)
        store(kept[1], u64(0), choose(better, load(tried[1], u64(0)), load(kept[1], u64(0))))
        for k in range(u64(0), u64(num_points * W), W):
            store(kept[0], k, choose(better, load(tried[0], k), load(kept[0], k)))
    return scale


@inline
def _take_again(planes, grid, shape, scale, again, tried, kept):
    """Fill in points anew with the scale that was found; return the scale for them."""
    _, num_points, _, _, _ = shape
    zero, none, one = splat(f32(0)), splat(i32(0)), splat(i32(1))
    wanted = load(kept[1], u64(0))
    if again == ALL:
        wanted = splat(i32(255))
    elif again == ALL_IF_OFF:
        wanted = choose(wanted == none, none, splat(i32(255)))
    wanted = choose(scale > zero, wanted, none)
    _find_points(planes, grid, shape, splat(f32(1)) / scale, scale, wanted, tried)
    for k in range(num_points):
        taken = (wanted >> splat(i32(k)) & one) == one
        old, new = load(kept[0], u64(k * W)), load(tried[0], u64(k * W))
        store(kept[0], u64(k * W), choose(taken, new, old))
    dot, square = _sums(planes, shape, kept[0])
    return choose((wanted != none) & (square > zero), dot / square, scale)


@inline
def _find_points(planes, grid, shape, inverse, scale, wanted, found):
    """Fill in the words of the points of one scale, and which are off the grid.

    wanted  int32, a bit for each point; what is found for others is no point
    """
    a, r, _, _ = planes
    lists, table, places = grid
    group, num_points, most, base, width = shape
    words, off = found
    needed, slopes = np.empty(W, i32), np.empty(W, f32)
    store(needed, u64(0), wanted)
    store(slopes, u64(0), scale)
    store(off, u64(0), splat(i32(0)))
    for k in range(num_points):
        place, word = _round_levels(a, u64(k * group), group, most, base, width, inverse)
        store(places, u64(0), place)
        store(words, u64(k * W), word)
        for i in range(W):
            start, stop = u64(lists[places[i]]), u64(lists[places[i] + i32(1)])
            if start < stop and needed[i] >> i32(k) & i32(1):
                off[i] |= i32(1) << i32(k)
                at = u64(u64(u64(k * group) * W) + i)
                words[u64(u64(k * W) + i)] = _neighbour(
                    a, r, at, group, width, slopes[i], table, start, stop
                )


@inline
def _round_levels(a, first_column, group, most, base, width, inverse):
    """Return the place and the word of the levels nearest to |w| / s."""
    half, one, zero = splat(f32(0.5)), splat(f32(1)), splat(i32(0))
    place, word = zero, zero
    for back in range(group):
        j = u64(u64(first_column + group) - u64(back + u64(1)))
        code = nearest(half * (inverse * load(a, u64(j * W)) - one))
        code = choose(code > zero, code, zero)
        code = choose(code < most, code, most)
        place = place * base + code
        word = word << width | (code + code + splat(i32(1)))
    return place, word


@inline
def _neighbour(a, r, at, group, width, scale, table, start, stop):
    """Return the word of the nearest neighbour of one lane's columns, which begin at `at`."""
    found, least = table[u64(start * W)], as_bits(MOST)
    ones, s = (splat(i32(1)) << width) - splat(i32(1)), splat(scale)
    for row in range(start, stop):
        word = load(table, u64(row * W))
        total = splat(f32(0))
        for j in range(group):
            to = u64(at + u64(j * W))
            gap = s * floats(word & ones) - splat(a[to])
            total = total + splat(r[to]) * gap * gap
            word = word >> width
        lowest_bits = lowest(total)
        if lowest_bits < least:
            least = lowest_bits
            lane = first(bits(total) == splat(i32(least)))
            found = table[u64(u64(row * W) + lane)]
    return found


@inline
def _sums(planes, shape, words):
    """Return sum(v |w| g) and sum(v g^2) of the points' levels g."""
    _, _, b, ba = planes
    group, num_points, _, _, width = shape
    ones = (splat(i32(1)) << width) - splat(i32(1))
    dot, square = splat(f32(0)), splat(f32(0))
    for k in range(num_points):
        word = load(words, u64(k * W))
        for j in range(u64(k * group), u64(u64(k + u64(1)) * group)):
            level = floats(word & ones)
            dot = dot + load(ba, u64(j * W)) * level
            square = square + load(b, u64(j * W)) * level * level
            word = word >> width
    return dot, square
