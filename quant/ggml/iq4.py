"""The loops of IQ4_NL and IQ4_XS: 4-bit codes into a table of 16 unequal steps, searched scales.

    IQ4_NL   w ~ d T[q]            one float16 d per 32 columns
    IQ4_XS   w ~ d (l - 32) T[q]   one float16 d per 256 columns, one 6-bit l per 32

A block of 32 columns tries sixteen scales, 1 / d = 127 / w_max and (t - 127) / w_max for t = -7..7,
where w_max is the weight of largest magnitude. For each it takes the nearest entries q of the table
and the scale of least squares for them, sum(v w q) / sum(v q^2); the one that leaves the least
sum(v e^2) wins. v is w^2 or, with an importance matrix, importance * sqrt(2 mean(w^2) + w^2). At
last the codes are taken again with the scale that is stored, before float16 rounds it.

Bytes are those of ggml (`quantize_iq4_nl`, `quantize_iq4_xs`): every sum runs over the columns in
order, in float32. What makes it fast: LANES blocks lie side by side, column by column, so that
vectors run over blocks; and the fifteen scales t differ so little that they move no column by more
than one entry: 134 / 120 is less than the ratio of any two neighbouring midpoints. The table is
searched for the first and the last of them; between, a column has one of two entries and one
midpoint to compare with.

Arrays hold bits: a weight is uint16 (bfloat16) or uint32 (float32), [B, 32] blocks; stored blocks
are uint8. Importance is float32 [C, 32], of the C blocks of one row, or [0, 32] for none. Encoders
return False if a weight is not finite, or a scale is beyond float16. In loops j is a column, i a
lane, b a block, s a super-block of eight.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from quant.ggml.iq4_table import TABLE
from quant.ggml.stored_scales import load_half, store_finite_half
from quant.numba_ops import as_bits, as_float, inline, loop

u8, u32, u64 = np.uint8, np.uint32, np.uint64
i32, f32 = np.int32, np.float32

VALUES = tuple(map(f32, TABLE))
# Between two entries the nearest changes here, and a tie goes up.
M = tuple(f32((a + b) / 2) for a, b in pairwise(TABLE))
STEPS = tuple(f32(b - a) for a, b in pairwise(TABLE))

LANES = u64(32)
BLOCK, HALF, EIGHT = u64(32), u64(16), u64(8)
SMALLEST = f32(1e-15)
# Where the planes, of what is known of each column and lane, begin in one flat array: LLVM would
# doubt that arrays are apart, or rows whose width it does not know, and would not vectorise.
# A cache line between two planes keeps reads from waiting for a write 4096 bytes away.
X, V, BELOW, MIDDLE, ABOVE, PLANES = (u64(k * (32 * 32 + 16)) for k in range(6))
# Far beyond float16 scales, and far below where the sums of cubes overflow.
LARGEST = f32(2.0**32)


@loop
def encode_iq4_nl(w, importance, out):
    """Fill out [B, 18]: d, 16 pairs of codes."""
    plane = np.zeros(PLANES, f32)
    top, peak = np.zeros(LANES, f32), np.zeros(LANES, f32)
    num_blocks = u64(w.shape[0])
    for first in range(u64(0), num_blocks, LANES):
        count = min(LANES, u64(num_blocks - first))
        if not _load(w, first, count, plane, top, peak):
            return False
        if not _encode_lanes_nl(plane, top, peak, importance, first, count, out):
            return False
    return True


@loop
def encode_iq4_xs(w, importance, out):
    """Fill out [B / 8, 136]: d, the high bits of eight l, their low bits, 128 pairs of codes."""
    plane = np.zeros(PLANES, f32)
    top, peak = np.zeros(LANES, f32), np.zeros(LANES, f32)
    num_blocks = u64(w.shape[0])
    for first in range(u64(0), num_blocks, LANES):
        count = min(LANES, u64(num_blocks - first))
        if not _load(w, first, count, plane, top, peak):
            return False
        if not _encode_lanes_xs(plane, top, peak, importance, first, count, out):
            return False
    return True


@loop
def decode_iq4_nl(data, out):
    """Fill out [B, 32] float32 with the values of data [B, 18]."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        for j in range(HALF):
            pair = data[b, u64(j + u64(2))]
            out[b, j] = f32(d * VALUES[pair & u8(15)])
            out[b, u64(j + HALF)] = f32(d * VALUES[pair >> u8(4)])


@loop
def decode_iq4_xs(data, out):
    """Fill out [B, 256] float32 with the values of data [B, 136]."""
    for b in range(u64(data.shape[0])):
        d = load_half(data, b, u64(0))
        high = u32(u32(data[b, 2]) | u32(u32(data[b, 3]) << u32(8)))
        for s in range(EIGHT):
            low = u32(data[b, u64(u64(4) + u64(s // u64(2)))]) >> u32(u64(4) * u64(s % u64(2)))
            bits = u32(u32(high >> u32(u64(2) * s)) & u32(3)) << u32(4)
            step = f32(d * f32(i32(i32(u32(low & u32(15)) | u32(bits)) - i32(32))))
            for j in range(HALF):
                pair = data[b, u64(u64(u64(8) + u64(HALF * s)) + j)]
                out[b, u64(u64(BLOCK * s) + j)] = f32(step * VALUES[pair & u8(15)])
                out[b, u64(u64(u64(BLOCK * s) + HALF) + j)] = f32(step * VALUES[pair >> u8(4)])


@loop
def _encode_lanes_nl(plane, top, peak, importance, first, count, out):
    """Write `count` blocks; return False if a scale is infinite."""
    scale, inverse = np.empty(LANES, f32), np.empty(LANES, f32)
    codes = np.empty(V, i32)
    _weigh(importance, first, u64(1), plane)
    _search(plane, top, peak, scale)
    for i in range(LANES):
        inverse[i] = f32(f32(1) / scale[i]) if scale[i] != f32(0) else f32(0)
    _nearest_codes(plane, inverse, codes)
    for i in range(count):
        if not store_finite_half(out, u64(first + i), u64(0), scale[i]):
            return False
        _store_pairs(codes, i, out, u64(first + i), u64(2))
    return True


@loop
def _encode_lanes_xs(plane, top, peak, importance, first, count, out):
    """Write `count` blocks, in super-blocks; return False if a scale is infinite."""
    scale, inverse = np.empty(LANES, f32), np.zeros(LANES, f32)
    codes = np.empty(V, i32)
    _weigh(importance, first, EIGHT, plane)
    _search(plane, top, peak, scale)
    for i in range(u64(0), count, EIGHT):
        if not _store_scales(scale, i, inverse, out, u64(u64(first + i) // EIGHT)):
            return False
    _nearest_codes(plane, inverse, codes)
    for i in range(count):
        b = u64(first + i)
        _store_pairs(codes, i, out, u64(b // EIGHT), u64(u64(8) + u64(HALF * u64(b % EIGHT))))
    return True


@inline
def _at(j, i):
    """Return where a plane has column j of lane i."""
    return u64(u64(j * LANES) + i)


@inline
def _load(w, first, count, plane, top, peak):
    """Lay blocks side by side, with their largest magnitude and the weight that has it first.

    Lanes past `count` are zeros. Return False if a weight is too large or not finite.
    """
    for i in range(LANES):
        for j in range(BLOCK):
            plane[u64(X + _at(j, i))] = as_float(w[u64(first + i), j]) if i < count else f32(0)
    top[:] = 0
    peak[:] = 0
    for j in range(BLOCK):
        for i in range(LANES):
            x = plane[u64(X + _at(j, i))]
            above = abs(x) > top[i]
            top[i] = abs(x) if above else top[i]
            peak[i] = x if above else peak[i]
    for j in range(BLOCK):
        for i in range(LANES):
            top[i] = top[i] if abs(plane[u64(X + _at(j, i))]) < LARGEST else LARGEST
    below = True
    for i in range(LANES):
        below = below and top[i] < LARGEST
    return below


@loop
def _weigh(importance, first, size, plane):
    """Fill in what an error of each column weighs; `size` lanes are one block of theirs."""
    if importance.shape[0] == 0:
        for j in range(BLOCK):
            for i in range(LANES):
                plane[u64(V + _at(j, i))] = f32(
                    plane[u64(X + _at(j, i))] * plane[u64(X + _at(j, i))]
                )
        return
    mean = f32(0)
    for i in range(LANES):
        c = u64(u64(first + i) % u64(importance.shape[0]))
        if i % size == 0:
            mean = _mean_square(plane, i, size)
        for j in range(BLOCK):
            square = f32(plane[u64(X + _at(j, i))] * plane[u64(X + _at(j, i))])
            plane[u64(V + _at(j, i))] = f32(importance[c, j] * np.sqrt(f32(mean + square)))


@inline
def _mean_square(plane, i, size):
    """Return twice the mean of the squares of `size` lanes, summed one column after the other."""
    total = f32(0)
    for k in range(i, u64(i + size)):
        for j in range(BLOCK):
            total = f32(total + f32(plane[u64(X + _at(j, k))] * plane[u64(X + _at(j, k))]))
    return f32(total * f32(f32(2) / f32(BLOCK * size)))


@loop
def _search(plane, top, peak, scale):
    """Fill in the best scale of each lane, 0 for one of zeros."""
    inverse, best = np.empty(LANES, f32), np.empty(LANES, f32)
    dot, square = np.empty(LANES, f32), np.empty(LANES, f32)
    for i in range(LANES):
        inverse[i] = f32(f32(1) / f32(peak[i] / f32(127)))
    _nearest(plane, inverse, BELOW)
    for k in range(u64(PLANES - ABOVE)):
        plane[u64(ABOVE + k)] = plane[u64(BELOW + k)]
    _sums(plane, inverse, dot, square)
    for i in range(LANES):
        scale[i] = f32(dot[i] / square[i]) if square[i] > f32(0) else f32(0)
        best[i] = f32(scale[i] * dot[i])
    _bracket(plane, peak, inverse)
    for t in range(-134, -119):
        _divide(f32(t), peak, inverse)
        _sums(plane, inverse, dot, square)
        for i in range(LANES):
            product = f32(dot[i] * dot[i])
            better = square[i] > f32(0) and product > f32(best[i] * square[i])
            ratio = f32(dot[i] / square[i])
            scale[i] = ratio if better else scale[i]
            best[i] = f32(ratio * dot[i]) if better else best[i]
    for i in range(LANES):
        scale[i] = scale[i] if top[i] >= SMALLEST else f32(0)


@inline
def _bracket(plane, peak, inverse):
    """Fill in the two entries that a column may have in the fifteen scales, and their middle."""
    _divide(f32(-134), peak, inverse)
    _nearest(plane, inverse, BELOW)
    _divide(f32(-120), peak, inverse)
    _nearest(plane, inverse, ABOVE)
    for j in range(BLOCK):
        for i in range(LANES):
            first, last = plane[u64(BELOW + _at(j, i))], plane[u64(ABOVE + _at(j, i))]
            plane[u64(BELOW + _at(j, i))] = min(first, last)
            plane[u64(ABOVE + _at(j, i))] = max(first, last)
            plane[u64(MIDDLE + _at(j, i))] = f32(f32(first + last) * f32(0.5))


@inline
def _divide(x, peak, inverse):
    """Fill in x / peak."""
    for i in range(LANES):
        inverse[i] = f32(x / peak[i])


@loop
def _nearest(plane, inverse, to):
    """Fill in a plane with the table's nearest value to x * inverse."""
    for j in range(BLOCK):
        for i in range(LANES):
            y = f32(plane[u64(X + _at(j, i))] * inverse[i])
            q = VALUES[0]
            for k in range(15):
                q = f32(q + (STEPS[k] if y >= M[k] else f32(0)))
            plane[u64(to + _at(j, i))] = q


@loop
def _nearest_codes(plane, inverse, codes):
    """Fill in the index of the table's nearest value to x * inverse."""
    for j in range(BLOCK):
        for i in range(LANES):
            y = f32(plane[u64(X + _at(j, i))] * inverse[i])
            codes[_at(j, i)] = i32(
                i32(i32(y >= M[0]) + i32(y >= M[1]))
                + i32(i32(y >= M[2]) + i32(y >= M[3]))
                + i32(i32(y >= M[4]) + i32(y >= M[5]))
                + i32(i32(y >= M[6]) + i32(y >= M[7]))
                + i32(i32(y >= M[8]) + i32(y >= M[9]))
                + i32(i32(y >= M[10]) + i32(y >= M[11]))
                + i32(i32(y >= M[12]) + i32(y >= M[13]))
                + i32(y >= M[14])
            )


@loop
def _sums(plane, inverse, dot, square):
    """Fill in sum(v w q) and sum(v q^2), with q on one side of the middle or on the other."""
    dot[:] = 0
    square[:] = 0
    for four in range(u64(0), BLOCK, u64(4)):
        for i in range(LANES):
            a, b = dot[i], square[i]
            for step in range(4):
                j = u64(four + u64(step))
                x = plane[u64(X + _at(j, i))]
                # Read both: two reads of one array in two branches become a slow gather.
                below, above = plane[u64(BELOW + _at(j, i))], plane[u64(ABOVE + _at(j, i))]
                q = above if f32(x * inverse[i]) >= plane[u64(MIDDLE + _at(j, i))] else below
                vq = f32(plane[u64(V + _at(j, i))] * q)
                a = f32(a + f32(vq * x))
                b = f32(b + f32(vq * q))
            dot[i], square[i] = a, b


@inline
def _store_scales(scale, i, inverse, out, s):
    """Write d and eight l of a super-block; fill in 1 / (d l). Return False if d is infinite."""
    top, peak = f32(0), f32(0)
    for k in range(i, u64(i + EIGHT)):
        if abs(scale[k]) > top:
            top, peak = abs(scale[k]), scale[k]
    d = f32(-peak / f32(32))
    per_d = f32(f32(1) / d) if d != f32(0) else f32(0)
    high = u32(0)
    out[s, 4:8] = 0
    for k in range(EIGHT):
        rounded = as_bits(f32(f32(per_d * scale[u64(i + k)]) + f32(12582912)))
        level = min(max(i32(i32(rounded & u32(0x7FFFFF)) - i32(0x400000)), i32(-32)), i32(31))
        step = f32(d * f32(level))
        inverse[u64(i + k)] = f32(f32(1) / step) if step != f32(0) else f32(0)
        bits = u32(level + i32(32))
        low = u8(u32(bits & u32(15)) << u32(u64(4) * u64(k % u64(2))))
        out[s, u64(u64(4) + u64(k // u64(2)))] |= low
        high = u32(high | u32(u32(bits >> u32(4)) << u32(u64(2) * k)))
    out[s, 2], out[s, 3] = u8(high & u32(0xFF)), u8(high >> u32(8))
    return store_finite_half(out, s, u64(0), d)


@inline
def _store_pairs(codes, i, out, b, at):
    """Write the 32 codes of a lane, the first half in the low nibbles."""
    for j in range(HALF):
        low, high = u32(codes[_at(j, i)]), u32(codes[_at(u64(j + HALF), i)])
        out[b, u64(at + j)] = u8(low | u32(high << u32(4)))
