"""How four-bit weights are decoded in registers and multiplied; see packed.

Chosen for: within every kernel of packed weights; never alone.

    NVFP4   the bits of a code are moved to where bfloat16 has its sign, exponent and mantissa: that
            is code * 2^-126; times a scale * 2^118 it is exact, and 2^8 is left for the row
    INT4    the four bits are the lowest of 128 + code, from which 136 is taken

Weights are the left operand of the tensor cores. A thread decodes two words at once, so it needs
two neighbouring words of a row: the layouts of operands and of wide loads give at least that.

Trap: in the interpreter there are no instructions of a GPU; the same values are computed from bits.

Shape letters: N outputs, M rows of x, C chunks of 256 columns.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_TRITON, INTERPRET, jit, operand, tl
from runtime.kernels.linear.packed import E2M1_BITS, INT4_BITS

E2M1_WORD = """
and.b32 p{0}, {word}, 0x81C081C0;
shl.b32 t, {word}, 4;
and.b32 p{1}, t, 0x81C081C0;
shf.l.wrap.b32 t, {word}, {word}, 10;
and.b32 p{2}, t, 0x81C081C0;
shr.u32 t, {word}, 2;
and.b32 t, t, 0x01000100;
shl.b32 s, {word}, 6;
lop3.b32 p{3}, s, 0x80C080C0, t, 0xEA;
"""
SCALE_OF_BYTE = "mad.lo.u32 s, {0}, 0x00100010, 0x75807580;\n"
INT4_PAIR = """
shr.u32 t, {word}, {shift};
lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 {out}, t, s;
"""


def _nvfp4_code(*scales: str) -> str:
    """Return PTX that makes eight pairs of two words, $8 and $9, times a scale, or times two."""
    words = "".join(E2M1_WORD.format(*range(4 * i, 4 * i + 4), word=f"${8 + i}") for i in range(2))
    code, each = "", 8 // len(scales)
    for i, scale in enumerate(scales):
        pairs = range(each * i, each * (i + 1))
        code += SCALE_OF_BYTE.format(scale)
        code += "".join(f"mul.bf16x2 ${pair}, p{pair}, s;\n" for pair in pairs)
    return "{\n.reg .b32 s, t, p<8>;\n" + words + code + "}"


def _int4_code() -> str:
    """Return PTX that makes eight pairs of two words, $8 and $9."""
    pairs = "".join(
        INT4_PAIR.format(word=f"${8 + i // 4}", shift=i % 4 * 4, out=f"${i}") for i in range(8)
    )
    return "{\n.reg .b32 s, t;\nmov.b32 s, 0x43084308;\n" + pairs + "}"


if HAS_TRITON:
    # of two words of one group, and of any two
    _NVFP4 = tl.constexpr(_nvfp4_code("$10"))
    NVFP4_CODE = tl.constexpr(_nvfp4_code("$10", "$11"))
    NVFP4_REGISTERS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 4))
    _INT4 = tl.constexpr(_int4_code())
    _INT4_REGISTERS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 2))
    _PLACES = {True: E2M1_BITS, False: INT4_BITS}


def _bits(half, places):
    """Return the numbers whose bits are at these places, the first one highest (interpreter)."""
    number = 0
    for i, place in enumerate(places):
        number += ((half >> place) & 1) << len(places) - 1 - i
    return number


def value_of(word, h, fp4, pair):
    """Return a pair's first or second codes as numbers (interpreter)."""
    half = word if h == 0 else word << 16 | (word >> 16 & 65535)
    sign, *rest = _PLACES[fp4][pair]
    if not fp4:
        return (_bits(half, (sign, *rest)) - 8).to(tl.float32)
    exponent, mantissa = _bits(half, rest[:2]), _bits(half, rest[2:]).to(tl.float32)
    size = tl.where(exponent == 0, mantissa, (2 + mantissa) * tl.exp2(exponent.to(tl.float32) - 1))
    return tl.where(_bits(half, (sign,)) == 1, -size, size) / 2


def _interpreted(words, scale, fp4):
    """Say what `_decoded` computes (interpreter)."""
    shape, planes = words.shape, []
    pairs = tl.reshape(words, (*shape[:-1], shape[-1] // 2, 2))
    for plane in range(8):
        word = tl.split(pairs)[plane // 4]
        both = tl.join(*(value_of(word, h, fp4, plane % 4) for h in range(2)))
        value = tl.reshape(both, shape)
        if fp4:
            power = tl.exp2((scale // 8 - 18).to(tl.float32))
            value *= (1 + (scale % 8).to(tl.float32) / 8) * power
        planes.append(value)
    return tuple(planes)


@jit
def _decoded(words, scale, FP4: tl.constexpr):
    """Return the eight planes of words, each in the words' shape, to be multiplied.

    words  int32 [..., 32]
    scale  FP4: a scale's byte for each word, int32; its products are 2^-8 of what they should be
    """
    if FP4:
        planes = tl.inline_asm_elementwise(
            _NVFP4, NVFP4_REGISTERS, [words, scale], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    else:
        planes = tl.inline_asm_elementwise(
            _INT4, _INT4_REGISTERS, [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    return planes


planes_of = _interpreted if HAS_TRITON and INTERPRET.value else _decoded


@jit
def row_factor(row, n, inside, FP4: tl.constexpr):
    """Return what sums of the rows n still have to be multiplied with."""
    factor = tl.load(row + n, mask=inside, other=0.0)
    if FP4:
        factor *= 256.0
    return factor


@jit
def row_planes(x, column, used, K, STEP: tl.constexpr):
    """Return the eight planes of one row x of K columns: `column` is that of the first."""
    return (
        tl.load(x + column + 0 * STEP, mask=used & (column + 0 * STEP < K), other=0.0),
        tl.load(x + column + 1 * STEP, mask=used & (column + 1 * STEP < K), other=0.0),
        tl.load(x + column + 2 * STEP, mask=used & (column + 2 * STEP < K), other=0.0),
        tl.load(x + column + 3 * STEP, mask=used & (column + 3 * STEP < K), other=0.0),
        tl.load(x + column + 4 * STEP, mask=used & (column + 4 * STEP < K), other=0.0),
        tl.load(x + column + 5 * STEP, mask=used & (column + 5 * STEP < K), other=0.0),
        tl.load(x + column + 6 * STEP, mask=used & (column + 6 * STEP < K), other=0.0),
        tl.load(x + column + 7 * STEP, mask=used & (column + 7 * STEP < K), other=0.0),
    )


@jit
def tile_sums(
    x,
    x_row,
    used,
    words,
    scale,
    n,
    N,
    C,
    first,
    last,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the products [BLOCK_N, BLOCK_M] of rows of x with the rows n of the weight.

    x            spread rows of C * 256 columns
    x_row, used  which row each of BLOCK_M is, and whether it is one
    n, N         rows of the weight, and how many it has
    first, last  chunks to be multiplied
    """
    GROUPS: tl.constexpr = 256 // GROUP
    e, g = tl.arange(0, 32), tl.arange(0, 16)[None, :]
    column = x_row[None, :] * C * 256 + e[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, num_stages=STAGES):
        chunk = start * N + n[:, None]
        w = tl.load(words + chunk * 32 + e[None, :])
        s = w
        if FP4:
            s = tl.load(scale + chunk * 16 + g).to(tl.int32)
            s = tl.reshape(tl.broadcast_to(s[:, :, None], (BLOCK_N, 16, 2)), (BLOCK_N, 32))
        planes = planes_of(w, s, FP4)
        part = total
        for p in tl.static_range(8):
            b = tl.load(x + start * 256 + p * 32 + column, mask=used[None, :], other=0.0)
            if not FP4 and p * 32 % GROUP == 0:
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            part = tl.dot(operand(planes[p]), operand(b), part)
            if not FP4 and (p + 1) * 32 % GROUP == 0:
                s_N = tl.load(scale + chunk * GROUPS + p * 32 // GROUP)
                total += part * s_N.to(tl.float32)
        if FP4:
            total = part
    return total
