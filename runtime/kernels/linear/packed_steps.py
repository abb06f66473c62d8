"""How a program of packed_stream goes through the chunks of its rows, step after step.

Chosen for: within packed_stream; never alone.

A step of a warp is some chunks of all rows of the program, of those that are WARPS apart. Two steps
are on their way in registers: `first_steps` asks for them, before the kernel waits for its inputs;
`all_steps` multiplies one and then asks for the next but one in its place.

Trap: beyond the last chunk that one is read again, and multiplied with zeros: WHOLE may be 1 only
where no step goes beyond it.

Shape letters: N rows of the weight, OUT outputs, K inputs, C chunks of 256 inputs.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, tl
from runtime.kernels.linear.packed_pairs import pairs_of
from runtime.kernels.linear.packed_units import blocks_of, joined, unit_sums, whole_sums


@jit
def _loaded_step(
    step,
    words,
    scale,
    n,
    N,
    OUT,
    C,
    warp,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the units of a step: of each chunk some blocks of rows, or as many of both halves.

    n  the first row of each thread; beyond the last chunk that one is read again
    """
    units = ()
    for i in tl.static_range(CHUNKS):
        at = tl.minimum((step * CHUNKS + i) * WARPS + warp, C - 1) * N + n
        for half in tl.static_range(HALVES):
            units += blocks_of(words, scale, at + half * OUT, place, FP4, GROUP, BLOCKS)
    return units


@jit
def _with_step(
    totals,
    units,
    step,
    x,
    K,
    warp,
    g,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the totals with the products of a step's units.

    WHOLE  1: all of every chunk of every step is there
    """
    TURNS: tl.constexpr = len(totals)
    used = tl.full(totals[0].shape, 1, tl.int32)
    for i in tl.static_range(CHUNKS):
        c = (step * CHUNKS + i) * WARPS + warp
        pairs, sums = pairs_of(x, c, g, place, place >= 0, None if WHOLE else K, FP4), ()
        for turn in tl.static_range(TURNS):
            unit = units[i * TURNS + turn]
            sums += (unit_sums(unit, pairs, used, totals[turn], FP4, GROUP),)  # type: ignore[assignment]
        totals = sums
    return totals


@jit
def first_steps(
    words,
    scale,
    n,
    N,
    OUT,
    C,
    warp,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the units of the first two steps, or of the only one twice."""
    a = _loaded_step(
        0, words, scale, n, N, OUT, C, warp, place, FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS
    )
    b = a
    if STEPS > 1:
        b = _loaded_step(
            1, words, scale, n, N, OUT, C, warp, place, FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS
        )
    return a, b


@jit
def all_steps(
    a,
    b,
    x,
    K,
    words,
    scale,
    n,
    N,
    OUT,
    C,
    warp,
    g,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the sums of the rows of a program: two steps are on their way while one is added."""
    PAIRS: tl.constexpr = (STEPS - 2) // 2 if STEPS > 1 else 0
    ODD: tl.constexpr = STEPS > 2 and STEPS % 2 == 1
    totals = ()
    for _ in tl.static_range(HALVES * BLOCKS):
        totals += (tl.zeros((32 * WARPS,), tl.float32),)  # type: ignore[assignment]
    for i in tl.range(0, PAIRS, num_stages=1):
        totals = _with_step(
            totals, a, 2 * i, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
        a = _loaded_step(
            2 * i + 2, words, scale, n, N, OUT, C, warp, place,
            FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS,
        )  # fmt: skip
        totals = _with_step(
            totals, b, 2 * i + 1, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
        b = _loaded_step(
            2 * i + 3, words, scale, n, N, OUT, C, warp, place,
            FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS,
        )  # fmt: skip
    totals = _with_step(
        totals, a, 2 * PAIRS, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
    )
    if ODD:
        a = _loaded_step(
            STEPS - 1, words, scale, n, N, OUT, C, warp, place,
            FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS,
        )  # fmt: skip
    if STEPS > 1:
        totals = _with_step(
            totals, b, 2 * PAIRS + 1, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
    if ODD:
        totals = _with_step(
            totals, a, STEPS - 1, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
    return whole_sums(joined(totals, HALVES * BLOCKS), 1, WARPS)
