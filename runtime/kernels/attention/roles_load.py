"""What the warps that load do in attention by roles, and how programs share the tasks.

Chosen for: never alone; roles_tile starts it.

Keys and values come through the bulk copy engine. Beyond the end of a sequence a slot holds what it
held before, which may be no number: of the last tile of values threads copy what is known, and
zeros for the rest.

Shape letters: N sequences, L tokens a slot holds.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit
from runtime.kernels.ring import barrier, emptied

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
    )


@gluon_jit
def task_of(turn, prompts, STEPS: gl.constexpr):
    """Return (first head, slot, first token, end, tokens before) of a program's next task.

    Blocks late in a prompt see the most keys and go first, those of all heads together. From turn
    to turn programs choose in reversed order, so that all get as much. See launch.ragged_block.
    """
    slots, cu_seqlens, starts, N, pairs, blocks = prompts
    programs = gl.num_programs(0)
    own = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    number = turn * programs + own
    block = blocks - 1 - number // pairs
    low = 0
    high = N - 1
    for _ in gl.static_range(STEPS):
        middle = (low + high + 1) // 2
        before = gl.load(cu_seqlens + middle).to(gl.int32) // 64 + middle <= block
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle - 1)
    start = gl.load(cu_seqlens + low).to(gl.int32)
    end = gl.load(cu_seqlens + low + 1).to(gl.int32)
    first = start + (block - (start // 64 + low)) * 64
    before = gl.load(starts + low).to(gl.int32) + first - start
    end = gl.where(block >= 0, end, first)
    return number % pairs * 2, gl.load(slots + low).to(gl.int32), first, end, before


@gluon_jit
def turns_of(prompts):
    """Return how many tasks a program may have."""
    return gl.cdiv(prompts[4] * prompts[5], gl.num_programs(0))


@gluon_jit
def keys_of(slot, first, end, before):
    """Return how many keys the queries of a block see."""
    return gl.where(slot >= 0, before + gl.minimum(end - first, 64), 0)


@gluon_jit
def _copy(tiles, at, ring, step):
    """Copy a tile to the stage of a step, once that is empty."""
    chip, full, empty = ring
    stage = emptied(empty, step, chip.shape[0])
    mbarrier.expect(full.index(stage), 64 * 256 * 2)
    tma.async_copy_global_to_shared(tiles, at, full.index(stage), chip.index(stage))


@gluon_jit
def _copy_rest(values, row, key, known, ring, step):
    """Copy the values of a tile that are known, and zeros in place of the others."""
    chip, full, empty = ring
    stage = emptied(empty, step, chip.shape[0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    for part in gl.static_range(8):
        place = key + part * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
        mask = (place < known)[:, None] & (d < 256)[None, :]
        at = values + (place.to(gl.int64) * row)[:, None] + d[None, :]
        async_copy.async_copy_global_to_shared(chip.index(stage).slice(part * 8, 8), at, mask=mask)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()  # the tensor cores read what threads have written
    barrier()  # one thread speaks for all
    mbarrier.arrive(full.index(stage))


@gluon_jit
def _copy_queries(q_tiles, q_chip, first, head, q_head, used):
    """Copy the queries of a task, once those before are no longer used."""
    chip, full, empty = q_chip
    emptied(empty, used, 1)
    mbarrier.expect(full.index(0), 128 * 256 * 2)
    for half in gl.static_range(2):
        at = [first, (head + half) * q_head]
        tma.async_copy_global_to_shared(q_tiles, at, full.index(0), chip.index(half))


@gluon_jit
def load(
    q_tiles,
    k_tiles,
    v_tiles,
    pool_v,
    prompts,
    q_chip,
    k_ring,
    v_ring,
    L,
    group,
    row,
    q_head,
    STEPS: gl.constexpr,
):
    """Copy queries, keys and values of all tasks of a program, as soon as there is room."""
    step, used = 0, 0
    for turn in range(turns_of(prompts)):
        head, slot, first, end, before = task_of(turn, prompts, STEPS)
        if first < end:
            known = keys_of(slot, first, end, before)
            column, first_key = head // group * 256, gl.maximum(slot, 0) * L
            # the first keys may come while the queries before are still in use
            if known > 0:
                _copy(k_tiles, [first_key, column], k_ring, step)
            _copy_queries(q_tiles, q_chip, first, head, q_head, used)
            used += 1
            for i in range(known // 64):
                at = [first_key + i * 64, column]
                if i > 0:
                    _copy(k_tiles, at, k_ring, step + i)
                _copy(v_tiles, at, v_ring, step + i)
            step += known // 64
            if known % 64 > 0:
                key = known // 64 * 64
                if key > 0:
                    _copy(k_tiles, [first_key + key, column], k_ring, step)
                values = pool_v + first_key.to(gl.int64) * row + column
                _copy_rest(values, row, key, known, v_ring, step)
                step += 1
