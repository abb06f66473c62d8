"""The token that is drafted after a row: the likeliest, found where the head's product is computed.

Chosen for: `DRAFT` on a GPU, unless the head is wide or packed.

    h = norm(x)                         token = the first n with the largest h w[n]^T, rounded

The logits are never written: each program leaves its largest one, and a kernel of one program
compares them. How a row is read, normed and multiplied: see linear.row.

Shape letters: H hidden size, D tokens that can be drafted, C programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.dispatch import DRAFT
from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.linear.product import linear
from runtime.kernels.linear.row import normed_case, row_blocks
from runtime.kernels.linear.row_parts import rounded
from runtime.kernels.linear.row_tile import row_sums
from runtime.kernels.linear.weight import (
    Stored,
    Weight,
    check_rows,
    product_reference,
)
from runtime.kernels.norm.rms import rmsnorm, rmsnorm_reference
from runtime.kernels.overlap import early, start_next
from runtime.kernels.sample.likeliest import best_of, likeliest, likeliest_of, likeliest_reference

if TYPE_CHECKING:
    from torch import Tensor

# 65536 x 1024 on an H200, with the choice: FP8 20.9 us, 24.6 with 16 rows and eight warps, 25.1
# with 8 rows; BF16 35.4, whatever the rows
_BLOCKS = {"BLOCK_N": 32, "BLOCK_K": 1024, "num_warps": 4, "STAGES": 4}


def draft_token_reference(
    x_1H: Tensor, norm_H: Tensor, eps: float, head: Weight, token_1: Tensor
) -> Tensor:
    """Say what `draft_token` computes, in plain torch."""
    normed_1H = rmsnorm_reference(x_1H, norm_H, eps)
    token_1.copy_(likeliest_reference(product_reference(normed_1H, head), 0))
    return normed_1H


def draft_token(x_1H: Tensor, norm_H: Tensor, eps: float, head: Weight, token_1: Tensor) -> Tensor:
    """Put the likeliest token after a row into token_1; return the row's norm [1, H].

    x_1H     [1, H] contiguous
    norm_H   [H], stored as w: the factor is 1 + w
    head     [D, H] in x's dtype, or stored otherwise
    token_1  [1] int64, 0 where the largest logit is NaN or infinite
    """
    normed_1H: Tensor = _draft(normed_case(x_1H, head))(x_1H, norm_H, eps, head, token_1)
    return normed_1H


def normed_within(
    x_1H: Tensor, norm_H: Tensor, eps: float, head: Weight, token_1: Tensor
) -> Tensor:
    """Return `draft_token`, every program norming the row for itself."""
    stored, normed_1H = Stored.of(head), torch.empty_like(x_1H)
    _, hidden = check_rows(x_1H, 1, stored)
    blocks = row_blocks(_BLOCKS, hidden)
    programs = -(-stored.values.shape[0] // blocks["BLOCK_N"])
    top = torch.empty((1, programs), dtype=torch.float32, device=x_1H.device)
    at = torch.empty((1, programs), dtype=torch.int32, device=x_1H.device)
    _token_kernel[(programs,)](
        x_1H,
        norm_H,
        normed_1H,
        hidden,
        eps,
        stored.values,
        stored.scale,
        stored.values.shape[0],
        *stored.scale_strides,
        top,
        at,
        EDGE=stored.edge,
        WIDTH=power_of_two(hidden),
        **blocks,
        **early(),
    )
    likeliest_of(top, at, token_1, 0)
    return normed_1H


def with_logits(x_1H: Tensor, norm_H: Tensor, eps: float, head: Weight, token_1: Tensor) -> Tensor:
    """Return `draft_token`, the logits written and then compared."""
    normed_1H = rmsnorm(x_1H, norm_H, eps)
    likeliest(linear(normed_1H, head), 0, token_1)
    return normed_1H


@jit
def _token_kernel(
    x,
    norm,
    kept,
    H,
    eps,
    head,
    scale,
    D,
    scale_row,
    scale_col,
    top,
    at,
    EDGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    start_next()
    tile = tl.program_id(0)
    ys, _ = row_sums(
        tile,
        x,
        norm,
        None,
        kept,
        H,
        eps,
        head,
        scale,
        D,
        scale_row,
        scale_col,
        EDGE,
        1,
        WIDTH,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    best, token = best_of(tl.where(n < D, rounded(ys[0], x), -float("inf")), tile * BLOCK_N)
    tl.store(top + tile, best)
    tl.store(at + tile, token)


_draft = DRAFT.bind(draft_token_reference, normed_within, with_logits)
