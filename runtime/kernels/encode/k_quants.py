"""Q4_K and Q6_K on the GPU: to the byte what the CPU's encoder, and so ggml's C, writes.

    Q4_K   w ~ d l q - e m        8 blocks of 32 columns with l and m to a super-block with d and e
    Q6_K   w ~ d l q              16 blocks of 16 columns with l to a super-block with d

`quant.k_lines` and `quant.k_steps` have the searches. Here one thread has a block's columns in its
registers and adds them up in their order, like a lane there; then threads side by side round a
super-block's scales, and rows are read again, coalesced, for the codes of what is stored.

Traps: bytes are equal only if products and sums are not fused (`enable_fp_fusion=False`) and
division and root round to nearest (`div_rn`, `sqrt_rn`). A GPU's NaN has other bits than a CPU's,
which ggml's rounding trick would show: hence an infinite slope becomes 0, from which follow the
same codes, all 0. Codes become floats by their bits: a conversion takes eight times as long.

Shape letters: N rows, K columns, B super-blocks of 256 columns; in kernels S super-blocks of a
program, P pairs of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import jit, tl, use_triton

if TYPE_CHECKING:
    from torch import Tensor

SUPER = 256
SUPER_BYTES = {"Q4_K": 144, "Q6_K": 210}
NUM_BLOCKS = 128  # of a program: one to a thread


def encode_k_reference(name: str, w_NK: Tensor) -> Tensor:
    """Say what `encode_k` computes: the blocks of `quant.k_quants`."""
    from quant.k_quants import encode_rows

    halves = w_NK.dtype == torch.bfloat16
    w = w_NK.detach().cpu() if halves else w_NK.detach().cpu().float()
    out = torch.empty(_shape(name, w_NK), dtype=torch.uint8)
    bits = w.contiguous().view(torch.uint16) if halves else w.contiguous()
    encode_rows(name, bits.numpy(), None, out.numpy())
    return out.to(w_NK.device)


def encode_k(name: str, w_NK: Tensor) -> Tensor:
    """Return the super-blocks of a weight, uint8 [N, row_bytes].

    name  "Q4_K" or "Q6_K"
    w_NK  [N, K] float, contiguous and finite; K a multiple of 256
    """
    assert w_NK.shape[1] % SUPER == 0, f"rows of {w_NK.shape[1]} are no super-blocks"
    if not use_triton(w_NK):
        return encode_k_reference(name, w_NK)
    assert w_NK.is_contiguous(), "super-blocks must follow each other"
    out = torch.empty(_shape(name, w_NK), dtype=torch.uint8, device=w_NK.device)
    kernel, size = (
        (_encode_q4_k_kernel, NUM_BLOCKS // 8)
        if name == "Q4_K"
        else (_encode_q6_k_kernel, NUM_BLOCKS // 16)
    )
    num_super = w_NK.numel() // SUPER
    if num_super:
        grid = (-(-num_super // size),)
        kernel[grid](w_NK, out, num_super, S=size, num_warps=4, enable_fp_fusion=False)
    return out


def encode_q4_k(w_NK: Tensor) -> Tensor:
    """Return the Q4_K super-blocks of a weight, uint8 [N, K / 256 * 144]: `encode_k`."""
    return encode_k("Q4_K", w_NK)


def _shape(name: str, w_NK: Tensor) -> tuple[int, int]:
    return w_NK.shape[0], w_NK.shape[1] // SUPER * SUPER_BYTES[name]


@jit
def _encode_q4_k_kernel(w, out, B, S: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * S
    block = tl.arange(0, S * 8)
    inside = first + block // 8 < B
    x = _columns(w + first * 256 + block * 32, inside, 32)
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
def _columns(w, inside, COLUMNS: tl.constexpr):
    """Return the columns of each block, one tensor each."""
    x = ()
    for j in tl.static_range(COLUMNS):
        x += (tl.load(w + j, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return x


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
    slope = tl.where(flat, 0.0, _finite(slope))
    best = _error(x, _codes(x, slope, start), rms, scale, minimum)
    t = tl.full(low.shape, 0.0, tl.float32)
    for _ in range(21):
        new_slope = _finite(tl.div_rn((t * 0.1 - 1.0) + 15.0, high - minimum))
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
def _finite(slope):
    """Return 0 for an infinite slope."""
    return tl.where(tl.abs(slope) < float("inf"), slope, 0.0)


@jit
def _biased(y):
    """Return 2^22 plus the nearest int32: ggml's trick, which wraps beyond 2^22."""
    return (y + 12582912.0).to(tl.int32, bitcast=True) & 0x7FFFFF


@jit
def _codes(x, slope, start):
    """Return the codes of 32 columns, in float32."""
    q = ()
    for j in tl.static_range(32):
        code = tl.minimum(tl.maximum(_biased(slope * (x[j] - start)), 0x400000), 0x40000F)
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
    inverse = _finite(tl.div_rn(tl.full((S,), 63.0, tl.float32), top))
    level = _biased(inverse[:, None] * values) & 0xFF
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
    return tl.minimum(tl.maximum(_biased(y), 0x400000), 0x40000F) & 15


@jit
def _encode_q6_k_kernel(w, out, B, S: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * S
    block = tl.arange(0, S * 16)
    x = _columns(w + first * 256 + block * 16, first + block // 16 < B, 16)
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
    slope = _finite(tl.div_rn(tl.full(top.shape, -32.0, tl.float32), peak))
    dot, square = _sums(x, slope)
    scale = tl.where(square != 0.0, tl.div_rn(dot, square), 0.0)
    best = scale * dot
    t = tl.full(top.shape, -9.0, tl.float32)
    for _ in range(19):
        new = _finite(tl.div_rn(-(t * 0.1 + 32.0), peak))
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
        code = tl.minimum(tl.maximum(_biased(slope * x[j]), 0x400000 - 32), 0x400000 + 31)
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
    level = tl.minimum(_biased(inverse[:, None] * scale) - 0x400000, 127)
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
    code = tl.minimum(tl.maximum(_biased(y), 0x400000 - 32), 0x400000 + 31) - (0x400000 - 32)
    return tl.where(none & (slope == 0.0), 0, code)
