"""The loops that store super-blocks of Q2_K to Q6_K: the last codes, and where bits go.

    Q2_K   84 bytes   16 (l + 16 m), 64 pairs of pairs of 2-bit codes, d, e
    Q3_K  110 bytes   32 third bits, 64 low bits as in Q2_K, 12 of 6-bit l + 32, d
    Q4_K  144 bytes   d, e, 12 of 6-bit l and m, 128 pairs of codes
    Q5_K  176 bytes   d, e, 12 of 6-bit l and m, 32 fifth bits, 128 pairs of low bits
    Q6_K  210 bytes   128 pairs of low bits, 64 of two high bits, 16 l, d

Codes are those of the stored scales: q = (w + e m) / (d l), or w / (d l), rounded and clamped. In a
block whose d l is zero every code means the same, and ggml leaves those of the search; `guarded`
says which rounding that had, see `_codes` in `k_lines`.

Arrays: w float32 [B, 256]; fits as `k_lines` and `k_steps` fill them; levels l and m
int32 [B n]; units d and e float32 [B]; out uint8 [at least B' bytes], B' <= B. In loops b is a
super-block, s a block of it, j a column.
"""

from __future__ import annotations

import numpy as np

from quant.ggml.lane_types import LANES
from quant.ggml.lanes import clamp, floats, load, nearest, splat, store, whole
from quant.ggml.stored_scales import load_six_bits, store_half
from quant.numba_ops import inline, loop

u8, u16, u64, i32, f32 = np.uint8, np.uint16, np.uint64, np.int32, np.float32

W = u64(LANES)
SUPER, HALF, QUARTER = u64(256), u64(128), u64(32)


@loop
def store_q2_k(w, fits, guarded, scales, minima, d, e, out):
    """Write B' rows of 84 bytes."""
    codes, flat = np.empty(SUPER, i32), out.reshape(-1)
    for b in range(u64(out.shape[0])):
        dd, ee = store_half(out, b, u64(80), d[b]), store_half(out, b, u64(82), e[b])
        for s in range(u64(16)):
            k = b * u64(16) + s
            pair = u8(i32(scales[k] | i32(minima[k] << i32(4))) & i32(255))
            out[b, s] = pair
            step, offset = f32(dd * f32(pair & u8(15))), f32(ee * f32(pair >> u8(4)))
            _line_codes(w, b, s, u64(16), fits, k, step, offset, f32(3), guarded, codes)
        _store_low_bits(codes, flat, b * u64(84) + u64(16))


@loop
def store_q4_k(w, fits, guarded, scales, minima, d, e, out):
    """Write B' rows of 144 bytes, or of 176, Q5_K."""
    codes, flat, words = np.empty(SUPER, i32), out.reshape(-1), np.empty((2, 8), u8)
    size = u64(out.shape[1])
    five = size == u64(176)
    most = f32(31) if five else f32(15)
    # With an importance, ggml does not clip Q4_K's levels.
    largest = i32(255) if guarded and not five else i32(63)
    for b in range(u64(out.shape[0])):
        dd, ee = store_half(out, b, u64(0), d[b]), store_half(out, b, u64(2), e[b])
        for s in range(u64(8)):
            k = b * u64(8) + s
            words[0, s], words[1, s] = u8(min(scales[k], largest)), u8(min(minima[k], largest))
        _store_six_bits(words, out, b)
        for s in range(u64(8)):
            k = b * u64(8) + s
            level, minimum = load_six_bits(out, b, s)
            step, offset = f32(dd * f32(level)), f32(ee * f32(minimum))
            _line_codes(w, b, s, u64(32), fits, k, step, offset, most, guarded, codes)
        at = b * size + u64(16)
        if five:
            _store_fifth_bits(codes, flat, at)
        _store_pairs(codes, flat, at + u64(32) if five else at)


@loop
def store_q3_k(w, fits, kept, scales, d, out):
    """Write B' rows of 110 bytes; `kept` [0, 256]: the search's codes are those of its slopes."""
    codes, flat = np.empty(SUPER, i32), out.reshape(-1)
    for b in range(u64(out.shape[0])):
        dd = store_half(out, b, u64(108), d[b])
        out[b, 96:108] = 0
        for s in range(u64(16)):
            k = b * u64(16) + s
            level = u8(scales[k] + i32(32))
            low = u8(u8(level & u8(15)) << u8(u64(4) * (s // u64(8))))
            high = u8(u8(level >> u8(4)) << u8(u64(2) * (s // u64(4))))
            out[b, u64(96) + s % u64(8)] |= low
            out[b, u64(104) + s % u64(4)] |= high
            step = f32(dd * f32(scales[k]))
            if step == f32(0) and kept.shape[0] > 0:
                for j in range(s * u64(16), (s + u64(1)) * u64(16)):
                    codes[j] = i32(kept[b, j])
            else:
                _step_codes(w, b, s, fits, k, step, f32(4), codes)
        at = b * u64(110)
        for j in range(u64(0), QUARTER, W):
            third = splat(i32(0))
            for s in range(u64(8)):
                code = load(codes, s * QUARTER + j)
                third = third | ((code >> splat(i32(2))) & splat(i32(1))) << splat(i32(s))
            store(flat, at + j, third)
        _store_low_bits(codes, flat, at + QUARTER)


@loop
def store_q6_k(w, fits, scales, d, out):
    """Write B' rows of 210 bytes."""
    codes, flat = np.empty(SUPER, i32), out.reshape(-1)
    for b in range(u64(out.shape[0])):
        dd, blank = store_half(out, b, u64(208), d[b]), True
        for s in range(u64(16)):
            k = b * u64(16) + s
            out[b, u64(192) + s] = u8(scales[k] & i32(255))
            blank = blank and scales[k] == i32(0)
            _step_codes(w, b, s, fits, k, f32(dd * f32(scales[k])), f32(32), codes)
        if blank:
            codes[:] = 0
        _store_six_bit_codes(codes, flat, b * u64(210))


@inline
def _line_codes(w, b, s, columns, fits, k, step, offset, most, guarded, codes):
    """Fill in the codes of a block of 16 or 32 columns, number k of `fits`."""
    flat, first = w.reshape(-1), s * columns
    low, high = splat(f32(0)), splat(most)
    slope, start = splat(fits[2, k]), splat(fits[3, k])
    for j in range(first, first + columns, W):
        x = load(flat, b * SUPER + j)
        if step != f32(0):
            q = clamp(floats(nearest((x + splat(offset)) / splat(step))), low, high)
        elif guarded:
            q = whole(clamp(slope * (x - start), low, high))
        else:
            q = clamp(floats(nearest(slope * (x - start))), low, high)
        store(codes, j, nearest(q))


@inline
def _step_codes(w, b, s, fits, k, step, most, codes):
    """Fill in the codes of a block of 16 columns, plus `most`; 0 where the search had no slope."""
    flat = w.reshape(-1)
    low, high, shift = splat(f32(-most)), splat(f32(most - f32(1))), splat(i32(most))
    for j in range(s * u64(16), (s + u64(1)) * u64(16), W):
        x = load(flat, b * SUPER + j)
        if step != f32(0):
            q = clamp(floats(nearest(x / splat(step))), low, high)
        elif fits[1, k] != f32(0):
            q = whole(clamp(splat(fits[1, k]) * x, low, high))
        else:
            q = low
        store(codes, j, nearest(q) + shift)


@inline
def _store_six_bits(words, out, b):
    """Write l and m of eight blocks into 12 bytes."""
    for s in range(u64(4)):
        level, minimum = words[0, s + u64(4)], words[1, s + u64(4)]
        out[b, u64(4) + s] = u8(words[0, s] | u8(u8(level >> u8(4)) << u8(6)))
        out[b, u64(8) + s] = u8(words[1, s] | u8(u8(minimum >> u8(4)) << u8(6)))
        out[b, u64(12) + s] = u8(u8(level & u8(15)) | u8(u8(minimum & u8(15)) << u8(4)))


@inline
def _store_low_bits(codes, flat, at):
    """Write the two low bits of 256 codes: a byte has those of columns 32 apart."""
    ones = splat(i32(3))
    for half in range(u64(2)):
        for j in range(u64(0), QUARTER, W):
            byte = splat(i32(0))
            for s in range(u64(4)):
                code = load(codes, half * HALF + s * QUARTER + j)
                byte = byte | (code & ones) << splat(i32(u64(2) * s))
            store(flat, at + half * QUARTER + j, byte)


@inline
def _store_pairs(codes, flat, at):
    """Write the four low bits of 256 codes: a byte has those of columns 32 apart."""
    ones, four = splat(i32(15)), splat(i32(4))
    for pair in range(u64(4)):
        for j in range(u64(0), QUARTER, W):
            k = pair * u64(64) + j
            low, high = load(codes, k) & ones, load(codes, k + QUARTER) & ones
            store(flat, at + pair * QUARTER + j, low | high << four)


@inline
def _store_fifth_bits(codes, flat, at):
    """Write the fifth bits of 256 codes: a byte has those of columns 32 apart."""
    one, four = splat(i32(1)), splat(i32(4))
    for j in range(u64(0), QUARTER, W):
        byte = splat(i32(0))
        for s in range(u64(8)):
            code = load(codes, s * QUARTER + j)
            byte = byte | (code >> four & one) << splat(i32(s))
        store(flat, at + j, byte)


@inline
def _store_six_bit_codes(codes, flat, at):
    """Write 256 codes of Q6_K: pairs of low bits 64 columns apart, then high bits in fours."""
    ones, four = splat(i32(15)), splat(i32(4))
    for half in range(u64(2)):
        for j in range(u64(0), QUARTER, W):
            k, to = half * HALF + j, at + half * u64(64) + j
            a, b = load(codes, k), load(codes, k + u64(32))
            c, e = load(codes, k + u64(64)), load(codes, k + u64(96))
            store(flat, to, a & ones | (c & ones) << four)
            store(flat, to + QUARTER, b & ones | (e & ones) << four)
            two, six = splat(i32(2)), splat(i32(6))
            high = a >> four | (b >> four) << two | (c >> four) << four | (e >> four) << six
            store(flat, at + HALF + half * QUARTER + j, high)
