"""The likeliest token of each row.

Chosen for: every greedy batch; drafts take the second of its kernels.

Two kernels, of chunks and of rows, in place of three that are not launched early. Of equal logits
the first counts, as in `torch.max`.

Shape letters: R rows, V vocabulary, C chunks of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 2048


def likeliest_reference(logits_RV: Tensor, otherwise: int) -> Tensor:
    """Say what `likeliest` computes, in plain torch."""
    top, tokens = logits_RV.max(-1)
    return torch.where(top < torch.inf, tokens, otherwise)


def likeliest(logits_RV: Tensor, otherwise: int, out: Tensor | None = None) -> Tensor:
    """Return the token [R] int64 with the largest logit.

    logits_RV  [R, V] any float, rows contiguous in themselves
    otherwise  stands for the token where the largest logit is NaN or infinite
    out        [R] int64 to be filled and returned, if there is one
    """
    tokens = logits_RV.new_empty(len(logits_RV), dtype=torch.int64) if out is None else out
    assert tokens.is_contiguous(), "tokens must be contiguous"
    if not use_triton(logits_RV):
        return tokens.copy_(likeliest_reference(logits_RV, otherwise))
    assert logits_RV.stride(1) == 1, "rows must be contiguous"
    rows, vocabulary = logits_RV.shape
    chunks, device = -(-vocabulary // _CHUNK), logits_RV.device
    top = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    at = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    _chunk_kernel[(chunks, rows)](
        logits_RV, logits_RV.stride(0), vocabulary, top, at, CHUNK=_CHUNK, num_warps=4, **early()
    )
    return likeliest_of(top, at, tokens, otherwise)


def likeliest_of(top_RC: Tensor, at_RC: Tensor, tokens_R: Tensor, otherwise: int) -> Tensor:
    """Fill the tokens from the largest logits of parts of the vocabulary, on a GPU; return them.

    top_RC  [R, C] float32, infinite for NaN; at_RC [R, C] int32, the token of each
    """
    rows, parts = top_RC.shape
    most = power_of_two(parts)
    _row_kernel[(rows,)](
        top_RC,
        at_RC,
        parts,
        tokens_R,
        otherwise,
        MOST=most,
        num_warps=max(1, min(most // 256, 8)),
        **early(),
    )
    return tokens_R


@jit
def best_of(x, first):
    """Return the largest of the logits x in float32, infinite for NaN, and its token.

    first  token of x[0]; of equal logits the first counts
    """
    best, place = tl.max(tl.where(x >= -float("inf"), x, float("inf")), 0, return_indices=True)
    return best, first + place


@jit
def _chunk_kernel(logits, row_stride, V, top, at, CHUNK: tl.constexpr):
    start_next()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs()
    x = tl.load(logits + row * row_stride + i, mask=i < V, other=-float("inf")).to(tl.float32)
    best, token = best_of(x, chunk * CHUNK)
    tl.store(top + row * tl.num_programs(0) + chunk, best)
    tl.store(at + row * tl.num_programs(0) + chunk, token)


@jit
def _row_kernel(top, at, C, tokens, otherwise, MOST: tl.constexpr):
    start_next()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    wait_for_inputs()
    best = tl.load(top + row * C + c, mask=c < C, other=-float("inf"))
    best, chunk = tl.max(best, 0, return_indices=True)
    token = tl.load(at + row * C + chunk).to(tl.int64)
    tl.store(tokens + row, tl.where(best < float("inf"), token, otherwise))
