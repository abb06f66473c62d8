"""The second product of `roles`: codes of inner activations times down, weighted.

Chosen for: `EXPERTS`, after the first product of roles.

A program walks along blocks: a block's activations stay on chip while the rows of its expert pass.
All that it loads comes through the bulk copy engine, for the pairs of a block follow one another;
rows beyond a block are another's, and are not stored.

Shape letters: P pairs, H hidden, F inner size, G groups of 128 columns of F, B blocks, M pairs of a
group of warps.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_GLUON, gl, gluon_jit
from runtime.kernels.moe.sort import part_at
from runtime.kernels.ring import (
    PARTS,
    awaited,
    barriers,
    computed,
    emptied,
    release,
    rounded,
    skipped,
    started,
)

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_CHIP = 12  # tiles: those of a block's activations, and the stages


def options(groups: int) -> dict[str, int]:
    """Return the launch options for an inner size of so many groups of 128."""
    return {"GROUPS": groups, "STAGES": _CHIP - groups, "MULTIPLY": 232, "LOAD": 40, **PARTS}


@gluon_jit
def _load(
    inner,
    weights,
    blocks,
    x_kept,
    w_ring,
    x_full,
    x_empty,
    full,
    empty,
    H,
    B,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    number, turn, step = gl.program_id(0), 0, 0
    expert, first, _, _ = part_at(blocks, number, B, 1)
    while expert >= 0:
        emptied(x_empty, turn, 1)
        mbarrier.expect(x_full.index(0), GROUPS * 128 * 128)
        for g in gl.static_range(GROUPS):
            to = x_kept.index(g)
            tma.async_copy_global_to_shared(inner, [first, g * 128], x_full.index(0), to)
        for i in range(H // 128 * GROUPS):
            stage = emptied(empty, step, STAGES)
            mbarrier.expect(full.index(stage), 128 * 128)
            at = [expert * H + i // GROUPS * 128, i % GROUPS * 128]
            tma.async_copy_global_to_shared(weights, at, full.index(stage), w_ring.index(stage))
            step += 1
        turn += 1
        number += gl.num_programs(0)
        expert, first, _, _ = part_at(blocks, number, B, 1)


@gluon_jit
def _sum(
    x_scales,
    s_row,
    x_kept,
    w_ring,
    full,
    empty,
    step,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Return (the sums of 64 pairs and 128 outputs, the step after).

    The product of a group is scaled while that of the next is computed.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    none = gl.zeros((64, 128), gl.float32, layout=mma)
    total = gl.zeros((64, 128), gl.float32, layout=mma)
    scales = ()
    for g in gl.static_range(GROUPS):
        scales += (x_scales[g] * gl.load(s_row + g).to(gl.float32),)  # type: ignore[assignment]
    stage = awaited(full, step, STAGES)
    product = started(x_kept.index(0).slice(64 * HALF, 64), w_ring.index(stage), none)
    for g in gl.static_range(1, GROUPS):
        after = awaited(full, step + 1, STAGES)
        x_MK = x_kept.index(g).slice(64 * HALF, 64)
        next_product = started(x_MK, w_ring.index(after), none)
        done = computed(product, 1)
        release(empty, stage)
        total += done * scales[g - 1][:, None]
        product, stage = next_product, after
        step += 1
    done = computed(product, 0)
    release(empty, stage)
    return total + done * scales[GROUPS - 1][:, None], step + 1


@gluon_jit
def _multiply(
    x_scale,
    scale,
    order,
    blocks,
    pair_weights,
    out,
    x_kept,
    w_ring,
    x_full,
    x_empty,
    full,
    empty,
    P,
    H,
    B,
    scale_expert,
    scale_row,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    number, turn, step = gl.program_id(0), 0, 0
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, lines))
    expert, first, end, _ = part_at(blocks, number, B, 1)
    while expert >= 0:
        place = first + 64 * HALF + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        used = place < end
        x_scales = ()
        for g in gl.static_range(GROUPS):
            s_M = gl.load(x_scale + g * P + place, mask=used, other=0.0)
            x_scales += (s_M,)  # type: ignore[assignment]
        weight_at = pair_weights + gl.load(order + place, mask=used, other=0)
        weight = gl.load(weight_at, mask=used, other=0.0).to(gl.float32)
        line = first + 64 * HALF + gl.arange(0, 64, layout=gl.SliceLayout(1, lines))
        pair = gl.load(order + line, mask=line < end, other=0)
        inside = (line < end)[:, None] & (n < 128)[None, :]
        to = out + (pair * H)[:, None] + n[None, :]
        s_row = scale + expert * scale_expert
        awaited(x_full, turn, 1)
        if first + 64 * HALF < end:
            for h in range(0, H, 128):
                total, step = _sum(
                    x_scales, s_row, x_kept, w_ring, full, empty, step, HALF, GROUPS, STAGES
                )
                y = (rounded(total, out) * weight[:, None]).to(out.dtype.element_ty)
                gl.store(to + h, gl.convert_layout(y, lines), mask=inside)
                s_row += scale_row
        else:
            step = skipped(full, empty, step, H // 128 * GROUPS, STAGES)
        release(x_empty, 0)
        turn += 1
        number += gl.num_programs(0)
        expert, first, end, _ = part_at(blocks, number, B, 1)


@gluon_jit
def down_kernel(
    inner,
    x_scale,
    weights,
    scale,
    order,
    blocks,
    pair_weights,
    out,
    P,
    H,
    B,
    scale_expert,
    scale_row,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Write the weighted outputs of all pairs."""
    x_kept = gl.allocate_shared_memory(weights.dtype, [GROUPS, 128, 128], weights.layout)
    w_ring = gl.allocate_shared_memory(weights.dtype, [STAGES, 128, 128], weights.layout)
    x_full, x_empty = barriers(1, 1)
    full, empty = barriers(STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply, (x_scale, scale, order, blocks, pair_weights, out, x_kept, w_ring, x_full,
                         x_empty, full, empty, P, H, B, scale_expert, scale_row,
                         0, GROUPS, STAGES)),
            (_multiply, (x_scale, scale, order, blocks, pair_weights, out, x_kept, w_ring, x_full,
                         x_empty, full, empty, P, H, B, scale_expert, scale_row,
                         1, GROUPS, STAGES)),
            (_load, (inner, weights, blocks, x_kept, w_ring, x_full, x_empty, full, empty, H, B,
                     GROUPS, STAGES)),
        ],
        [4, 4],
        [MULTIPLY, LOAD],
    )  # fmt: skip
