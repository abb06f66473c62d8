"""Gate and up of a prompt in one kernel, by warps with roles: some load, some multiply.

Chosen for: `GATED` of prompts on Hopper with BF16 weights.

    y = silu(x W_gate) * (x W_up)               each of the four steps rounded to x's dtype

A program is as large as a multiprocessor and walks along tiles of 128 rows of x, 128 of the gate
and as many of up, with the same numbers: then the two have met before anything is written. Each of
two groups of warps has half of the rows of x and all 256 sums of each. Results go out through the
chip, by a copy that goes on while the next tile is multiplied.

Shape letters: M rows of x, H hidden size, F inner size of the feed-forward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.ring import (
    PARTS,
    TILE,
    awaited,
    barrier,
    barriers,
    computed,
    emptied,
    multiprocessors,
    release,
    silu_times,
    tile_at,
    tiles,
)

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
    )

if TYPE_CHECKING:
    from torch import Tensor

STEP = 64  # columns of H at once
_TOGETHER = 16  # rows of tiles, whose numbers stay in the L2 cache
_OPTIONS = {"STAGES": 4, "MULTIPLY": 232, "LOAD": 40, **PARTS}


def roles_gated(x_MH: Tensor, gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [M, F] of [gate | up] = x gate_up^T.

    x_MH     [M, H] of 16 bits, rows contiguous in themselves, H in whole steps of 64
    gate_up  [2F, H] in x's dtype, gate rows first, F in whole tiles of 128
    """
    (m, hidden), inner = x_MH.shape, gate_up.shape[0] // 2
    assert x_MH.dtype == gate_up.dtype, "gate_up must be in x's dtype"
    assert gate_up.shape == (2 * inner, hidden), "gate_up must be [2F, H]"
    assert inner % TILE == hidden % STEP == 0, "only whole tiles and steps"
    y_MF = x_MH.new_empty((m, inner))
    rows, columns = -(-m // TILE), inner // TILE
    programs = min(multiprocessors(x_MH.get_device()), rows * columns)
    kernel[(programs,)](
        tiles(x_MH, TILE, STEP),
        tiles(gate_up, TILE, STEP),
        tiles(y_MF, TILE // 2),
        y_MF,
        hidden // STEP,
        inner,
        rows,
        columns,
        min(rows, _TOGETHER),
        **_OPTIONS,
        **early(),
    )
    return y_MF


@gluon_jit
def _load(
    x, w, x_ring, w_ring, full, empty, STEPS, F, rows, columns, together, STAGES: gl.constexpr
):
    step = 0
    for number in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = tile_at(number, rows, columns, together)
        for i in range(STEPS):
            stage = emptied(empty, step, STAGES)
            here, k = full.index(stage), i * 64
            mbarrier.expect(here, (128 + 2 * 128) * 64 * 2)
            gate, up = w_ring.index(stage).slice(0, 128), w_ring.index(stage).slice(128, 128)
            tma.async_copy_global_to_shared(x, [row * 128, k], here, x_ring.index(stage))
            tma.async_copy_global_to_shared(w, [column * 128, k], here, gate)
            tma.async_copy_global_to_shared(w, [F + column * 128, k], here, up)
            step += 1


@gluon_jit
def _started(x_ring, w_ring, stage, sums, ADD: gl.constexpr, HALF: gl.constexpr):
    x_MK = x_ring.index(stage).slice(64 * HALF, 64)
    w_KN = w_ring.index(stage).permute((1, 0))
    return warpgroup_mma(x_MK, w_KN, sums, use_acc=ADD == 1, is_async=True)


@gluon_jit
def _sums(
    x_ring,
    w_ring,
    full,
    empty,
    step,
    STEPS,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Return (the sums of 64 rows: 128 of the gate, then 128 of up; the step after)."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    none = gl.zeros((64, 256), gl.float32, layout=mma)
    stage = awaited(full, step, STAGES)
    sums = computed(_started(x_ring, w_ring, stage, none, 0, HALF), 1)
    for i in range(1, STEPS):
        after = awaited(full, step + i, STAGES)
        sums = computed(_started(x_ring, w_ring, after, sums, 1, HALF), 1)
        release(empty, stage)
        stage = after
    sums = computed(sums, 0)
    release(empty, stage)
    return sums, step + STEPS


@gluon_jit
def _multiply(
    out,
    like,
    x_ring,
    w_ring,
    o_chip,
    full,
    empty,
    STEPS,
    rows,
    columns,
    together,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
):
    step = 0
    for number in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = tile_at(number, rows, columns, together)
        sums, step = _sums(x_ring, w_ring, full, empty, step, STEPS, HALF, STAGES)
        gate, up = sums.reshape((64, 2, 128)).permute((0, 2, 1)).split()
        y = silu_times(gate, up, like).to(like.dtype.element_ty)
        stage = o_chip.index(HALF)
        tma.store_wait(0)
        barrier()
        stage.store(y)
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(out, [row * 128 + 64 * HALF, column * 128], stage)
    tma.store_wait(0)


# one kernel for all sizes: to compile it takes seconds
@partial(gluon_jit, do_not_specialize=["STEPS", "rows", "columns", "together"])
def kernel(
    x,
    w,
    out,
    like,
    STEPS,
    F,
    rows,
    columns,
    together,
    STAGES: gl.constexpr,
    MULTIPLY: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Write silu(gate) * up, tile by tile."""
    start_next()
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, 128, 64], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, 256, 64], w.layout)
    o_chip = gl.allocate_shared_memory(out.dtype, [2, 64, 128], out.layout)
    full, empty = barriers(STAGES, 1)
    wait_for_inputs()
    gl.warp_specialize(
        [
            (_multiply, (out, like, x_ring, w_ring, o_chip, full, empty, STEPS, rows,
                         columns, together, 0, STAGES)),
            (_multiply, (out, like, x_ring, w_ring, o_chip, full, empty, STEPS, rows,
                         columns, together, 1, STAGES)),
            (_load, (x, w, x_ring, w_ring, full, empty, STEPS, F, rows, columns, together, STAGES)),
        ],
        [4, 4],
        [MULTIPLY, LOAD],
    )  # fmt: skip
