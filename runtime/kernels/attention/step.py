"""What next tokens go through between the projections of an attention layer, few at once.

Chosen for: `ATTENTION` of a batch that only decodes, with few rows, and few of them per slot.

    q', k' = rope(norm(q)), rope(norm(k))        pool_k[slot, last], pool_v[slot, last] = k', v
    y = softmax(q' K^T / sqrt(d)) V * sigmoid(gate)

Two kernels: one writes and decodes, the other combines the parts. Every program norms and rotates
its own queries, once for each part of a context: a few thousand numbers at most, in less time than
another kernel takes to start. With many rows that start no longer matters beside the keys, and
separate kernels do the work once.

Only what earlier steps wrote is read from the pools, so a whole first tile is loaded while the
projections are still being computed. The newest keys and values come from the projections: of a row
and of the rows before it in its sequence, each starts the sum of another part.

Source and rounding: see rope and reference; the parts: see parts.

Shape letters: B rows, as many for each sequence, n query heads, m key and value heads, d head size,
r rotated pairs, S slots, L tokens a slot holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.attention.decode import attention_decode_reference
from runtime.kernels.attention.online import LOG2_E, load_tile
from runtime.kernels.attention.parts import Parts, add_part, part_bounds
from runtime.kernels.attention.reference import check
from runtime.kernels.attention.rope import angles, normed_and_rotated, with_partner
from runtime.kernels.attention.write import norm_rope_write_reference
from runtime.kernels.launch import jit, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


def attention_step_reference(
    q_Bnd: Tensor,
    gate_Bnd: Tensor,
    k_Bmd: Tensor,
    v_Bmd: Tensor,
    wq_d: Tensor,
    wk_d: Tensor,
    cos_Br: Tensor,
    sin_Br: Tensor,
    eps: float,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    each: int = 1,
    rows_R: Tensor | None = None,
) -> Tensor:
    """Say what `attention_step` computes, in plain torch."""
    q = norm_rope_write_reference(
        q_Bnd,
        k_Bmd,
        v_Bmd,
        wq_d,
        wk_d,
        cos_Br,
        sin_Br,
        eps,
        pool_k,
        pool_v,
        slots_B,
        lengths_B - 1,
    )
    y_Bnd = attention_decode_reference(q, gate_Bnd, pool_k, pool_v, slots_B, lengths_B)
    return y_Bnd if rows_R is None else y_Bnd.index_select(0, rows_R)


def attention_step(
    q_Bnd: Tensor,
    gate_Bnd: Tensor,
    k_Bmd: Tensor,
    v_Bmd: Tensor,
    wq_d: Tensor,
    wk_d: Tensor,
    cos_Br: Tensor,
    sin_Br: Tensor,
    eps: float,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    each: int = 1,
    rows_R: Tensor | None = None,
) -> Tensor:
    """Return the gated attention [B, n, d] of the next tokens; their keys and values enter.

    q_Bnd, gate_Bnd  [B, n, d] of one dtype, elements contiguous, as k_Bmd and v_Bmd [B, m, d]
    wq_d, wk_d       [d] stored as w: the factor is 1 + w
    cos_Br, sin_Br   [B, r] in the dtype of q, contiguous
    pool_k, pool_v   [S, L, m, d] contiguous, changed in place
    slots_B          [B] int32 or int64; below 0 zeros come out, nothing is written
    lengths_B        [B] int32 or int64, tokens in the slot, this one included
    each             rows of a sequence, one after another, each the next token; no slot has more
    rows_R           [R] int64, the rows that are wanted: see `Parts.combined`; None: all
    """
    _check(q_Bnd, gate_Bnd, k_Bmd, v_Bmd, cos_Br, pool_k, pool_v)
    assert lengths_B.shape == slots_B.shape == q_Bnd.shape[:1], "one slot and length for each row"
    rope, at = (wq_d, wk_d, cos_Br, sin_Br), (pool_k, pool_v, slots_B, lengths_B)
    if not use_triton(q_Bnd):
        inputs = q_Bnd, gate_Bnd, k_Bmd, v_Bmd
        return attention_step_reference(*inputs, *rope, eps, *at, rows_R=rows_R)
    _, num_heads, head_dim = q_Bnd.shape
    kv_heads, parts = pool_k.shape[2], Parts.empty(q_Bnd, pool_k, each)
    strides = [step for x in (q_Bnd, k_Bmd, v_Bmd) for step in x.stride()[:2]]
    _step_kernel[parts.grid(kv_heads)](
        q_Bnd,
        k_Bmd,
        v_Bmd,
        *rope,
        *at,
        parts.o,
        parts.top,
        parts.total,
        pool_k.shape[1],
        num_heads,
        kv_heads,
        *strides,
        eps,
        head_dim**-0.5 * LOG2_E,
        EACH=each,
        ALIKE=int(parts.few(kv_heads)),
        R=cos_Br.shape[1],
        **parts.options(pool_k),
        **early(),
    )
    return parts.combined(gate_Bnd, rows_R)


def _check(
    q: Tensor, gate: Tensor, k: Tensor, v: Tensor, cos_Br: Tensor, pool_k: Tensor, pool_v: Tensor
) -> None:
    check(q, gate, pool_k, pool_v)
    assert k.shape == v.shape == (q.shape[0], *pool_k.shape[2:]), "k and v are [B, m, d]"
    assert k.stride(2) == v.stride(2) == 1, "heads must be contiguous"
    assert q.dtype == k.dtype == v.dtype == cos_Br.dtype, "one dtype throughout"
    assert q.shape[0] == cos_Br.shape[0], "one row of angles for each token"
    assert q.shape[2] >= 2 * cos_Br.shape[1], "no more angles than pairs"


@jit
def _store_newest(keys, values, k_d, v_d, i, j, g, width, ALIKE: tl.constexpr):
    """Write the newest key and value, `width` numbers of each; of keys that are alike the first."""
    inside = i < width
    if ALIKE:
        inside = inside & (g == 0)[:, None]
    tl.store(keys + i, k_d, mask=inside)
    tl.store(values + j, v_d, mask=j < width)


@jit
def _step_kernel(
    q,
    k,
    v,
    wq,
    wk,
    cos,
    sin,
    pool_k,
    pool_v,
    slots,
    lengths,
    part_o,
    part_max,
    part_sum,
    L,
    num_heads,
    kv_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    eps,
    scale,
    EACH: tl.constexpr,
    ALIKE: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    STAGES: tl.constexpr,
):
    start_next()
    part, kv_head = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot, length = tl.load(slots + b).to(tl.int64), tl.load(lengths + b).to(tl.int32)
    late = (b % EACH).to(tl.int32)
    before = tl.where(slot >= 0, length - 1 - late, 0)
    first, end = part_bounds(part, before, PARTS, GRAIN)
    row = kv_heads * HEAD
    keys = pool_k + (slot * L * kv_heads + kv_head) * HEAD
    values = pool_v + (slot * L * kv_heads + kv_head) * HEAD
    place = first + tl.arange(0, BLOCK_L)
    k_Ld = load_tile(keys, place, place < end, 0.0, row, HEAD, BLOCK_D)
    v_Ld = load_tile(values, place, place < end, 0.0, row, HEAD, BLOCK_D)
    g, j = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)[None, :]
    i = j
    # Where there are registers, all that the queries and the newest key meet gets the shape of the
    # queries, and so their layout: 18 barriers instead of 46. One row of 0.8B 547 us for 553.
    if ALIKE:
        i = tl.broadcast_to(j, (BLOCK_G, BLOCK_D))
    wq_d, other_wq_d = with_partner(wq, i, i < HEAD, R)
    wk_d, other_wk_d = with_partner(wk, i, i < HEAD, R)

    wait_for_inputs()
    # a part has one of the new tokens, if any: its number in the sequence is that of the part
    newest, t = (part <= late) & (slot >= 0), b
    if EACH > 1:
        t = b - late + tl.minimum(part, late)
    width = tl.where(newest, HEAD, 0)
    inside, seen = (g < GROUP)[:, None] & (i < HEAD), i < width
    head = kv_head * GROUP + g
    q_Gd, other_q_Gd = with_partner(q + b * q_row + head[:, None] * q_head, i, inside, R)
    k_d, other_k_d = with_partner(k + t * k_row + kv_head * k_head, i, seen, R)
    v_d = tl.load(v + t * v_row + kv_head * v_head + j, mask=j < width, other=0.0)
    c, s = angles(cos, sin, b, i, i < HEAD, R)
    k_c, k_s = angles(cos, sin, t, i, i < HEAD, R)
    q_Gd = normed_and_rotated(q_Gd, other_q_Gd, wq_d, other_wq_d, c, s, pool_k, eps, HEAD)
    k_d = normed_and_rotated(k_d, other_k_d, wk_d, other_wk_d, k_c, k_s, pool_k, eps, HEAD)
    at, width = (before + late).to(tl.int64) * row, tl.where(part == late, width, 0)
    _store_newest(keys + at, values + at, k_d, v_d, i, j, g, width, ALIKE)

    score = tl.sum(q_Gd.to(tl.float32) * k_d.to(tl.float32), 1) * scale
    top = tl.where(newest, score, -1e38)
    total = tl.zeros((BLOCK_G,), tl.float32) + tl.where(newest, 1.0, 0.0)
    o = tl.zeros((BLOCK_G, BLOCK_D), tl.float32) + v_d.to(tl.float32)
    add_part(
        o,
        top,
        total,
        q_Gd,
        k_Ld,
        v_Ld,
        keys,
        values,
        first,
        end,
        row,
        scale,
        part_o,
        part_max,
        part_sum,
        b,
        head,
        part,
        num_heads,
        g < GROUP,
        PARTS,
        HEAD,
        STAGES,
    )
