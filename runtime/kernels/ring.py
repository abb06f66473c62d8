"""What kernels share whose warps have roles: a ring of stages on chip, products that are started.

Chosen for: never alone; kernels of moe, linear and attention whose warps have roles share it.

Four warps load into the ring and run ahead. Two groups of four warps multiply: while one works on
its sums the other has the tensor cores. Such kernels are in Gluon, Triton's language of explicit
layouts. It has no interpreter: tests read what is compiled, and only a GPU says what it computes.

A stage of a ring has two barriers: `full` is passed when its copies have come, `empty` when both
groups that multiply have read it. Turn n of a ring passes phase n of a barrier; a wait is told the
last bit of the phase that it waits for.

Trap: memory on chip is given away again after its last use. A barrier that is made and that nobody
waits for lies where something else is written; tests look for one.

Shape letters: M rows and N columns of a product, K what it sums over.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import (
        mbarrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra import cuda

if TYPE_CHECKING:
    from torch import Tensor

# Triton 3.7 has renamed it; without Gluon there is none
barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)
TILE = 128
# Three parts of four warps: 168 registers each are all that a multiprocessor has. Those that load
# leave some of theirs (LOAD) to those that multiply (MULTIPLY).
PARTS = {"num_warps": 4, "maxnreg": 168}


@cache
def multiprocessors(gpu: int) -> int:
    """Return how many multiprocessors a GPU has: programs as large as one."""
    return torch.cuda.get_device_properties(gpu).multi_processor_count


def tiles(values: Tensor, rows: int = TILE, columns: int = TILE) -> Any:
    """Return a descriptor of a matrix for bulk copies of tiles of so many rows and columns."""
    size = values.element_size()
    swizzled = min(columns * size, 128) if columns * size > 16 else 0
    layout = gl.NVMMASharedLayout(swizzled, 8 * size)
    return TensorDescriptor.from_tensor(values, [rows, columns], layout)


@gluon_jit
def barriers(STAGES: gl.constexpr, FULL: gl.constexpr):
    """Return (full, empty) of a ring; a stage is full when so many have said so."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=2)
    return full, empty


@gluon_jit
def tile_at(number, rows, columns, together):
    """Return (row, column) of a tile: so many rows go together, that what is read stays near."""
    first = number // (together * columns) * together
    inside = number % (together * columns)
    height = gl.minimum(rows - first, together)
    return first + inside % height, inside // height


@gluon_jit
def awaited(full, step, STAGES: gl.constexpr):
    """Return the stage of a step, once it is full."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    return step % STAGES


@gluon_jit
def emptied(empty, step, STAGES: gl.constexpr):
    """Return the stage of a step, once it is empty: at first it is."""
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES + 1) & 1)
    return step % STAGES


@gluon_jit
def release(empty, stage):
    """Say that this group has read a stage."""
    barrier()  # one thread speaks for all
    mbarrier.arrive(empty.index(stage))


@gluon_jit
def skipped(full, empty, step, number, STAGES: gl.constexpr):
    """Return the step after so many that this group does not need."""
    for _ in range(number):
        release(empty, awaited(full, step, STAGES))
        step += 1
    return step


@gluon_jit
def started(x_MK, w_NK, none):
    """Return x w^T, not yet computed; `none` is a tile of its layout."""
    return warpgroup_mma(x_MK, w_NK.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon_jit
def computed(product, LATER: gl.constexpr):
    """Return a product once it is computed; LATER of them were started after it."""
    return warpgroup_mma_wait(LATER, deps=[product])


@gluon_jit
def rounded(x, like):
    """Return x rounded to the dtype of the pointer `like`, in float32."""
    return x.to(like.dtype.element_ty).to(gl.float32)


@gluon_jit
def _sigmoid(x):
    """Return it by the approximations of the hardware, of which a 16-bit number shows nothing."""
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [1.0 + power],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon_jit
def silu_times(gate, up, like):
    """Return silu(gate) * up in float32, each step rounded to the dtype of the pointer `like`."""
    gate = rounded(gate, like)
    return rounded(gate * _sigmoid(gate), like) * rounded(up, like)


@gluon_jit
def _barrier_of_both(ASM: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def take_turn(GROUP: gl.constexpr):
    """Wait until it is the turn of this group, 0 or 1, of the two that multiply."""
    if GROUP == 0:
        _barrier_of_both("bar.sync 8, 256; // dummy $0")
    else:
        _barrier_of_both("bar.sync 9, 256; // dummy $0")


@gluon_jit
def pass_turn(GROUP: gl.constexpr):
    """Say that it is the turn of the other group; the second one has to say so first."""
    if GROUP == 0:
        _barrier_of_both("bar.arrive 9, 256; // dummy $0")
    else:
        _barrier_of_both("bar.arrive 8, 256; // dummy $0")


@gluon_jit
def start_next():
    """Let the next kernel start, if it was launched early, once all programs have come here."""
    cuda.gdc_launch_dependents()


@gluon_jit
def wait_for_inputs():
    """Wait until all kernels before this one have finished."""
    cuda.gdc_wait()
