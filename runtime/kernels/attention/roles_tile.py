"""64 queries of two heads and all keys that they see, by warps with roles: device code of `roles`.

Chosen for: never alone; roles launches it.

A program is as large as a multiprocessor and walks along tasks: a block of queries of two heads,
which read one key head. A group of warps has one of them, and walks along tiles of 64 keys. The
scores of a tile are started before the weighted values of the tile before it, so that the softmax
of the one runs beside the sums of the other. What the other warps load: see roles_load.

Shape letters: N sequences, L tokens a slot holds, Q queries of a group, K keys of a tile, d 256
columns of a head.
"""

from __future__ import annotations

from functools import partial

from runtime.kernels.attention.roles_load import keys_of, load, task_of, turns_of
from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit
from runtime.kernels.ring import awaited, barrier, barriers, computed, release, rounded, started

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )


@gluon_jit
def _softened(s_QK, i, whole, top, total, last, scale):
    """Return (weights, top, total, by how much older sums shrink) of tile i, as online.soften.

    whole  how many tiles all queries see
    """
    if i >= whole:
        place = i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_QK.type.layout))
        s_QK = gl.where(place[None, :] <= last[:, None], s_QK, -float("inf"))
    new_top = gl.maximum(top, gl.max(s_QK, 1) * scale)
    shrink = gl.exp2(top - new_top)
    p_QK = gl.exp2(s_QK * scale - new_top[:, None])
    return p_QK, new_top, total * shrink + gl.sum(p_QK, 1), shrink


@gluon_jit
def _weights(p_QK, v_chip, o_Qd):
    """Return weights as the tensor cores take them from registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=o_Qd.type.layout, k_width=2)
    return gl.convert_layout(p_QK.to(v_chip.dtype), layout)


@gluon_jit
def _attended(q_Qd, k_ring, v_ring, step, whole, tiles, last, scale):
    """Return the attention [Q, d] over so many tiles, at least one; `whole` of them all see."""
    k_chip, k_full, k_empty = k_ring
    v_chip, v_full, v_empty = v_ring
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    none = gl.zeros((64, 64), gl.float32, layout=s_mma)
    o = gl.zeros((64, 256), gl.float32, layout=o_mma)
    top = gl.full((64,), -1e38, gl.float32, layout=gl.SliceLayout(1, s_mma))
    total = gl.zeros((64,), gl.float32, layout=gl.SliceLayout(1, s_mma))
    stage = awaited(k_full, step, k_chip.shape[0])
    s = computed(started(q_Qd, k_chip.index(stage), none), 0)
    release(k_empty, stage)
    p, top, total, shrink = _softened(s, 0, whole, top, total, last, scale)
    p = _weights(p, v_chip, o)
    stage = awaited(v_full, step, v_chip.shape[0])
    for i in range(1, tiles):
        step += 1
        k_stage = awaited(k_full, step, k_chip.shape[0])
        s = started(q_Qd, k_chip.index(k_stage), none)
        next_o = warpgroup_mma(p, v_chip.index(stage), o, is_async=True)
        s = computed(s, 1)
        release(k_empty, k_stage)
        next_p, top, total, shrink = _softened(s, i, whole, top, total, last, scale)
        next_p = _weights(next_p, v_chip, o)
        # here, and not when they are needed: ptxas moves no softmax beyond a loop that waits, but
        # would move it beyond the sums, which then had nothing beside them
        next_stage = awaited(v_full, step, v_chip.shape[0])
        o, _p, p = warpgroup_mma_wait(0, deps=[next_o, p, next_p])
        release(v_empty, stage)
        o *= gl.convert_layout(shrink, gl.SliceLayout(1, o_mma))[:, None]
        stage = next_stage
    o = computed(warpgroup_mma(p, v_chip.index(stage), o, is_async=True), 0)
    release(v_empty, stage)
    inverse = 1.0 / gl.where(total > 0, total, 1.0)
    return o * gl.convert_layout(inverse, gl.SliceLayout(1, o_mma))[:, None]


@gluon_jit
def _attend(
    gate,
    y,
    prompts,
    q_chip,
    k_ring,
    v_ring,
    gate_row,
    gate_head,
    scale,
    HALF: gl.constexpr,
    STEPS: gl.constexpr,
):
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    own, step, used = q_chip[0].index(HALF), 0, 0
    for turn in range(turns_of(prompts)):
        head, slot, first, end, before = task_of(turn, prompts, STEPS)
        if first < end:
            tiles = (keys_of(slot, first, end, before) + 63) // 64
            last = before + gl.arange(0, 64, layout=gl.SliceLayout(1, s_mma))
            awaited(q_chip[1], used, 1)
            if tiles > 0:
                whole = (before + 1) // 64
                o = _attended(own, k_ring, v_ring, step, whole, tiles, last, scale)
                own.store(o.to(own.dtype))
            else:
                own.store(gl.zeros((64, 256), own.dtype, layout=lines))
            barrier()
            o_Qd, heads = own.load(lines), prompts[4] * 2
            _store_gated(o_Qd, gate, y, head + HALF, heads, first, end, gate_row, gate_head)
            fence_async_shared()  # queries are copied to where threads have written
            release(q_chip[2], 0)
            used += 1
            step += tiles


@gluon_jit
def _store_gated(o_Qd, gate, y, head, heads, first, end, gate_row, gate_head):
    """Store what online.gated makes of o."""
    t = first + gl.arange(0, 64, layout=gl.SliceLayout(1, o_Qd.type.layout))
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, o_Qd.type.layout))
    inside = (t < end)[:, None] & (d < 256)[None, :]
    row = t.to(gl.int64)
    gate_at = gate + (row * gate_row)[:, None] + (head * gate_head + d)[None, :]
    gate_Qd = gl.load(gate_at, mask=inside, other=0.0).to(gl.float32)
    # a division takes many times as long
    root = gl.rsqrt(1.0 + gl.exp2(gate_Qd * -1.4426950408889634))
    y_at = y + ((row * heads + head) * 256)[:, None] + d[None, :]
    result = o_Qd.to(gl.float32) * rounded(root * root, y)
    gl.store(y_at, result.to(y.dtype.element_ty), mask=inside)


@gluon_jit
def _ring(tiles, TILES: gl.constexpr, STAGES: gl.constexpr):
    """Return (room on chip for so many tiles, full, empty), to be filled in so many steps."""
    chip = gl.allocate_shared_memory(tiles.dtype, [TILES, 64, 256], tiles.layout)
    full, empty = barriers(STAGES, 1)
    return chip, full, empty


# one kernel for all lengths: to compile it takes seconds
@partial(gluon_jit, do_not_specialize=["N", "L", "pairs", "blocks", "group"])
def kernel(
    q_tiles,
    k_tiles,
    v_tiles,
    pool_v,
    gate,
    y,
    slots,
    cu_seqlens,
    starts,
    N,
    L,
    pairs,
    blocks,
    group,
    row,
    q_head,
    gate_row,
    gate_head,
    scale,
    STEPS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    MULTIPLY: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Write the gated attention of all blocks of queries."""
    prompts = slots, cu_seqlens, starts, N, pairs, blocks
    q_chip = _ring(q_tiles, 2, 1)
    k_ring = _ring(k_tiles, K_STAGES, K_STAGES)
    v_ring = _ring(v_tiles, V_STAGES, V_STAGES)
    gl.warp_specialize(
        [
            (_attend, (gate, y, prompts, q_chip, k_ring, v_ring, gate_row, gate_head, scale,
                       0, STEPS)),
            (_attend, (gate, y, prompts, q_chip, k_ring, v_ring, gate_row, gate_head, scale,
                       1, STEPS)),
            (load, (q_tiles, k_tiles, v_tiles, pool_v, prompts, q_chip, k_ring, v_ring, L, group,
                     row, q_head, STEPS)),
        ],
        [4, 4],
        [MULTIPLY, LOAD],
    )  # fmt: skip
