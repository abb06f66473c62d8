"""Small kernels that wait as they should, or not, to see that it is found out."""

from __future__ import annotations

from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.kernels.launch import jit, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs


@jit
def right(x, y):
    i = tl.arange(0, 64)
    wait_for_inputs()
    tl.store(y + i, tl.load(x + i))


@jit
def reads_before(x, y):
    start_next()
    i = tl.arange(0, 64)
    value = tl.load(x + i)
    wait_for_inputs()
    tl.store(y + i, value)


@jit
def stores_before(x, y):
    i = tl.arange(0, 64)
    tl.store(y + i, i.to(y.dtype.element_ty))
    wait_for_inputs()


@jit
def waits_in_one_branch(x, y):
    i = tl.arange(0, 64)
    if tl.program_id(0) == 0:
        wait_for_inputs()
    tl.store(y + i, tl.load(x + i))


@jit
def waits_after_return(x, y):
    i = tl.arange(0, 64)
    if tl.program_id(0) == 0:
        return
    wait_for_inputs()
    tl.store(y + i, tl.load(x + i))


@jit
def reads_ahead(x, y):
    """The compiler reads x for the first turns before the loop."""
    i = tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for turn in tl.range(0, tl.num_programs(0), num_stages=3):
        if turn == 0:
            wait_for_inputs()
        tile = tl.load(x + turn * 4096 + i[:, None] * 64 + i[None, :])
        total = tl.dot(tile, tile, total)
    tl.store(y + i[:, None] * 64 + i[None, :], total.to(y.dtype.element_ty))


@jit
def waits_in_a_later_turn(x, y):
    i = tl.arange(0, 64)
    total = tl.zeros((64,), tl.float32)
    for turn in tl.range(0, tl.num_programs(0)):
        if turn == 3:
            wait_for_inputs()
            total += tl.load(x + turn * 64 + i)
    tl.store(y + i, total.to(y.dtype.element_ty))


@jit
def waits_in_the_first_turn(x, y):
    i = tl.arange(0, 64)
    total = tl.zeros((64,), tl.float32)
    for turn in tl.range(0, tl.num_programs(0)):
        if turn < 8:
            if turn == 0:
                wait_for_inputs()
            total += tl.load(x + turn * 64 + i)
    tl.store(y + i, total.to(y.dtype.element_ty))


@jit
def copies_before(tiles, y):
    """A tile comes in and goes out through the bulk copy engine."""
    y.store([0, 0], tiles.load([0, 0]))
    wait_for_inputs()


KERNELS = (
    right,
    reads_before,
    stores_before,
    waits_in_one_branch,
    waits_after_return,
    reads_ahead,
    waits_in_a_later_turn,
    waits_in_the_first_turn,
)


def cases(x):
    """Launch all of them."""
    for kernel in KERNELS:
        kernel[(2,)](x, x, num_warps=4, **early())
    tiles = TensorDescriptor.from_tensor(x, [64, 64])
    copies_before[(2,)](tiles, tiles, num_warps=4, **early())
