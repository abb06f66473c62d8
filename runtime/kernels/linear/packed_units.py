"""One row times four-bit weights by units, a chunk of 256 columns of eight rows: see packed.

Chosen for: within the kernels of packed_stream, packed_strips and moe.packed_row; never alone.

A warp multiplies a unit by eight instructions of the tensor cores, whose left operand has 16 rows
and 16 columns. Four threads have a row: each has eight of its words, in two loads. Words of the
first load are the operand's upper eight rows, those of the second its lower eight. The right
operand has a column for each place and load, which is zero where x is for the words of others. So
each thread gets the sums of its own words alone, and sixteen codes of NVFP4 are scaled by one
multiplication when they have been summed. No number changes threads before that.

    thread of a warp    4 * row + place: words 4 * place + (0..3), and 16 more
    its pairs of x      16 where row // 2 is its place, of the first load if its row is even, else
                        of the second; other threads have zeros

Everything is a tensor with one number for each thread. A row's sum is that of its four threads.
The instructions are those of packed_code.

Trap: number n must be in thread n. That is how the compiler lays out such tensors, unless they come
from others: tests/runtime/kernels/linear/test_units.py reads it in compiled code.

Shape letters: N outputs, K inputs, C chunks of 256 inputs.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_TRITON, INTERPRET, jit, tl
from runtime.kernels.linear.packed_parts import value_of

if HAS_TRITON:
    from runtime.kernels.linear.packed_code import (
        BLOCK_1,
        BLOCK_1_REGISTERS,
        BLOCK_2,
        BLOCK_2_REGISTERS,
        FAR_QUAD,
        INT4_UNIT_32,
        INT4_UNIT_32_REGISTERS,
        INT4_UNIT_64,
        INT4_UNIT_64_REGISTERS,
        INT4_UNIT_128,
        INT4_UNIT_128_REGISTERS,
        NEAR_QUAD,
        NVFP4_UNIT,
        NVFP4_UNIT_REGISTERS,
        QUAD_REGISTERS,
    )


@jit
def thread_numbers(THREADS: tl.constexpr):
    """Return (warp, row, place) of each thread."""
    e = tl.arange(0, THREADS)
    return e // 32, e // 4 % 8, e % 4


@jit
def _quad(pointer, used, NEAR: tl.constexpr):
    """Return the four words that a thread loads at once, or zeros.

    NEAR  1: others of the multiprocessor want them too
    """
    return tl.inline_asm_elementwise(
        NEAR_QUAD if NEAR else FAR_QUAD,
        QUAD_REGISTERS,
        [pointer.to(tl.int64), used.to(tl.int32)],
        dtype=(tl.int32,) * 4,
        is_pure=False,
        pack=1,
    )


def _interpreted_quad(pointer, used, near):
    """Say what `_quad` does (interpreter)."""
    return tuple(tl.load(pointer + i, mask=used, other=0) for i in range(4))


quad = _interpreted_quad if HAS_TRITON and INTERPRET.value else _quad


@jit
def unit_of(words, scale, at, place, used, FP4: tl.constexpr, GROUP: tl.constexpr):
    """Return what each thread has of a unit: (words of both loads, scales).

    at  number of the row among those of all chunks, one for each thread
    """
    upper = quad(words + at * 32 + place * 4, used, 0)
    lower = quad(words + at * 32 + place * 4 + 16, used, 0)
    return upper, lower, scales_of(scale, at, place, used, FP4, GROUP)


@jit
def scales_of(scale, at, place, used, FP4: tl.constexpr, GROUP: tl.constexpr):
    """Return the scales of a unit as they are stored, NVFP4's two bytes each."""
    scales = ()
    if FP4:
        of_place = scale.to(tl.pointer_type(tl.uint16), bitcast=True) + at * 8 + place
        scales += (tl.load(of_place, mask=used, other=0),)  # type: ignore[assignment]
        scales += (tl.load(of_place + 4, mask=used, other=0),)  # type: ignore[assignment]
    else:
        for group in tl.static_range(256 // GROUP):
            s = tl.load(scale + at * (256 // GROUP) + group, mask=used, other=0.0)
            scales += (s,)  # type: ignore[assignment]
    return scales


@jit
def _loaded_blocks(words, scale, BLOCKS: tl.constexpr, CODE: tl.constexpr, REGISTERS: tl.constexpr):
    return tl.inline_asm_elementwise(
        CODE,
        REGISTERS,
        [words.to(tl.int64), scale.to(tl.int64)],
        dtype=(tl.int32,) * (10 * BLOCKS),
        is_pure=False,
        pack=1,
    )


@jit
def _blocks_of(words, scale, at, place, BLOCKS: tl.constexpr):
    """Return units of NVFP4 of eight neighbouring rows, or sixteen, all of which there are."""
    words += at * 32 + place * 4
    scale = scale.to(tl.pointer_type(tl.uint16), bitcast=True) + at * 8 + place
    if BLOCKS == 1:
        found = _loaded_blocks(words, scale, 1, BLOCK_1, BLOCK_1_REGISTERS)
    else:
        found = _loaded_blocks(words, scale, 2, BLOCK_2, BLOCK_2_REGISTERS)
    units = ()
    for b in tl.static_range(BLOCKS):
        upper, lower, scales = (), (), ()
        for i in tl.static_range(4):
            upper += (found[8 * b + i],)  # type: ignore[assignment]
            lower += (found[8 * b + 4 + i],)  # type: ignore[assignment]
        for i in tl.static_range(2):
            scales += (found[8 * BLOCKS + 2 * b + i],)  # type: ignore[assignment]
        units += ((upper, lower, scales),)  # type: ignore[assignment]
    return units


@jit
def blocks_of(
    words, scale, at, place, FP4: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):
    """Return the units of eight neighbouring rows, or sixteen, all of which there are.

    at  number of each thread's first row among those of all chunks
    """
    units, used = (), place >= 0
    if FP4 and not INTERPRET:
        units = _blocks_of(words, scale, at, place, BLOCKS)
    else:
        for b in tl.static_range(BLOCKS):
            units += (unit_of(words, scale, at + 8 * b, place, used, FP4, GROUP),)  # type: ignore[assignment]
    return units


@jit
def _multiplied(unit, x, used, total, CODE: tl.constexpr, REGISTERS: tl.constexpr):
    return tl.inline_asm_elementwise(
        CODE,
        REGISTERS,
        list((total, used.to(tl.int32)) + unit[0] + unit[1] + x + unit[2]),
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def _unit_sums(unit, x, used, total, FP4: tl.constexpr, GROUP: tl.constexpr):
    """Return a total plus what each thread's words of its row come to, NVFP4's 2^-8 of it.

    unit  as `unit_of` gives it
    x     sixteen pairs of columns for each thread, zeros in those that have no own
    """
    scales = ()
    for i in tl.static_range(len(unit[2])):
        scales += (unit[2][i].to(tl.int32 if FP4 else tl.float32),)  # type: ignore[assignment]
    unit = unit[0], unit[1], scales
    if FP4:
        total = _multiplied(unit, x, used, total, NVFP4_UNIT, NVFP4_UNIT_REGISTERS)
    elif GROUP == 32:
        total = _multiplied(unit, x, used, total, INT4_UNIT_32, INT4_UNIT_32_REGISTERS)
    elif GROUP == 64:
        total = _multiplied(unit, x, used, total, INT4_UNIT_64, INT4_UNIT_64_REGISTERS)
    else:
        total = _multiplied(unit, x, used, total, INT4_UNIT_128, INT4_UNIT_128_REGISTERS)
    return total


@jit
def own_of(row, place):
    """Return which threads have pairs of x: those whose row says whose words they are for."""
    return row // 2 == place


def _by_row(x):
    """Return the pairs of both loads for every row, of the threads that have them."""
    warps = x.shape[0] // 32
    both = tl.split(tl.permute(tl.reshape(x, (warps, 4, 2, 4, 2)), (0, 1, 3, 4, 2)))
    owned = [tl.sum(one, 1) for one in both]  # the others have zeros
    wide = [tl.broadcast_to(one[:, None, None, :, :], (warps, 4, 2, 4, 2)) for one in owned]
    return [tl.reshape(one, (x.shape[0], 2)) for one in wide]


def _interpreted_sums(unit, x, used, total, fp4, group):
    """Say what `_unit_sums` computes (interpreter)."""
    upper, lower, scales = unit
    for r in range(16):
        word, pair = (r // 4, r % 4) if fp4 else (r // 8 + r % 2 * 2, r // 2 % 4)
        for load, (words, x_r) in enumerate(zip((upper, lower), _by_row(x[r]), strict=True)):
            codes = tl.join(*(value_of(words[word], h, fp4, pair) for h in range(2)))
            product = tl.sum(codes * x_r, 1)
            if fp4:
                byte = (scales[load].to(tl.int32) >> 8 * (word // 2)) & 255
                power = tl.exp2((byte // 8 - 18).to(tl.float32))
                total += product * (1 + (byte % 8).to(tl.float32) / 8) * power
            else:
                total += product * scales[r // 2 * 32 // group].to(tl.float32)
    return total


unit_sums = _interpreted_sums if HAS_TRITON and INTERPRET.value else _unit_sums


@jit
def units_of(
    words,
    scale,
    n,
    N,
    inside,
    C,
    warp,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    ACROSS: tl.constexpr,
    REPEATS: tl.constexpr,
):
    """Return the units of row n: of each chunk of its warp, one after another.

    n, inside  for each thread: its row, and whether there is such a row
    """
    units = ()
    for again in tl.static_range(REPEATS):
        c = chunk_of(warp, again, ACROSS)
        units += (unit_of(words, scale, c * N + n, place, inside & (c < C), FP4, GROUP),)  # type: ignore[assignment]
    return units


@jit
def chunk_of(warp, again, ACROSS: tl.constexpr):
    """Return the chunk of each thread: ACROSS warps have one of the same rows each, and again."""
    return again * ACROSS + warp % ACROSS


@jit
def sums_of(units, x, FIRST: tl.constexpr, FP4: tl.constexpr, GROUP: tl.constexpr):
    """Return the sums of as many units as x has parts, from the unit FIRST on."""
    used = tl.full(units[0][0][0].shape, 1, tl.int32)
    total = tl.zeros(used.shape, tl.float32)
    for again in tl.static_range(len(x)):
        total = unit_sums(units[FIRST + again], x[again], used, total, FP4, GROUP)
    return total


@jit
def joined(sums, TURNS: tl.constexpr):
    """Return the sums of one, two or four turns as one tensor, turns last."""
    if TURNS == 1:
        of_turns = sums[0]
    elif TURNS == 2:
        of_turns = tl.join(sums[0], sums[1])
    else:
        of_turns = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    return tl.reshape(of_turns, (sums[0].shape[0], TURNS))


@jit
def whole_sums(sums, BESIDE: tl.constexpr, ACROSS: tl.constexpr):
    """Return the sums [BESIDE, 8, TURNS] of rows, of what threads and warps have of them.

    sums  [32 * warps, TURNS]: ACROSS warps have the same rows
    """
    of_threads = tl.reshape(sums, (BESIDE, ACROSS, 8, 4, sums.shape[1]))
    return tl.sum(tl.sum(of_threads, 3), 1)
