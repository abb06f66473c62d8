"""What the MTP head's first product takes of a token: its embedding and a hidden state, normed.

Chosen for: every draft on a GPU, and every prompt's rows through the head.

    x = [norm(embed[id]), norm(h)]

One kernel for a look-up, two norms and a copy. It is not launched early: keys that kernels before
it have written are complete in the layer after it.

Source, casts and the stored weights: see norm.rms.

Shape letters: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.norm.rms import rmsnorm_reference, zero_centred

if TYPE_CHECKING:
    from torch import Tensor


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
    assert embed_VH.stride(1) == hidden_TH.stride(1) == 1, "rows must be contiguous"
    assert ids_T.is_contiguous(), "ids one after another"
    assert we_H.is_contiguous(), "the weight must be contiguous"
    assert wh_H.is_contiguous(), "the weight must be contiguous"
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
