"""The MTP head's first product: of a token's embedding and a hidden state, each normed.

Chosen for: `DRAFT_INPUTS`: every draft on a GPU, and every prompt's rows through the head.

    y = [norm(embed[id]), norm(h)] W^T

Of a few short rows it is one kernel: every program norms them again. It starts the next kernel only
when all before it have ended: keys, places and lengths that these have written may then be read
before a wait. Else one kernel looks up, norms and copies; it is not launched early, for the same
reason, and the product follows.

Source, casts and the stored weights: see norm.rms.

Shape letters: T tokens, V vocabulary, H hidden size, N outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from runtime.kernels.cases import Product
from runtime.kernels.conditions import A_FEW_TOKENS
from runtime.kernels.dispatch import DRAFT_INPUTS
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.linear.product import linear
from runtime.kernels.linear.row_parts import (
    add_products,
    no_products,
    norm_part,
    normed,
    sums,
    weight_part,
    x_part,
)
from runtime.kernels.linear.weight import Weight, form_of
from runtime.kernels.norm.rms import rmsnorm_reference, zero_centred
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# 4 rows of the weight or 8, and as many warps, take the same time on an H200
_FEWEST_PROGRAMS = 128
_TALLEST, _WARPS = 8, 8


def draft_linear(
    ids_T: Tensor,
    embed_VH: Tensor,
    we_H: Tensor,
    hidden_TH: Tensor,
    wh_H: Tensor,
    eps: float,
    fc: Weight,
    row_1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the product [T, N] of each token's normed embedding and hidden state; a row of it.

    ids_T                [T] int64, all in the vocabulary
    embed_VH, hidden_TH  of one dtype, rows contiguous in themselves
    we_H, wh_H           [H] float, stored as w: the factor is 1 + w
    fc                   [N, 2H] in that dtype, or stored otherwise
    row_1                [1] int64, which row comes alone too, [1, N]; None: the only one
    """
    assert row_1 is not None or len(ids_T) == 1, "say which row"
    (rows, hidden), gpu = hidden_TH.shape, use_triton(hidden_TH)
    case = Product(gpu, rows, 2 * hidden, hidden_TH.dtype, *form_of(fc))
    both: tuple[Tensor, Tensor] = _linear(case)(
        ids_T, embed_VH, we_H, hidden_TH, wh_H, eps, fc, row_1
    )
    return both


def normed_before(
    ids_T: Tensor,
    embed_VH: Tensor,
    we_H: Tensor,
    hidden_TH: Tensor,
    wh_H: Tensor,
    eps: float,
    fc: Weight,
    row_1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return `draft_linear`, what it multiplies written by a kernel of its own."""
    y_TN = linear(draft_inputs(ids_T, embed_VH, we_H, hidden_TH, wh_H, eps), fc)
    return y_TN, y_TN if row_1 is None else y_TN.index_select(0, row_1)


def normed_within(
    ids_T: Tensor,
    embed_VH: Tensor,
    we_H: Tensor,
    hidden_TH: Tensor,
    wh_H: Tensor,
    eps: float,
    fc: Tensor,
    row_1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return `draft_linear` of a few rows by one kernel."""
    _check(ids_T, embed_VH, we_H, hidden_TH, wh_H)
    (rows, hidden), num_outputs = hidden_TH.shape, fc.shape[0]
    assert rows <= A_FEW_TOKENS, f"at most {A_FEW_TOKENS} rows"
    assert fc.shape == (num_outputs, 2 * hidden), "fc must be [N, 2H]"
    assert fc.is_contiguous(), "weights must be contiguous"
    y_TN = hidden_TH.new_empty((rows, num_outputs))
    y_1N = y_TN if row_1 is None else hidden_TH.new_empty((1, num_outputs))
    tall = _TALLEST
    while tall > 1 and num_outputs < _FEWEST_PROGRAMS * tall:
        tall //= 2
    _linear_kernel[(-(-num_outputs // tall),)](
        ids_T,
        embed_VH,
        we_H,
        hidden_TH,
        wh_H,
        fc,
        row_1,
        y_TN,
        y_1N,
        num_outputs,
        hidden,
        embed_VH.stride(0),
        hidden_TH.stride(0),
        eps,
        ROWS=rows,
        BLOCK_N=tall,
        BLOCK_H=max(power_of_two(hidden), 16),
        num_warps=_WARPS,
        **early(),
    )
    return y_TN, y_1N


def draft_inputs_reference(
    ids_T: Tensor, embed_VH: Tensor, we_H: Tensor, hidden_TH: Tensor, wh_H: Tensor, eps: float
) -> Tensor:
    """Say what `draft_inputs` computes, in plain torch."""
    embedding = rmsnorm_reference(F.embedding(ids_T, embed_VH), we_H, eps)
    return torch.cat([embedding, rmsnorm_reference(hidden_TH, wh_H, eps)], -1)


def draft_inputs(
    ids_T: Tensor, embed_VH: Tensor, we_H: Tensor, hidden_TH: Tensor, wh_H: Tensor, eps: float
) -> Tensor:
    """Return [T, 2H]: the norm of each token's embedding, then that of its hidden state.

    ids_T                [T] int64, all in the vocabulary
    embed_VH, hidden_TH  of one dtype, rows contiguous in themselves
    we_H, wh_H           [H] float, stored as w: the factor is 1 + w
    """
    _check(ids_T, embed_VH, we_H, hidden_TH, wh_H)
    if not use_triton(hidden_TH):
        return draft_inputs_reference(ids_T, embed_VH, we_H, hidden_TH, wh_H, eps)
    tokens, hidden = hidden_TH.shape
    x = torch.empty((tokens, 2 * hidden), dtype=hidden_TH.dtype, device=hidden_TH.device)
    block = power_of_two(hidden)
    _inputs_kernel[(tokens, 2)](
        ids_T,
        embed_VH,
        we_H,
        hidden_TH,
        wh_H,
        x,
        hidden,
        embed_VH.stride(0),
        hidden_TH.stride(0),
        eps,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return x


def _check(ids_T: Tensor, embed_VH: Tensor, we_H: Tensor, hidden_TH: Tensor, wh_H: Tensor) -> None:
    assert embed_VH.stride(1) == hidden_TH.stride(1) == 1, "rows must be contiguous"
    assert ids_T.is_contiguous(), "ids one after another"
    assert we_H.is_contiguous(), "the weight must be contiguous"
    assert wh_H.is_contiguous(), "the weight must be contiguous"


@jit
def _both_normed(e_H, h_H, n_e, n_h, H, eps, y):
    """Return an embedding and a hidden state, normed; warps exchange both sums at once."""
    e_sum, h_sum = sums([e_H * e_H, h_H * h_H], 0, 2)
    e_H = normed(e_H, n_e, tl.rsqrt(e_sum / H + eps), y, n_e)
    return e_H, normed(h_H, n_h, tl.rsqrt(h_sum / H + eps), y, n_h)


@jit
def _linear_kernel(
    ids,
    embed,
    w_embed,
    hidden,
    w_hidden,
    fc,
    row,
    y,
    y_1,
    N,
    H,
    embed_row,
    hidden_row,
    eps,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    f_e = weight_part(fc, first, N, 0, 2 * H, BLOCK_N, BLOCK_H)
    f_h = weight_part(fc, first, N, H, 2 * H, BLOCK_N, BLOCK_H)
    n_e, n_h = norm_part(w_embed, 0, H, BLOCK_H), norm_part(w_hidden, 0, H, BLOCK_H)
    wait_for_inputs()
    start_next()
    es, hs = (), ()
    for t in tl.static_range(ROWS):
        hs += (x_part(hidden + t * hidden_row, 0, H, BLOCK_H),)  # type: ignore[assignment]
        at = embed + tl.load(ids + t).to(tl.int64) * embed_row
        es += (x_part(at, 0, H, BLOCK_H),)  # type: ignore[assignment]
    alone = 0
    if row is not None:
        alone = tl.load(row).to(tl.int32)
    for t in tl.static_range(ROWS):
        e_H, h_H = _both_normed(es[t], hs[t], n_e, n_h, H, eps, y)
        total = add_products(no_products(fc, BLOCK_N, BLOCK_H), f_e, e_H, None, 0)
        y_N = tl.sum(add_products(total, f_h, h_H, None, 0), 1).to(y.dtype.element_ty)
        tl.store(y + t * N + n, y_N, mask=n < N)
        if row is not None:
            tl.store(y_1 + n, y_N, mask=n < tl.where(t == alone, N, 0))


@jit
def _inputs_kernel(
    ids, embed, w_embed, hidden, w_hidden, x, H, embed_row, hidden_row, eps, BLOCK: tl.constexpr
):
    t, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    if half == 0:
        at, weight = embed + tl.load(ids + t) * embed_row + i, w_embed
    else:
        at, weight = hidden + t * hidden_row + i, w_hidden
    x_H = tl.load(at, mask=i < H, other=0.0).to(tl.float32)
    w_H = tl.load(weight + i, mask=i < H, other=0.0)
    y_H = zero_centred(x_H, w_H, H, eps).to(x.dtype.element_ty)
    tl.store(x + (t * 2 + half) * H + i, y_H, mask=i < H)


_linear = DRAFT_INPUTS.bind(normed_within, normed_before)
