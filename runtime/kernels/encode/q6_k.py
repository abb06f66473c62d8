"""Q6_K on the GPU: see k_quants.

Chosen for: Q6_K, by k_quants.

    w ~ d l q              16 blocks of 16 columns with l to a super-block with d

Shape letters: B super-blocks of 256 columns; S super-blocks of a program.
"""

from __future__ import annotations

from runtime.kernels.encode.k_parts import biased, columns, finite
from runtime.kernels.launch import jit, tl


@jit
def encode_q6_k_kernel(w, out, B, S: tl.constexpr):
    """Write S of B super-blocks."""
    first = tl.program_id(0).to(tl.int64) * S
    block = tl.arange(0, S * 16)
    x = columns(w + first * 256 + block * 16, first + block // 16 < B, 16)
    scale, slope = _search_scale(x)
    d, level = _signed_levels(scale, S)
    super_block, s = tl.arange(0, S), tl.arange(0, 16)
    inside = first + super_block < B
    half = d.to(tl.float16)
    words = (out + first * 210).to(tl.pointer_type(tl.float16))
    tl.store(words + super_block * 105 + 104, half, mask=inside)
    to = out + first * 210 + super_block[:, None] * 210 + 192 + s[None, :]
    tl.store(to, (level & 0xFF).to(tl.uint8), mask=inside[:, None] & (s < 16)[None, :])
    step = half.to(tl.float32)[:, None] * level.to(tl.float32)
    # A super-block without scales is all zeros, whatever its blocks would have been.
    slope = tl.where((d == 0.0)[:, None], 0.0, tl.reshape(slope, (S, 16)))
    _store_six_bit_codes(w + first * 256, out + first * 210, step, slope, B - first, S)


@jit
def _search_scale(x):
    """Return the scale of each block and the slope of its codes, zeros for a block of zeros."""
    top, peak = tl.abs(x[0]), x[0]
    for j in tl.static_range(1, 16):
        above = tl.abs(x[j]) > top
        top, peak = tl.where(above, tl.abs(x[j]), top), tl.where(above, x[j], peak)
    slope = finite(tl.div_rn(tl.full(top.shape, -32.0, tl.float32), peak))
    dot, square = _sums(x, slope)
    scale = tl.where(square != 0.0, tl.div_rn(dot, square), 0.0)
    best = scale * dot
    t = tl.full(top.shape, -9.0, tl.float32)
    for _ in range(19):
        new = finite(tl.div_rn(-(t * 0.1 + 32.0), peak))
        dot, square = _sums(x, new)
        better = (square > 0.0) & (dot * dot > best * square) & (t != 0.0)
        scale = tl.where(better, tl.div_rn(dot, square), scale)
        slope, best = tl.where(better, new, slope), tl.where(better, scale * dot, best)
        t += 1.0
    some = top >= 1e-15
    return tl.where(some, scale, 0.0), tl.where(some, slope, 0.0)


@jit
def _sums(x, slope):
    """Return sum(v w q) and sum(v q^2) of one slope's codes, v = w^2."""
    dot = slope * 0.0
    square = dot
    for j in tl.static_range(16):
        code = tl.minimum(tl.maximum(biased(slope * x[j]), 0x400000 - 32), 0x400000 + 31)
        q = (code | 0x4B000000).to(tl.float32, bitcast=True) - 12582912.0
        v = x[j] * x[j]
        dot, square = dot + v * x[j] * q, square + v * q * q
    return dot, square


@jit
def _signed_levels(scale, S: tl.constexpr):
    """Return the unit [S] and the levels [S, 16], -128..127, of scales [16 S]."""
    scale = tl.reshape(scale, (S, 16))
    s = tl.arange(0, 16)[None, :]
    top = tl.max(tl.abs(scale), 1)
    first = tl.min(tl.where(tl.abs(scale) == top[:, None], s, 16), 1)
    peak = tl.sum(tl.where(s == first[:, None], scale, 0.0), 1)
    some = top >= 1e-15
    inverse = tl.div_rn(tl.full((S,), -128.0, tl.float32), tl.where(some, peak, 1.0))
    level = tl.minimum(biased(inverse[:, None] * scale) - 0x400000, 127)
    unit = tl.div_rn(tl.full((S,), 1.0, tl.float32), inverse)
    return tl.where(some, unit, 0.0), tl.where(some[:, None], level, 0)


@jit
def _quarters(x, S: tl.constexpr):
    """Return [2 S, 2] for each 32 columns of a half: what its two blocks have."""
    x = tl.permute(tl.reshape(x, (2 * S, 2, 2, 2)), (0, 3, 1, 2))
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@jit
def _store_six_bit_codes(w, out, step, slope, B, S: tl.constexpr):
    """Write low bits in pairs 64 columns apart, and high bits of four columns 32 apart."""
    steps, slopes = _quarters(step, S), _quarters(slope, S)
    half = tl.arange(0, 2 * S)[:, None, None]
    j = tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    inside = (half // 2 < B) & (j < 32)
    x = w + half * 128 + j
    a = _signed_code(tl.load(x, mask=inside, other=0.0), steps[0], slopes[0])
    b = _signed_code(tl.load(x + 32, mask=inside, other=0.0), steps[1], slopes[1])
    c = _signed_code(tl.load(x + 64, mask=inside, other=0.0), steps[2], slopes[2])
    d = _signed_code(tl.load(x + 96, mask=inside, other=0.0), steps[3], slopes[3])
    row, part = out + half // 2 * 210, half % 2
    high = a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6
    tl.store(row + part * 64 + j, (a & 15 | (c & 15) << 4).to(tl.uint8), mask=inside)
    tl.store(row + part * 64 + 32 + j, (b & 15 | (d & 15) << 4).to(tl.uint8), mask=inside)
    tl.store(row + 128 + part * 32 + j, high.to(tl.uint8), mask=inside)


@jit
def _signed_code(x, step, slope):
    """Return codes plus 32 of the stored scale; of the search, where that is zero."""
    x, step, slope = x.to(tl.float32), step[:, :, None], slope[:, :, None]
    none = step == 0.0
    stored = tl.div_rn(x, tl.where(none, 1.0, step))
    stored = tl.where(tl.abs(stored) >= 0.0, stored, 0.0)
    y = tl.where(none, slope * x, stored)
    code = tl.minimum(tl.maximum(biased(y), 0x400000 - 32), 0x400000 + 31) - (0x400000 - 32)
    return tl.where(none & (slope == 0.0), 0, code)
