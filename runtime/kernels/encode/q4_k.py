"""Q4_K on the GPU: see k_quants.

Chosen for: Q4_K, by k_quants.

    w ~ d l q - e m        8 blocks of 32 columns with l and m to a super-block with d and e

Shape letters: B super-blocks of 256 columns; S super-blocks of a program.
"""

from __future__ import annotations

from runtime.kernels.encode.k_parts import biased, columns, finite
from runtime.kernels.launch import jit, tl


@jit
def encode_q4_k_kernel(w, out, B, S: tl.constexpr):
    """Write S of B super-blocks."""
    first = tl.program_id(0).to(tl.int64) * S
    block = tl.arange(0, S * 8)
    inside = first + block // 8 < B
    x = columns(w + first * 256 + block * 32, inside, 32)
    scale, minimum, slope, start = _search(x)
    d, level = _levels(scale, S)
    e, depth = _levels(minimum, S)
    super_block = tl.arange(0, S)
    words = (out + (first + super_block) * 144).to(tl.pointer_type(tl.float16))
    tl.store(words, d.to(tl.float16), mask=first + super_block < B)
    tl.store(words + 1, e.to(tl.float16), mask=first + super_block < B)
    _store_levels(out + first * 144, level, depth, B - first, S)
    step = d.to(tl.float16).to(tl.float32)[:, None] * level.to(tl.float32)
    offset = e.to(tl.float16).to(tl.float32)[:, None] * depth.to(tl.float32)
    _store_codes(w + first * 256, out + first * 144, step, offset, slope, start, B - first, S)


@jit
def _search(x):
    """Return scale and minimum of each block, slope and start of the codes of its search."""
    least, high, square = x[0], x[0], x[0] * x[0]
    for j in tl.static_range(1, 32):
        least, high = tl.minimum(least, x[j]), tl.maximum(high, x[j])
        square += x[j] * x[j]
    rms = tl.sqrt_rn(square * 0.03125)
    sum_v, sum_vx = rms + tl.abs(x[0]), (rms + tl.abs(x[0])) * x[0]
    for j in tl.static_range(1, 32):
        v = rms + tl.abs(x[j])
        sum_v, sum_vx = sum_v + v, sum_vx + v * x[j]
    low = tl.minimum(least, 0.0)
    flat = high <= low
    slope = tl.div_rn(tl.full(low.shape, 15.0, tl.float32), high - low)
    scale = tl.div_rn(tl.full(low.shape, 1.0, tl.float32), slope)
    minimum, start = low, low
    slope = tl.where(flat, 0.0, finite(slope))
    best = _error(x, _codes(x, slope, start), rms, scale, minimum)
    t = tl.full(low.shape, 0.0, tl.float32)
    for _ in range(21):
        new_slope = finite(tl.div_rn((t * 0.1 - 1.0) + 15.0, high - minimum))
        t += 1.0
        q = _codes(x, new_slope, minimum)
        new_scale, new_minimum, solved = _line(x, q, rms, sum_v, sum_vx)
        error = _error(x, q, rms, new_scale, new_minimum)
        better = solved & (error < best) & (flat == 0)
        slope, start = tl.where(better, new_slope, slope), tl.where(better, minimum, start)
        best, scale = tl.where(better, error, best), tl.where(better, new_scale, scale)
        minimum = tl.where(better, new_minimum, minimum)
    return tl.where(flat, 0.0, scale), -minimum, slope, start


@jit
def _codes(x, slope, start):
    """Return the codes of 32 columns, in float32."""
    q = ()
    for j in tl.static_range(32):
        code = tl.minimum(tl.maximum(biased(slope * (x[j] - start)), 0x400000), 0x40000F)
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 12582912.0
        q += (value,)  # type: ignore[assignment]
    return q


@jit
def _line(x, q, rms, sum_v, sum_vx):
    """Return scale and minimum of least squares, and where there is one."""
    sum_q = sum_v * 0.0
    sum_qq, sum_qx = sum_q, sum_q
    for j in tl.static_range(32):
        vq = (rms + tl.abs(x[j])) * q[j]
        sum_q, sum_qq, sum_qx = sum_q + vq, sum_qq + vq * q[j], sum_qx + vq * x[j]
    determinant = sum_v * sum_qq - sum_q * sum_q
    scale = tl.div_rn(sum_v * sum_qx - sum_vx * sum_q, determinant)
    minimum = tl.div_rn(sum_qq * sum_vx - sum_q * sum_qx, determinant)
    above = minimum > 0
    scale = tl.where(above, tl.div_rn(sum_qx, sum_qq), scale)
    return scale, tl.where(above, 0.0, minimum), determinant > 0


@jit
def _error(x, q, rms, scale, minimum):
    """Return the sum of the weighed squares of the errors."""
    total = rms * 0.0
    for j in tl.static_range(32):
        e = (scale * q[j] + minimum) - x[j]
        total += (rms + tl.abs(x[j])) * (e * e)
    return total


@jit
def _levels(values, S: tl.constexpr):
    """Return the unit [S] and the levels [S, 8] of values [8 S]."""
    values = tl.reshape(values, (S, 8))
    top = tl.maximum(tl.max(values, 1), 0.0)
    inverse = finite(tl.div_rn(tl.full((S,), 63.0, tl.float32), top))
    level = biased(inverse[:, None] * values) & 0xFF
    return tl.div_rn(top, tl.full((S,), 63.0, tl.float32)), tl.minimum(level, 63)


@jit
def _halves(x, S: tl.constexpr):
    """Return the first four and the last four of eight."""
    return tl.split(tl.permute(tl.reshape(x, (S, 2, 4)), (0, 2, 1)))


@jit
def _store_levels(out, level, depth, B, S: tl.constexpr):
    """Write l and m of eight blocks into 12 bytes."""
    l_low, l_high = _halves(level, S)
    m_low, m_high = _halves(depth, S)
    super_block, s = tl.arange(0, S)[:, None], tl.arange(0, 4)[None, :]
    to, inside = out + super_block * 144 + s, (super_block < B) & (s < 4)
    tl.store(to + 4, (l_low | (l_high >> 4) << 6).to(tl.uint8), mask=inside)
    tl.store(to + 8, (m_low | (m_high >> 4) << 6).to(tl.uint8), mask=inside)
    tl.store(to + 12, (l_high & 15 | (m_high & 15) << 4).to(tl.uint8), mask=inside)


@jit
def _store_codes(w, out, step, offset, slope, start, B, S: tl.constexpr):
    """Write the codes of pairs of blocks, one block in the low bits."""
    step_low, step_high = tl.split(tl.reshape(step, (4 * S, 2)))
    offset_low, offset_high = tl.split(tl.reshape(offset, (4 * S, 2)))
    slope_low, slope_high = tl.split(tl.reshape(slope, (4 * S, 2)))
    start_low, start_high = tl.split(tl.reshape(start, (4 * S, 2)))
    pair, j = tl.arange(0, 4 * S)[:, None], tl.arange(0, 32)[None, :]
    x, inside = w + pair * 64 + j, (pair // 4 < B) & (j < 32)
    low = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + 32, mask=inside, other=0.0).to(tl.float32)
    low = _stored_code(low, step_low, offset_low, slope_low, start_low)
    high = _stored_code(high, step_high, offset_high, slope_high, start_high)
    to = out + pair // 4 * 144 + 16 + pair % 4 * 32 + j
    tl.store(to, (low | high << 4).to(tl.uint8), mask=inside)


@jit
def _stored_code(x, step, offset, slope, start):
    """Return codes of the stored scale; of the search, where that is zero."""
    none = (step == 0.0)[:, None]
    stored = tl.div_rn(x + offset[:, None], tl.where(none, 1.0, step[:, None]))
    # NaN where a scale was too large for float16
    stored = tl.where(tl.abs(stored) >= 0.0, stored, 0.0)
    y = tl.where(none, slope[:, None] * (x - start[:, None]), stored)
    return tl.minimum(tl.maximum(biased(y), 0x400000), 0x40000F) & 15
