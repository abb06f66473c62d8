"""Tiles of codes of x times an FP8 weight, by warps with roles: the device code of `roles`.

Chosen for: never alone; roles launches it.

A tile is 128 rows of x, 128 rows of the weight and FURTHER ones; each of two groups of warps has
half of the rows of x. The further rows of all tiles begin where the first ones of all tiles end, so
that each part lies within one block of scales.

The sums of 128 columns leave the tensor cores to be scaled in float32: those of the first rows
while the further ones are multiplied, the rest while the other group has the tensor cores. Results
go out through the chip, by a copy that goes on while the next tile is multiplied.

Shape letters: M rows of x, N rows of the weight, K columns, G groups of 128 of them.
"""

from __future__ import annotations

from functools import partial

from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit
from runtime.kernels.ring import (
    awaited,
    barrier,
    barriers,
    computed,
    emptied,
    release,
    started,
    tile_at,
    wait_for_inputs,
)

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
    )


@gluon_jit
def _copy_weights(weights, rings, full, stage, row, further, g, FURTHER: gl.constexpr):
    """Expect all bulk copies of a stage, and begin those of the weight."""
    w, further_w = weights
    w_ring, f_ring = rings
    here = full.index(stage)
    mbarrier.expect(here, (256 + FURTHER) * 128)
    tma.async_copy_global_to_shared(w, [row, g * 128], here, w_ring.index(stage))
    tma.async_copy_global_to_shared(further_w, [further, g * 128], here, f_ring.index(stage))


@gluon_jit
def _load(
    x,
    x_scale,
    weights,
    x_ring,
    s_ring,
    rings,
    full,
    empty,
    x_group,
    M,
    G,
    rows,
    columns,
    together,
    FURTHER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy all that a program multiplies; the first weights are on their way before x is there."""
    line = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    step, ahead = 0, gl.minimum(G, STAGES)
    _, column = tile_at(gl.program_id(0), rows, columns, together)
    for g in range(ahead):
        further = columns * 128 + column * FURTHER
        _copy_weights(weights, rings, full, g, column * 128, further, g, FURTHER)
    wait_for_inputs()
    for number in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = tile_at(number, rows, columns, together)
        s_row = x_scale + gl.minimum(row * 128 + line, M - 1)
        further = columns * 128 + column * FURTHER
        for g in range(G):
            stage = emptied(empty, step, STAGES)
            if step >= ahead:
                _copy_weights(weights, rings, full, stage, column * 128, further, g, FURTHER)
            here, at = full.index(stage), [row * 128, g * 128]
            tma.async_copy_global_to_shared(x, at, here, x_ring.index(stage))
            async_copy.async_copy_global_to_shared(s_ring.index(stage), s_row + g * x_group)
            async_copy.mbarrier_arrive(here, increment_count=False)
            step += 1


@gluon_jit
def _sums(
    s_w,
    s_further,
    x_ring,
    s_ring,
    w_ring,
    f_ring,
    full,
    empty,
    step,
    G,
    FURTHER: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Return (sums with the first rows of the weight, with the further ones, the step after)."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    far: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FURTHER, 32])
    total = gl.zeros((64, 128), gl.float32, layout=mma)
    further = gl.zeros((64, FURTHER), gl.float32, layout=far)
    none = gl.zeros((64, 128), gl.float32, layout=mma)
    none_further = gl.zeros((64, FURTHER), gl.float32, layout=far)
    w_s, f_s = gl.load(s_w), gl.load(s_further)
    for g in range(G):
        # the scales of a weight are loaded a step ahead
        after = gl.minimum(g + 1, G - 1)
        next_w, next_f = gl.load(s_w + after), gl.load(s_further + after)
        stage = awaited(full, step, STAGES)
        x_MK = x_ring.index(stage).slice(64 * HALF, 64)
        product = started(x_MK, w_ring.index(stage), none)
        product_f = started(x_MK, f_ring.index(stage), none_further)
        s_M = s_ring.index(stage).slice(64 * HALF, 64).load(gl.SliceLayout(1, mma))
        total += computed(product, 1) * (s_M * w_s.to(gl.float32))[:, None]
        done = computed(product_f, 0)
        release(empty, stage)
        s_M = gl.convert_layout(s_M * f_s.to(gl.float32), gl.SliceLayout(1, far))
        further += done * s_M[:, None]
        w_s, f_s = next_w, next_f
        step += 1
    return total, further, step


@gluon_jit
def _store(y, out, stage, row, column):
    """Store rows through the chip, once what went there before has left."""
    tma.store_wait(0)
    barrier()
    stage.store(y.to(stage.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(out, [row, column], stage)


@gluon_jit
def _multiply(
    scale,
    out,
    further_out,
    x_ring,
    s_ring,
    w_ring,
    f_ring,
    o_chip,
    f_chip,
    full,
    empty,
    scale_row,
    N,
    G,
    rows,
    columns,
    together,
    FURTHER: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
):
    step = 0
    wait_for_inputs()
    for number in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = tile_at(number, rows, columns, together)
        first = row * 128 + 64 * HALF
        further = columns * 128 + column * FURTHER
        # beyond the weight are zeros, with any scale
        block = gl.minimum(further, N - 128) // 128
        y, more, step = _sums(
            scale + column * scale_row, scale + block * scale_row, x_ring, s_ring, w_ring, f_ring,
            full, empty, step, G, FURTHER, HALF, STAGES,
        )  # fmt: skip
        _store(y, out, o_chip.index(HALF), first, column * 128)
        _store(more, further_out, f_chip.index(HALF), first, further)
    tma.store_wait(0)


# one kernel for all sizes: to compile it takes seconds
@partial(gluon_jit, do_not_specialize=["scale_row", "G", "rows", "columns", "together"])
def kernel(
    x,
    x_scale,
    w,
    further_w,
    scale,
    out,
    further_out,
    x_group,
    scale_row,
    M,
    N,
    G,
    rows,
    columns,
    together,
    FURTHER: gl.constexpr,
    STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr,
    MULTIPLY: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Write x w^T, tile by tile."""
    x_ring = gl.allocate_shared_memory(w.dtype, [STAGES, 128, 128], w.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, 128, 128], w.layout)
    f_ring = gl.allocate_shared_memory(w.dtype, [STAGES, FURTHER, 128], further_w.layout)
    o_chip = gl.allocate_shared_memory(out.dtype, [2, 64, 128], out.layout)
    f_chip = gl.allocate_shared_memory(out.dtype, [2, 64, FURTHER], further_out.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], line)
    full, empty = barriers(STAGES, ARRIVALS)
    gl.warp_specialize(
        [
            (_multiply, (scale, out, further_out, x_ring, s_ring, w_ring, f_ring, o_chip, f_chip,
                         full, empty, scale_row, N, G, rows, columns, together,
                         FURTHER, 0, STAGES)),
            (_multiply, (scale, out, further_out, x_ring, s_ring, w_ring, f_ring, o_chip, f_chip,
                         full, empty, scale_row, N, G, rows, columns, together,
                         FURTHER, 1, STAGES)),
            (_load, (x, x_scale, (w, further_w), x_ring, s_ring, (w_ring, f_ring), full, empty,
                     x_group, M, G, rows, columns, together, FURTHER, STAGES)),
        ],
        [4, 4],
        [MULTIPLY, LOAD],
    )  # fmt: skip
