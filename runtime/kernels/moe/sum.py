"""The sum over each token's experts, alone or with the residual add and the norm that follow.

Chosen for: `EXPERTS` of two tokens or more, after rows, tiles or w8a8, alone or within the next
norm.

    y[t] = sum_j rows[t*k + j]                                      added in float32, rounded once
    r = y + residual (rounded to the model dtype),  z = rmsnorm(r)

Fused, they take one pass over the rows: y is neither written nor read back. The results are the
same.

Source and rounding: see layer and norm.rms.

Shape letters: T tokens, k experts per token, P = T*k pairs, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import room_of, store_codes
from runtime.kernels.launch import jit, loaded, power_of_two, tl, use_triton, widen
from runtime.kernels.norm.rms import add_rmsnorm_reference, zero_centred
from runtime.kernels.overlap import at_once, early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.encode.rows import Codes

_THREAD = 8  # numbers of a row that a thread of the fused kernel loads at once: 16 bytes
# Tokens whose programs do not take turns: H200, 8 of 35B-A3B, four layers, 394 us, 401 if loads
# wait for each other
_AT_ONCE = 64


class Pairs(NamedTuple):
    """What the experts give [T, H], not yet summed: row t*k + j is the weighted output of pair j.

    rows  [T*k, H] model dtype, contiguous
    """

    rows: Tensor
    k: int


def summed_reference(pairs: Pairs) -> Tensor:
    """Say what `summed` computes, in plain torch."""
    rows_TkH = widen(pairs.rows.unflatten(0, (-1, pairs.k)))
    total = torch.zeros_like(rows_TkH[:, 0])
    for j in range(pairs.k):
        total += rows_TkH[:, j]
    return total.to(pairs.rows.dtype)


def summed(pairs: Pairs) -> Tensor:
    """Return the sum of each token's rows [T, H], added in float32 in their order."""
    if not use_triton(pairs.rows):
        return summed_reference(pairs)
    num_tokens, hidden = _shape(pairs)
    y_TH = pairs.rows.new_empty((num_tokens, hidden))
    block = min(1024, power_of_two(hidden))
    _sum_kernel[(num_tokens, -(-hidden // block))](
        pairs.rows, y_TH, hidden, TOP=pairs.k, BLOCK=block, num_warps=4
    )
    return y_TH


def add_pairs_rmsnorm_reference(
    pairs: Pairs, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Say what `add_pairs_rmsnorm` computes, in plain torch."""
    return add_rmsnorm_reference(summed_reference(pairs), residual_TH, weight_H, eps)


def add_pairs_rmsnorm(
    pairs: Pairs,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    codes: Codes | Lined | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (the RMSNorm of sum + residual, sum + residual), both [T, H] in the model dtype.

    residual_TH  [T, H] in the rows' dtype, rows contiguous in themselves; not changed
    weight_H     [H] float, stored as w: the factor is 1 + w
    codes        room for those of the norm, filled too; only on a GPU
    """
    assert residual_TH.shape == _shape(pairs), "rows and residual must have one shape"
    assert residual_TH.dtype == pairs.rows.dtype, "rows and residual must have one dtype"
    assert residual_TH.stride(1) == 1, "the residual's rows must be contiguous"
    assert weight_H.shape == residual_TH.shape[1:], "one weight for each element of a row"
    assert weight_H.is_contiguous(), "the weight must be contiguous"
    assert codes is None or use_triton(residual_TH), "only the kernel writes codes"
    if not use_triton(residual_TH):
        return add_pairs_rmsnorm_reference(pairs, residual_TH, weight_H, eps)
    num_tokens, hidden = residual_TH.shape
    y_TH = pairs.rows.new_empty((num_tokens, hidden))
    total_TH, block = torch.empty_like(y_TH), power_of_two(hidden)
    _sum_norm_kernel[(num_tokens,)](
        pairs.rows,
        residual_TH,
        weight_H,
        y_TH,
        *room_of(codes, residual_TH),
        total_TH,
        hidden,
        residual_TH.stride(0),
        eps,
        TOP=pairs.k,
        BLOCK=block,
        LINED=int(isinstance(codes, Lined)),
        num_warps=min(max(block // (32 * _THREAD), 1), 16),
        **(at_once() if num_tokens <= _AT_ONCE else {}),
        **early(),
    )
    return y_TH, total_TH


def _shape(pairs: Pairs) -> tuple[int, int]:
    num_rows, hidden = pairs.rows.shape
    assert num_rows % pairs.k == 0, "each token has k rows"
    assert pairs.rows.is_contiguous(), "rows must be contiguous"
    return num_rows // pairs.k, hidden


@jit
def row_sum(rows, t, i, inside, H, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of TOP rows of token t at columns i, rounded to their dtype, in float32."""
    parts, total = loaded(rows + t * TOP * H + i, inside, H, TOP), tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        total += parts[j].to(tl.float32)
    return total.to(rows.dtype.element_ty).to(tl.float32)


@jit
def _sum_kernel(rows, y, H, TOP: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = row_sum(rows, t, h, h < H, H, TOP, BLOCK)
    tl.store(y + t * H + h, total.to(y.dtype.element_ty), mask=h < H)


@jit
def _sum_norm_kernel(
    rows,
    residual,
    weight,
    y,
    codes,
    codes_scale,
    height,
    total,
    H,
    residual_row,
    eps,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    LINED: tl.constexpr,
):
    start_next()
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < H
    w_H = tl.load(weight + i, mask=inside, other=0.0)
    wait_for_inputs()
    r_H = tl.load(residual + t * residual_row + i, mask=inside, other=0.0)
    sum_H = row_sum(rows, t, i, inside, H, TOP, BLOCK)
    sum_H = (sum_H + r_H.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + t * H + i, sum_H, mask=inside)
    y_H = zero_centred(sum_H.to(tl.float32), w_H, H, eps).to(y.dtype.element_ty)
    tl.store(y + t * H + i, y_H, mask=inside)
    store_codes(y_H.to(tl.float32), codes, codes_scale, height, t, H, BLOCK, LINED)
