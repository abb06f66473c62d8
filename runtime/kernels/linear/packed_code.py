"""Instructions that load units of four-bit weights and multiply them, in PTX: see packed_units.

Chosen for: within packed_units, which says what words, scales and pairs of x a thread has.

    quad    loads four words, or gives zeros
    block   loads units of NVFP4 of neighbouring rows: all addresses are constants away from the
            first one's
    unit    decodes the words of both loads, multiplies them by eight instructions of the tensor
            cores, and adds their sums, scaled, to a total

Of the four sums that a thread gets, d0 is that of its words of the first load, d3 that of the
second; d1 and d2 are words of one load times x of the other, of no use. NVFP4 multiplies two words
of each load, a group each, then scales d0 and d3 by a scale of their own. An instruction of INT4
has a plane of 32 columns, half of it in each load: after the planes of a group d0 and d3 are added,
and scaled together.

Traps: the tensor cores want all threads of a warp: either all of them have a unit or none. Codes
of NVFP4 that are 0.5 are subnormal in bfloat16, which the tensor cores multiply like others.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_TRITON, tl
from runtime.kernels.linear.packed_parts import E2M1_WORD, INT4_PAIR

_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{{d0, d1, d2, d3}}, {{p{0}, p{1}, p{2}, p{3}}}, {{{4}, {5}}}, {{d0, d1, d2, d3}};\n"
)
_BEGIN = (
    "{\n.reg .b32 s, t, p<8>;\n.reg .f32 d<4>, part;\n.reg .pred idle;\n"
    "mov.f32 $0, $1;\nsetp.eq.s32 idle, $2, 0;\n@idle bra DONE;\n"
)
# a scale's byte as a number, 2^54 of it; times a sum of codes, of 2^-126, and of x, of 2^64
_SCALED = (
    "bfe.u32 s, ${0}, {1}, 8;\nmad.lo.u32 s, s, 0x00100000, 0x55800000;\nmov.b32 part, s;\n"
    "fma.rn.f32 $0, d{2}, part, $0;\n"
)
_END = "DONE:\n}"
_ZEROS = "".join(f"mov.f32 d{i}, 0f00000000;\n" for i in range(4))
_LOADS = ("$3", "$7"), ("$4", "$8"), ("$5", "$9"), ("$6", "$10")  # words of both loads
_X, _SCALES = 11, 27  # the first operands


def _nvfp4_code() -> str:
    """Return PTX that multiplies the words of both loads; two operands have their scales."""
    lines = [_BEGIN]
    for i, words in enumerate(_LOADS):
        if i % 2 == 0:
            lines.append(_ZEROS)
        for load, word in enumerate(words):
            lines.append(E2M1_WORD.format(*range(4 * load, 4 * load + 4), word=word))
        for p in (0, 2):
            x = f"${_X + 4 * i + p}", f"${_X + 4 * i + p + 1}"
            lines.append(_MULTIPLY.format(p, 4 + p, p + 1, 5 + p, *x))
        if i % 2 == 1:
            lines += [_SCALED.format(_SCALES + load, 8 * (i // 2), 3 * load) for load in range(2)]
    return "".join([*lines, _END])


def _int4_code(group: int) -> str:
    """Return PTX that multiplies the words of both loads, a plane of 32 columns at a time.

    group  columns that share a scale: so many planes are summed before that is scaled
    """
    lines = [_BEGIN]
    for plane in range(8):
        first, pair = plane // 4, plane % 4
        if plane * 32 % group == 0:
            lines.append(_ZEROS)
        lines.append("mov.b32 s, 0x43084308;\n")
        for half in range(2):
            for load, word in enumerate(_LOADS[first + 2 * half]):
                lines.append(INT4_PAIR.format(word=word, shift=4 * pair, out=f"p{2 * half + load}"))
        x = f"${_X + 2 * plane}", f"${_X + 2 * plane + 1}"
        lines.append(_MULTIPLY.format(0, 1, 2, 3, *x))
        if (plane + 1) * 32 % group == 0:
            scale = f"${_SCALES + plane * 32 // group}"
            lines.append(f"add.f32 part, d0, d3;\nfma.rn.f32 $0, part, {scale}, $0;\n")
    return "".join([*lines, _END])


def _quad_code(cache: str) -> str:
    """Return PTX that loads four words, or gives zeros."""
    zeros = "".join(f"mov.b32 ${i}, 0;\n" for i in range(4))
    load = f"@p ld.global{cache}.v4.b32 {{$0, $1, $2, $3}}, [$4];\n"
    return "{\n.reg .pred p;\nsetp.ne.s32 p, $5, 0;\n" + zeros + load + "}"


def _block_code(blocks: int) -> str:
    """Return PTX that loads units of NVFP4 of neighbouring rows, eight of them each."""
    lines, words, scales = ["{\n"], f"${10 * blocks}", f"${10 * blocks + 1}"
    for b in range(blocks):
        for load in range(2):
            to = ", ".join(f"${8 * b + 4 * load + i}" for i in range(4))
            at = f"[{words}+{1024 * b + 64 * load}]"
            lines.append(f"ld.global.L1::no_allocate.v4.b32 {{{to}}}, {at};\n")
    for b in range(blocks):
        for load in range(2):
            to, at = f"${8 * blocks + 2 * b + load}", f"[{scales}+{128 * b + 8 * load}]"
            lines.append(f"ld.global.u16 {to}, {at};\n")
    return "".join([*lines, "}"])


if HAS_TRITON:
    BLOCK_1, BLOCK_2 = (tl.constexpr(_block_code(blocks)) for blocks in (1, 2))
    BLOCK_1_REGISTERS, BLOCK_2_REGISTERS = (
        tl.constexpr(",".join(["=&r"] * (10 * blocks) + ["l"] * 2)) for blocks in (1, 2)
    )
    NEAR_QUAD = tl.constexpr(_quad_code(""))
    FAR_QUAD = tl.constexpr(_quad_code(".L1::no_allocate"))
    QUAD_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,l,r")
    NVFP4_UNIT = tl.constexpr(_nvfp4_code())
    NVFP4_UNIT_REGISTERS = tl.constexpr(",".join(["=&f", "f"] + ["r"] * 27))
    INT4_UNIT_32, INT4_UNIT_64, INT4_UNIT_128 = (
        tl.constexpr(_int4_code(group)) for group in (32, 64, 128)
    )
    INT4_UNIT_32_REGISTERS, INT4_UNIT_64_REGISTERS, INT4_UNIT_128_REGISTERS = (
        tl.constexpr(",".join(["=&f", "f"] + ["r"] * 25 + ["f"] * (256 // group)))
        for group in (32, 64, 128)
    )
