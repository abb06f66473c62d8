"""Grid that suit the inputs of a layer, and codes by GPTQ under such steps.

    sweep   of each group the step, among candidates, with the least sum of h_k (w_k - q_k)^2
    gptq    then, column by column, the nearest code; its error is moved into the columns after it

h are mean squares of the inputs, the diagonal of their Hessian. Rows are independent of each other:
ranges of rows get the same bytes as the whole.

Source: Frantar et al., GPTQ; llm-compressor at 0.14, `quantize_weight`, whose codes are these under
the same steps and the same Hessian.

Shape letters: N rows, K columns, G groups of g columns in a row, B = N G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from quant.fourbit import reference
from quant.fourbit.cpu import grouped
from quant.importance import FLOOR, NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from quant.fourbit.hessian import Factor


class Grid(NamedTuple):
    """What groups are encoded with, each [B].

    step    float32
    zero    float32, whole numbers
    stored  what a file holds of the step
    """

    step: Tensor
    zero: Tensor
    stored: Tensor


def weights_of(importance_K: Tensor) -> Tensor:
    """Return what an error in each column weighs, float32 [K], nowhere 0.

    A column that no token moved weighs a little, so that its weights are kept.
    """
    values = importance_K.float().cpu()
    some = values >= NOTHING
    if not some.any():
        return torch.ones_like(values)
    least = (values[some].double().mean() * FLOOR).float().clamp(min=NOTHING)
    return torch.where(some, values, least)


def sweep(w_NK: Tensor, weights_K: Tensor, candidates: Iterable[Grid], bits: int) -> Grid:
    """Return of each group the candidate with the least weighted error, the first if several."""
    best, least = None, None
    for steps in candidates:
        group = w_NK.numel() // len(steps.step)
        w_Bg = grouped(w_NK, group)
        weight_Bg = weights_K.reshape(-1, group).repeat(len(w_NK), 1)
        error = reference.weigh_errors(w_Bg, weight_Bg, steps.step, steps.zero, bits)
        if best is None or least is None:
            best, least = steps, error
            continue
        better = error < least
        pairs = zip(steps, best, strict=True)
        best = Grid(*(torch.where(better, new, old) for new, old in pairs))
        least = error.minimum(least)
    assert best is not None, "a sweep needs candidates"
    return best


def choose_units(w_NK: Tensor, steps: Grid, factor: Factor, bits: int) -> Tensor:
    """Return the units that GPTQ chooses under given steps, float32 [N, K]."""
    groups = len(steps.step) // len(w_NK)
    group_K = factor.order.cpu() // (w_NK.shape[1] // groups)
    step, zero = (x.view(-1, groups)[:, group_K] for x in (steps.step, steps.zero))
    w = w_NK.float().cpu()[:, factor.order.cpu()]
    units = reference.feed_back(w, step, zero, factor.upper.cpu(), bits)
    return torch.empty_like(units).index_copy_(1, factor.order.cpu(), units)
