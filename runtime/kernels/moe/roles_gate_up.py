"""The first product of `roles`: silu(gate) * up of codes of x, quantised.

Chosen for: `EXPERTS`, the first product of roles.

The warps that load gather the rows of x and their scales; gate and up come through the bulk copy
engine. A tile is 128 columns of the inner size, for then it has all of a group of its codes.

Shape letters: T tokens, P pairs, H hidden, F inner size, B blocks, M pairs of a group of warps, G
groups of 128 columns of H.
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
    silu_times,
    skipped,
    started,
)

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
    )

# arrivals: the bulk copies, and each thread that loads for its own
_ARRIVALS = 1 + 128
OPTIONS = {"STAGES": 4, "ARRIVALS": _ARRIVALS, "MULTIPLY": 224, "LOAD": 56, **PARTS}


@gluon_jit
def _load(
    x,
    x_scale,
    weights,
    order,
    blocks,
    x_ring,
    s_ring,
    w_ring,
    full,
    empty,
    x_group,
    H,
    F,
    B,
    TOP: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    tile: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, tile))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, tile))
    line = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    number, step = gl.program_id(0), 0
    expert, first, end, part = part_at(blocks, number, B, GROUPS)
    while expert >= 0:
        t = gl.load(order + first + m, mask=first + m < end, other=0) // TOP
        x_rows = x + (t * H)[:, None] + k[None, :]
        used = (first + m < end)[:, None] & (k >= 0)[None, :]
        s_row = x_scale + gl.load(order + first + line, mask=first + line < end, other=0) // TOP
        row = expert * 2 * F + part * 128
        for g in range(H // 128):
            stage = emptied(empty, step, STAGES)
            mbarrier.expect(full.index(stage), 2 * 128 * 128)
            gate, up = w_ring.index(2 * stage), w_ring.index(2 * stage + 1)
            tma.async_copy_global_to_shared(weights, [row, g * 128], full.index(stage), gate)
            tma.async_copy_global_to_shared(weights, [row + F, g * 128], full.index(stage), up)
            x_stage, s_stage = x_ring.index(stage), s_ring.index(stage)
            async_copy.async_copy_global_to_shared(x_stage, x_rows + g * 128, mask=used)
            async_copy.async_copy_global_to_shared(s_stage, s_row + g * x_group)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1
        number += gl.num_programs(0)
        expert, first, end, part = part_at(blocks, number, B, GROUPS)


@gluon_jit
def _sums(
    s_gate,
    s_up,
    x_ring,
    s_ring,
    w_ring,
    full,
    empty,
    step,
    G,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Return (gate, up, the step after) of 64 pairs."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    gate = gl.zeros((64, 128), gl.float32, layout=mma)
    up = gl.zeros((64, 128), gl.float32, layout=mma)
    none = gl.zeros((64, 128), gl.float32, layout=mma)
    gate_s, up_s = gl.load(s_gate), gl.load(s_up)
    for g in range(G):
        # the scales of a weight are loaded a step ahead
        after = gl.minimum(g + 1, G - 1)
        next_gate, next_up = gl.load(s_gate + after), gl.load(s_up + after)
        stage = awaited(full, step, STAGES)
        fence_async_shared()  # threads have copied x, which the tensor cores read
        x_MK = x_ring.index(stage).slice(64 * HALF, 64)
        product = started(x_MK, w_ring.index(2 * stage), none)
        s_M = s_ring.index(stage).slice(64 * HALF, 64).load(gl.SliceLayout(1, mma))
        gate += computed(product, 0) * (s_M * gate_s.to(gl.float32))[:, None]
        up_product = computed(started(x_MK, w_ring.index(2 * stage + 1), none), 0)
        release(empty, stage)
        up += up_product * (s_M * up_s.to(gl.float32))[:, None]
        gate_s, up_s = next_gate, next_up
        step += 1
    return gate, up, step


@gluon_jit
def _quantized(gate, up, like, codes):
    """Return (codes, scale) of silu(gate) * up: what encode.rows.quantized makes of it.

    The conversion to FP8 cuts off at 448 itself.
    """
    inner = rounded(silu_times(gate, up, like), like)
    s_M = gl.div_rn(gl.max(gl.abs(inner), 1), 448.0)
    s_M = gl.where(s_M > 0, s_M, 1.0)
    lift_M = gl.where(s_M < 2.0**-60, 2.0**64, 1.0)
    inner *= lift_M[:, None]
    divisor = (s_M * lift_M)[:, None]
    inverse = gl.div_rn(1.0, s_M * lift_M)[:, None]
    q = inner * inverse
    q = gl.fma(gl.fma(-q, divisor, inner), inverse, q)
    return q.to(codes.dtype.element_ty), s_M


@gluon_jit
def _multiply(
    scale,
    blocks,
    codes,
    codes_scale,
    like,
    x_ring,
    s_ring,
    w_ring,
    full,
    empty,
    H,
    F,
    P,
    B,
    scale_expert,
    scale_row,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    out: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    number, step = gl.program_id(0), 0
    expert, first, end, part = part_at(blocks, number, B, GROUPS)
    while expert >= 0:
        number += gl.num_programs(0)
        next_expert, next_first, next_end, next_part = part_at(blocks, number, B, GROUPS)
        if first + 64 * HALF < end:
            at = scale + expert * scale_expert + part * scale_row
            up_at = at + F // 128 * scale_row
            gate, up, step = _sums(
                at, up_at, x_ring, s_ring, w_ring, full, empty, step, H // 128, HALF, STAGES
            )
            q, s_M = _quantized(gate, up, like, codes)
            place = first + 64 * HALF + gl.arange(0, 64, layout=s_M.type.layout)
            gl.store(codes_scale + part * P + place, s_M, mask=place < end)
            place = first + 64 * HALF + gl.arange(0, 64, layout=gl.SliceLayout(1, out))
            n = part * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, out))
            to = codes + (place.to(gl.int64) * F)[:, None] + n[None, :]
            used = (place < end)[:, None] & (n < F)[None, :]
            gl.store(to, gl.convert_layout(q, out), mask=used)
        else:
            step = skipped(full, empty, step, H // 128, STAGES)
        expert, first, end, part = next_expert, next_first, next_end, next_part


@gluon_jit
def gate_up_kernel(
    x,
    x_scale,
    weights,
    scale,
    order,
    blocks,
    codes,
    codes_scale,
    like,
    x_group,
    H,
    F,
    P,
    B,
    scale_expert,
    scale_row,
    TOP: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr,
    MULTIPLY: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Write the inner activations of all blocks, in codes with their scales."""
    x_ring = gl.allocate_shared_memory(weights.dtype, [STAGES, 128, 128], weights.layout)
    w_ring = gl.allocate_shared_memory(weights.dtype, [2 * STAGES, 128, 128], weights.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 128], line)
    full, empty = barriers(STAGES, ARRIVALS)
    gl.warp_specialize(
        [
            (_multiply, (scale, blocks, codes, codes_scale, like, x_ring, s_ring, w_ring, full,
                         empty, H, F, P, B, scale_expert, scale_row, 0, GROUPS, STAGES)),
            (_multiply, (scale, blocks, codes, codes_scale, like, x_ring, s_ring, w_ring, full,
                         empty, H, F, P, B, scale_expert, scale_row, 1, GROUPS, STAGES)),
            (_load, (x, x_scale, weights, order, blocks, x_ring, s_ring, w_ring, full, empty,
                     x_group, H, F, B, TOP, GROUPS, STAGES)),
        ],
        [4, 4],
        [MULTIPLY, LOAD],
    )  # fmt: skip
