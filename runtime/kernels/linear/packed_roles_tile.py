"""Tiles of NVFP4 weights times up to 64 rows of x, by warps with roles: the device code.

Chosen for: never alone; packed_roles launches it.

A tile is some blocks of 64 rows of the weight, shared by two groups of warps (packed_roles_sums).
Four warps load: words and scales into one ring, x into another. Words are on their way before the
kernels before this one have ended. A block has 32 neighbouring rows and 32 that begin `second` rows
later: gate and up, or the next ones.

Shape letters: M rows of x, N rows of the weight, F half of them, C chunks of 256 columns.
"""

from __future__ import annotations

from functools import partial

from runtime.kernels.encode.lined import gluon_place
from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit
from runtime.kernels.linear.packed_roles_sums import add_chunk
from runtime.kernels.ring import (
    barriers,
    emptied,
    pass_turn,
    silu_times,
    start_next,
    wait_for_inputs,
)

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon_jit
def _ask_for_words(
    words, scales, chip, stage, row, second, STRIDE: gl.constexpr, BLOCKS: gl.constexpr
):
    """Ask for a chunk of each block: 32 rows from `row` on, 32 from `second` rows later on."""
    _, w_ring, s_ring, _, _, full, _ = chip
    here = full.index(stage)
    mbarrier.expect(here, BLOCKS * 64 * 144)
    for half in gl.static_range(2 * BLOCKS):
        at, to = row + half // 2 * STRIDE + half % 2 * second, stage * 2 * BLOCKS + half
        tma.async_copy_global_to_shared(words, [at, 0], here, w_ring.index(to))
        tma.async_copy_global_to_shared(scales, [at, 0], here, s_ring.index(to))


@gluon_jit
def _load(
    x,
    words,
    scales,
    chip,
    row,
    second,
    N,
    first,
    last,
    STRIDE: gl.constexpr,
    BLOCKS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    x_ring, _, _, x_full, x_empty, _, w_empty = chip
    for stage in range(gl.minimum(last - first, STAGES)):
        at = (first + stage) * N + row
        _ask_for_words(words, scales, chip, stage, at, second, STRIDE, BLOCKS)
    wait_for_inputs()
    for c in range(first, last):
        turn = emptied(x_empty, c - first, TURNS)
        here = x_full.index(turn)
        mbarrier.expect(here, BLOCK_M * 512)
        for q in gl.static_range(2):
            to = x_ring.index(2 * turn + q)
            tma.async_copy_global_to_shared(x, [0, c * 256 + q * 128], here, to)
        later = c + STAGES - 1  # the chunk before has been read by now, or soon
        if (c > first) & (later < last):
            stage, at = emptied(w_empty, later - first, STAGES), later * N + row
            _ask_for_words(words, scales, chip, stage, at, second, STRIDE, BLOCKS)


@gluon_jit
def _store_rows(out, total, n, N, M, mma: gl.constexpr):
    m = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, mma))
    at = out + m[None, :] * N + n[:, None]
    gl.store(at, total.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@gluon_jit
def _gate_and_up(both):
    """Return what is of rows of gate, and what of the same ones of up."""
    M: gl.constexpr = both.shape[1]
    return gl.split(both.reshape((4, 2, 8, M)).permute((0, 2, 3, 1)))


@gluon_jit
def _store_gated(out, total, n, F, out_row, M, LINED: gl.constexpr, mma: gl.constexpr):
    """Store silu(gate) * up, each step rounded, perhaps lined up for the next product.

    n  of each row which one of gate, or of up, it is
    """
    m = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, mma))
    inside = (m < M)[None, :] & (n < F)[:, None]
    column = gluon_place(n) if LINED else n
    at = gl.where(inside, m[None, :] * out_row + column[:, None], -1)
    at, _ = _gate_and_up(at)
    gate, up = _gate_and_up(total)
    y = silu_times(gate, up, out)
    gl.store(out + at, y.to(out.dtype.element_ty), mask=at >= 0)


@gluon_jit
def _multiply(
    row_factor,
    out,
    chip,
    row,
    second,
    M,
    N,
    F,
    out_row,
    first,
    last,
    STRIDE: gl.constexpr,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
    BLOCKS: gl.constexpr,
    ALL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    GATED: gl.constexpr,
    LINED: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    n = row + FIRST * STRIDE + i // 16 * 8 + i % 8  # of the first copy
    totals, factors = (), ()
    for b in gl.static_range(BLOCKS):
        at = row_factor + gl.minimum(n + b * STRIDE + i // 8 % 2 * second, N - 1)
        totals += (gl.zeros((64, BLOCK_M), gl.float32, layout=mma),)  # type: ignore[assignment]
        factors += (gl.load(at) * 256.0,)  # type: ignore[assignment]
    wait_for_inputs()
    if GROUP == 1:
        pass_turn(GROUP)
    for step in range(last - first):
        totals = add_chunk(totals, chip, step, FIRST, BLOCKS, ALL, STAGES, TURNS, GROUP, mma)
    for b in gl.static_range(BLOCKS):
        total = totals[b] * factors[b][:, None]  # type: ignore[var-annotated]
        if GATED:
            _store_gated(out, total, n + b * STRIDE, F, out_row, M, LINED, mma)
        else:
            _store_rows(out, total, n + b * STRIDE + i // 8 % 2 * second, N, M, mma)


@partial(gluon_jit, do_not_specialize=["M", "part"])
def kernel(
    x,
    words,
    scales,
    row_factor,
    out,
    M,
    N,
    F,
    C,
    out_row,
    part,
    GATED: gl.constexpr,
    LINED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    MORE: gl.constexpr,
    FEWER: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    MULTIPLY: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Write the products of a tile of the weight with a part of the chunks of x.

    second  see the head
    MORE    blocks of the first group of warps; FEWER those of the second
    """
    start_next()
    ALL: gl.constexpr = MORE + FEWER
    x_ring = gl.allocate_shared_memory(x.dtype, [2 * TURNS, BLOCK_M, 128], x.layout)
    w_ring = gl.allocate_shared_memory(words.dtype, [STAGES * 2 * ALL, 32, 32], words.layout)
    s_ring = gl.allocate_shared_memory(scales.dtype, [STAGES * 2 * ALL, 32, 16], scales.layout)
    x_full, x_empty = barriers(TURNS, 1)
    w_full, w_empty = barriers(STAGES, 1)
    chip = x_ring, w_ring, s_ring, x_full, x_empty, w_full, w_empty
    STRIDE: gl.constexpr = 32 if GATED else 64
    row, second = gl.program_id(0) * ALL * STRIDE, F
    if not GATED:
        second = 32
    first = gl.program_id(1) * part
    last = gl.minimum(first + part, C)
    out += gl.program_id(1) * M * N
    gl.warp_specialize(
        [
            (_multiply, (row_factor, out, chip, row, second, M, N, F, out_row, first, last,
                         STRIDE, 0, 0, MORE, ALL, BLOCK_M, STAGES, TURNS, GATED, LINED)),
            (_multiply, (row_factor, out, chip, row, second, M, N, F, out_row, first, last,
                         STRIDE, 1, MORE, FEWER, ALL, BLOCK_M, STAGES, TURNS, GATED, LINED)),
            (_load, (x, words, scales, chip, row, second, N, first, last,
                     STRIDE, ALL, BLOCK_M, STAGES, TURNS)),
        ],
        [4, 4],
        [MULTIPLY, LOAD],
    )  # fmt: skip
