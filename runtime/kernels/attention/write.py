"""What attention does to its projections: q and k normed and rotated, k and v written into pools.

Chosen for: `ATTENTION` of prompts, many rows, or several rows of one slot.

    q' = rope(norm(q))        pool_k[slot, place] = rope(norm(k))        pool_v[slot, place] = v

in one kernel. Norm, rotation and rounding: see rope; the pools: see reference.

Shape letters: T packed tokens, n query heads, m key heads, d head size, r rotated pairs, S slots, L
tokens a slot holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.attention.reference import kv_write_reference
from runtime.kernels.attention.rope import (
    angles,
    normed_and_rotated,
    qk_norm_rope_reference,
    with_partner,
)
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


def norm_rope_write_reference(
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    wq_d: Tensor,
    wk_d: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    eps: float,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_T: Tensor,
    places_T: Tensor,
) -> Tensor:
    """Say what `norm_rope_write` computes, in plain torch."""
    q, k = qk_norm_rope_reference(q_Tnd, k_Tmd, wq_d, wk_d, cos_Tr, sin_Tr, eps)
    kv_write_reference(k, v_Tmd, pool_k, pool_v, slots_T, places_T)
    return q


def norm_rope_write(
    q_Tnd: Tensor,
    k_Tmd: Tensor,
    v_Tmd: Tensor,
    wq_d: Tensor,
    wk_d: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    eps: float,
    pool_k: Tensor,
    pool_v: Tensor,
    slots_T: Tensor,
    places_T: Tensor,
) -> Tensor:
    """Return q, normed and rotated [T, n, d]; each token's key and value enter its slot.

    q_Tnd, k_Tmd, v_Tmd  of one dtype, elements contiguous; q may be a view on [q | gate]
    wq_d, wk_d           [d] stored as w: the factor is 1 + w
    cos_Tr, sin_Tr       [T, r] in the dtype of q, contiguous
    pool_k, pool_v       [S, L, m, d] contiguous, changed in place
    slots_T, places_T    [T] int32 or int64; below slot 0 nothing is written; places are below L
    """
    _check(q_Tnd, k_Tmd, v_Tmd, cos_Tr, pool_k, pool_v)
    pools = pool_k, pool_v, slots_T, places_T
    if not use_triton(q_Tnd):
        return norm_rope_write_reference(
            q_Tnd, k_Tmd, v_Tmd, wq_d, wk_d, cos_Tr, sin_Tr, eps, *pools
        )
    (num_tokens, heads, d), kv_heads = q_Tnd.shape, k_Tmd.shape[1]
    out = torch.empty(q_Tnd.shape, dtype=q_Tnd.dtype, device=q_Tnd.device)
    rows = min(8, power_of_two(num_tokens))
    strides = [step for x in (q_Tnd, k_Tmd, v_Tmd) for step in x.stride()[:2]]
    _kernel[(-(-num_tokens // rows), heads + kv_heads)](
        q_Tnd,
        k_Tmd,
        v_Tmd,
        wq_d,
        wk_d,
        cos_Tr,
        sin_Tr,
        out,
        *pools,
        num_tokens,
        heads,
        kv_heads,
        pool_k.shape[1],
        *strides,
        eps,
        D=d,
        R=cos_Tr.shape[1],
        ROWS=rows,
        BLOCK=power_of_two(d),
        num_warps=min(rows, 4),
        **early(),
    )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, cos_Tr: Tensor, pool_k: Tensor, pool_v: Tensor) -> None:
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "heads must be contiguous in themselves"
    assert q.shape[0] == k.shape[0] == cos_Tr.shape[0], "one row of angles for each token"
    assert k.shape == v.shape, "k and v must have one shape"
    assert q.shape[2] == k.shape[2] >= 2 * cos_Tr.shape[1], "no more angles than pairs"
    assert q.dtype == k.dtype == v.dtype == cos_Tr.dtype, "one dtype throughout"
    assert pool_k.shape == pool_v.shape, "the pools must have one shape"
    assert pool_k.shape[2:] == k.shape[1:], "the pools are [slots, places, m, d]"
    assert pool_k.is_contiguous(), "the key pool must be contiguous"
    assert pool_v.is_contiguous(), "the value pool must be contiguous"


@jit
def _kernel(
    q,
    k,
    v,
    wq,
    wk,
    cos,
    sin,
    out,
    pool_k,
    pool_v,
    slots,
    places,
    T,
    num_q,
    num_k,
    L,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start_next()
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (i < D)
    head = tl.program_id(1)
    is_key = head >= num_q
    w, other_w = with_partner(tl.where(is_key, wk, wq), i, i < D, R)
    wait_for_inputs()
    c, s = angles(cos, sin, t, i, t < T, R)
    if not is_key:
        x, other = with_partner(q + t * q_row + head * q_head, i, inside, R)
        y_Td = normed_and_rotated(x, other, w, other_w, c, s, out, eps, D)
        tl.store(out + (t * num_q + head) * D + i, y_Td, mask=inside)
    else:
        head -= num_q
        x, other = with_partner(k + t * k_row + head * k_head, i, inside, R)
        slot = tl.load(slots + t, mask=t < T, other=-1).to(tl.int64)
        place = tl.load(places + t, mask=t < T, other=0)
        written = inside & (slot >= 0)
        v_Td = tl.load(v + t * v_row + head * v_head + i, mask=written, other=0.0)
        y_Td = normed_and_rotated(x, other, w, other_w, c, s, out, eps, D)
        at = ((slot * L + place) * num_k + head) * D + i
        tl.store(pool_k + at, y_Td.to(pool_k.dtype.element_ty), mask=written)
        tl.store(pool_v + at, v_Td.to(pool_v.dtype.element_ty), mask=written)
