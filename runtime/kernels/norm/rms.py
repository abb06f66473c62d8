"""RMSNorm of the residual stream, alone or with the residual add fused.

Chosen for: `LAYER` of several rows, `ADDED_NORM`, and `ROW_NORM` before a wide product.

    rmsnorm        y = x * rsqrt(mean(x^2) + eps) * (1 + w)            one cast to x's dtype
    add_rmsnorm    r = x + residual (rounded to the model dtype),  y = rmsnorm(r)
    parts          x is first summed from parts in float32, and rounded

Source: Zhang and Sennrich 2019; the Qwen3.5 model code of transformers for the casts.
Trap: every norm of the family is zero-centred (1 + w) except `linear_attn.norm`, which is plain
(see gated). Both kinds load with the right shapes.

A product in FP8 reads codes of a norm, not its numbers: the kernels write what `quantize_rows` in
groups of 128 makes of the rounded numbers, to the bit, beside them.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.cases import AddedRows
from runtime.kernels.dispatch import ADDED_NORM
from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import Codes, room_of, store_codes
from runtime.kernels.launch import jit, loaded, power_of_two, tl, use_triton, widen
from runtime.kernels.norm.pieces import add_pieces
from runtime.kernels.overlap import at_once, early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


# H200, 0.8B, 3, 4 and 8 rows: 769, 796 and 884 us, 775, 802 and 890 if loads wait for each other;
# 8 rows of 27B 9.19 ms for 9.24; four layers of 35B-A3B, 2 rows: 195.5 for 197.3. Many longer rows,
# whose programs take more of a multiprocessor, were not measured.
_SHORT, _FEW = 1024, 8


class Parts(NamedTuple):
    """Rows [T, H] that are still to be summed from their parts, then rounded.

    sums  [P, T, H] float32, contiguous
    """

    sums: Tensor


def rmsnorm_reference(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Say what `rmsnorm` computes, in plain torch."""
    x = widen(x_TH)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + widen(weight_H))
    return y.to(x_TH.dtype)


def add_rmsnorm_reference(
    x_TH: Tensor | Parts, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Say what `add_rmsnorm` computes, in plain torch."""
    x = x_TH.sums.sum(0).to(residual_TH.dtype) if isinstance(x_TH, Parts) else x_TH
    total = x + residual_TH
    return rmsnorm_reference(total, weight_H, eps), total


def rmsnorm(
    x_TH: Tensor, weight_H: Tensor, eps: float, codes: Codes | Lined | None = None
) -> Tensor:
    """Return the zero-centred RMSNorm of each row.

    x_TH      [T, H] float, rows contiguous in themselves
    weight_H  [H] float, stored as w: the factor is 1 + w
    codes     room for those of the result, filled too; only on a GPU
    """
    _check_rows(x_TH, weight_H)
    assert codes is None or use_triton(x_TH), "only the kernel writes codes"
    if not use_triton(x_TH):
        return rmsnorm_reference(x_TH, weight_H, eps)
    y = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    block = power_of_two(x_TH.shape[1])
    _rmsnorm_kernel[(y.shape[0],)](
        x_TH,
        weight_H,
        y,
        *room_of(codes, x_TH),
        x_TH.shape[1],
        x_TH.stride(0),
        eps,
        BLOCK=block,
        LINED=int(isinstance(codes, Lined)),
        num_warps=_warps(block, codes),
        **early(),
    )
    return y


def add_rmsnorm(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    codes: Codes | Lined | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (the RMSNorm of x + residual, x + residual), both [T, H] in the residual's dtype.

    x_TH, residual_TH  [T, H] of one dtype, rows contiguous in themselves; neither is changed.
                       x may be parts
    weight_H           [H] float, stored as w: the factor is 1 + w
    codes              room for those of the norm, filled too; only on a GPU
    """
    x = _parts_of(x_TH, residual_TH.dtype)[2]
    _check_rows(residual_TH, weight_H)
    _check_rows(x, weight_H)
    assert x.shape == residual_TH.shape, "x and residual must have one shape"
    assert codes is None or use_triton(residual_TH), "only the kernel writes codes"
    if not use_triton(residual_TH):
        return add_rmsnorm_reference(x_TH, residual_TH, weight_H, eps)
    parts, lined = isinstance(x_TH, Parts), isinstance(codes, Lined)
    case = AddedRows(residual_TH.shape[1], parts, lined)
    y, total = _added_norm(case)(x_TH, residual_TH, weight_H, eps, codes)
    return y, total


def add_whole(
    x_TH: Tensor | Parts,
    residual_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    codes: Codes | Lined | None,
) -> tuple[Tensor, Tensor]:
    """Return `add_rmsnorm` by the kernel that has a row at once."""
    num_parts, part, x = _parts_of(x_TH, residual_TH.dtype)
    num_rows, hidden = residual_TH.shape
    y = torch.empty((num_rows, hidden), dtype=residual_TH.dtype, device=residual_TH.device)
    total = torch.empty_like(y)
    block = power_of_two(hidden)
    _add_rmsnorm_kernel[(num_rows,)](
        x,
        residual_TH,
        weight_H,
        y,
        *room_of(codes, residual_TH),
        total,
        hidden,
        x.stride(0),
        part,
        residual_TH.stride(0),
        eps,
        PARTS=num_parts,
        BLOCK=block,
        LINED=int(isinstance(codes, Lined)),
        num_warps=_warps(block, codes) if num_parts == 1 else min(max(block // 128, 1), 32),
        **(at_once() if num_parts > 1 and (hidden <= _SHORT or num_rows <= _FEW) else {}),
        **early(),
    )
    return y, total


def _parts_of(x_TH: Tensor | Parts, dtype: torch.dtype) -> tuple[int, int, Tensor]:
    """Return how many parts there are, how far they are apart, and the first."""
    if isinstance(x_TH, Parts):
        assert x_TH.sums.is_contiguous(), "parts must be contiguous"
        return len(x_TH.sums), x_TH.sums.stride(0), x_TH.sums[0]
    assert x_TH.dtype == dtype, "x and residual must have one dtype"
    return 1, 0, x_TH


def _check_rows(x_TH: Tensor, weight_H: Tensor) -> None:
    assert x_TH.ndim == 2, "x must be [T, H]"
    assert x_TH.stride(1) == 1, "rows must be contiguous"
    assert weight_H.shape == x_TH.shape[1:], "one weight for each element of a row"
    assert weight_H.is_contiguous(), "the weight must be contiguous"


def _warps(block: int, codes: Codes | Lined | None) -> int:
    # 16 bytes of a row for each thread, two without codes: with them all would change threads first
    return min(max(block // (256 if isinstance(codes, Codes) else 512), 1), 16)


@jit
def zero_centred(x, w, num, eps):
    """Return the norm of one row x (float32, zero beyond `num`) with the stored weight w."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / num + eps) * (1.0 + w.to(tl.float32))


@jit
def _rmsnorm_kernel(
    x,
    weight,
    y,
    codes,
    codes_scale,
    height,
    H,
    x_row,
    eps,
    BLOCK: tl.constexpr,
    LINED: tl.constexpr,
):
    start_next()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    w_H = tl.load(weight + i, mask=i < H, other=0.0)
    wait_for_inputs()
    x_H = tl.load(x + row * x_row + i, mask=i < H, other=0.0).to(tl.float32)
    y_H = zero_centred(x_H, w_H, H, eps).to(y.dtype.element_ty)
    tl.store(y + row * H + i, y_H, mask=i < H)
    store_codes(y_H.to(tl.float32), codes, codes_scale, height, row, H, BLOCK, LINED)


@jit
def _add_rmsnorm_kernel(
    x,
    residual,
    weight,
    y,
    codes,
    codes_scale,
    height,
    total,
    H,
    x_row,
    part,
    residual_row,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LINED: tl.constexpr,
):
    start_next()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < H
    w_H = tl.load(weight + i, mask=inside, other=0.0)
    wait_for_inputs()
    x_PH = loaded(x + row * x_row + i, inside, part, PARTS)
    r_H = tl.load(residual + row * residual_row + i, mask=inside, other=0.0)
    x_H = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(PARTS):
        x_H += x_PH[p].to(tl.float32)
    x_H = x_H.to(total.dtype.element_ty).to(tl.float32)
    sum_H = (x_H + r_H.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * H + i, sum_H, mask=inside)
    y_H = zero_centred(sum_H.to(tl.float32), w_H, H, eps).to(y.dtype.element_ty)
    tl.store(y + row * H + i, y_H, mask=inside)
    store_codes(y_H.to(tl.float32), codes, codes_scale, height, row, H, BLOCK, LINED)


_added_norm = ADDED_NORM.bind(add_pieces, add_whole)
