"""How a group of four warps decodes NVFP4 and multiplies: part of packed_roles_tile.

Chosen for: never alone.

A chunk of a block of 64 rows is decoded in registers, as the tensor cores take their left operand,
and multiplied with x. Two groups take turns at the tensor cores: one decodes meanwhile.

Half q of a chunk is every other word. A thread has the words 8 t + 4 u + 2 v + q of a row, t being
its place among four lanes, u and v 0 or 1: those of four neighbouring groups, which lie together.
In what the tensor cores sum over, i, t, v and u are the bits from the lowest on, i the half of a
pair: so x is lined up (encode.lined).

Rows of a block come in two copies of 32, which need not be neighbours: a thread has the same row of
both.

Shape letters: M rows of x, K columns.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit
from runtime.kernels.ring import awaited, pass_turn, release, take_turn

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import (
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    from runtime.kernels.linear.packed_parts import NVFP4_CODE, NVFP4_REGISTERS


@gluon_jit
def _joined(low, high):
    """Return [64, K] of both copies of 32 rows [32, K]: eight of one, then eight of the other."""
    K: gl.constexpr = low.shape[1]
    return gl.join(low, high).reshape((4, 8, K, 2)).permute((0, 3, 1, 2)).reshape((64, K))


@gluon_jit
def _words(ring, at):
    """Return the words of each half of a chunk of a block, two of [64, 16]."""
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, 32],
    )
    both = _joined(ring.index(at).load(loaded), ring.index(at + 1).load(loaded))
    return gl.split(both.reshape((64, 16, 2)))


@gluon_jit
def _scales(ring, at):
    """Return the scale's byte of each word of a half of a chunk of a block [64, 16]."""
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, 16],
    )
    low, high = ring.index(at).load(loaded), ring.index(at + 1).load(loaded)
    return _joined(low.to(gl.int32), high.to(gl.int32))


@gluon_jit
def _operand(words, scales, mma: gl.constexpr):
    """Return the numbers of a half of a chunk [64, 128], as the tensor cores take them."""
    ordered: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
    words = gl.convert_layout(words, ordered, assert_trivial=True)
    given = [words, gl.convert_layout(scales, ordered, assert_trivial=True)]
    n = gl.inline_asm_elementwise(
        NVFP4_CODE, NVFP4_REGISTERS, given, dtype=(gl.bfloat16,) * 8, is_pure=True, pack=2
    )
    # rows of (t, u, i), p % 2, p // 2 and v become rows of (p, u, v, t, i)
    low = gl.join(gl.join(n[0], n[1]), gl.join(n[2], n[3]))
    high = gl.join(gl.join(n[4], n[5]), gl.join(n[6], n[7]))
    both = gl.join(low, high).reshape((64, 4, 2, 2, 2, 2, 2))
    both = both.permute((0, 5, 4, 2, 6, 1, 3)).reshape((64, 128))
    return gl.convert_layout(both, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon_jit
def _started(numbers, x_ring, half, total):
    """Return the products with a half of a chunk of x, not yet computed, added to a total."""
    return warpgroup_mma(numbers, x_ring.index(half).permute((1, 0)), total, is_async=True)


@gluon_jit
def add_chunk(
    totals,
    chip,
    step,
    FIRST: gl.constexpr,
    BLOCKS: gl.constexpr,
    ALL: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    GROUP: gl.constexpr,
    mma: gl.constexpr,
):
    """Return the totals of a group's blocks with the products of a chunk added."""
    x_ring, w_ring, s_ring, x_full, x_empty, w_full, w_empty = chip
    stage = awaited(w_full, step, STAGES)
    after = ()
    for b in gl.static_range(BLOCKS):
        at = 2 * (stage * ALL + FIRST + b)
        words0, words1 = _words(w_ring, at)
        scales = _scales(s_ring, at)
        if b == BLOCKS - 1:
            release(w_empty, stage)
        a0, a1 = _operand(words0, scales, mma), _operand(words1, scales, mma)
        # asked again for each block: the compiler would move the decoding behind the turn
        here = awaited(x_full, step, TURNS)
        take_turn(GROUP)
        product = _started(a0, x_ring, 2 * here, totals[b])
        product = _started(a1, x_ring, 2 * here + 1, product)
        pass_turn(GROUP)
        after += (warpgroup_mma_wait(0, deps=[product, a0, a1])[0],)  # type: ignore[assignment]
    for _ in gl.static_range(ALL - 2 * BLOCKS):  # the other group has one block more
        take_turn(GROUP)
        pass_turn(GROUP)
    release(x_empty, here)
    return after
