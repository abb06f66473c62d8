"""Steps that suit the inputs of a layer, and codes by GPTQ under such steps.

    sweep    of each group the step, among candidates, with the least sum of h_k (w_k - q_k)^2
    gptq     then, column by column, the nearest code; its error is moved into the columns after it
    settle   then each code again, the best one given all others, and bfloat16 steps likewise:
             d H d^T never grows, and is a tenth less than after GPTQ alone on trained models
    pairs    of whole numbers, two codes of a block at a time after that: another 1 % less
    again    now and then between these, of each group of E2M1 the step, among the same candidates,
             that suits what each weight should be given all others: another 2 % less

h are mean squares of the inputs, the diagonal of their Hessian H; before GPTQ, of the damped one.
Rows are independent, and ranges of them get the same bytes as the whole, unless a factor says how
they make up for one another: see `outputs`.

Source: Frantar et al., GPTQ, whose codes llm-compressor's `quantize_weight` gives under the same
steps and the same Hessian; Behdin et al., QuantEase, for codes one by one.

Shape letters: N rows, K columns, G groups of g columns in a row, B = N G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quant.fourbit import walk
from quant.fourbit.cpu import grouped
from quant.fourbit.pairs import pair_block
from quant.fourbit.passes import PASSES, choose
from quant.fourbit.rows import BLOCK, Form, Rows, end_of
from quant.importance import FLOOR, NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from quant.fourbit.hessian import Factor

# Rows that are walked together: the factor is read once for all of them.
ROWS = 256


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
    """Return of each group the candidate with the least weighted error, the first if several.

    bits  of whole numbers; 0: E2M1
    """
    w = w_NK.float().cpu().contiguous()
    return best_of(candidates, lambda grid: weigh_errors(w, weights_K, grid, bits))


def best_of(candidates: Iterable[Grid], weigh: Callable[[Grid], Tensor]) -> Grid:
    """Return of each group the candidate with the least error, float32 [B], the first if several.

    weigh  returns the errors of the nearest codes of a candidate
    """
    best: Grid | None = None
    least = torch.empty(0)
    for grid in candidates:
        error = weigh(grid)
        if best is None:
            best, least = grid, error
            continue
        better = error < least
        best = Grid(*(_chosen(better, *pair) for pair in zip(grid, best, strict=True)))
        least = error.minimum(least)
    assert best is not None, "a sweep needs candidates"
    return best


def _chosen(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `torch.where`, which a GPU does not have for every type of a byte."""
    if new.dtype.itemsize > 1:
        return torch.where(better, new, old)
    return torch.where(better, new.view(torch.uint8), old.view(torch.uint8)).view(new.dtype)


def weigh_errors(w_NK: Tensor, weights_K: Tensor, grid: Grid, bits: int) -> Tensor:
    """Return the weighted sum of squared errors of the nearest codes, float32 [B]."""
    w_Bg = grouped(w_NK, w_NK.numel() // len(grid.step))
    out = torch.empty(len(w_Bg))
    weight = weights_K.reshape(-1, w_Bg.shape[1])
    arrays = (x.contiguous().numpy() for x in (w_Bg, weight, grid.step, grid.zero))
    walk.weigh_errors(*arrays, _end(bits), out.numpy())
    return out


def best_steps(w_NK: Tensor, weights_K: Tensor, steps_CB: Tensor, bits: int) -> Tensor:
    """Return of each group the step with the least weighted error, [B], the first if several."""
    w_Bg = grouped(w_NK.float(), w_NK.numel() // steps_CB.shape[1])
    out = torch.empty(len(w_Bg))
    weight = weights_K.reshape(-1, w_Bg.shape[1])
    arrays = (x.contiguous().numpy() for x in (w_Bg, weight, steps_CB))
    walk.best_steps(*arrays, _end(bits), out.numpy())
    return out


def choose_units(
    w_NK: Tensor,
    grid: Grid,
    factor: Factor,
    bits: int,
    *,
    tried: Tensor | None = None,
    passes: int = PASSES,
    form: Form | None = None,
) -> tuple[Tensor, Tensor]:
    """Return units, float32 [N, K], and the steps that they belong to, [B].

    tried   steps [C, B] among which each is searched for again; None: whole numbers' alone change
    passes  0: GPTQ alone, under the steps that are given
    form    what chooses steps again in its own way
    """
    factor, shape = factor.on_cpu(), (len(w_NK), -1)
    step, zero = grid.step.clone().view(shape), grid.zero.view(shape)
    among = None if tried is None else tried.view(-1, *step.shape)
    units, walker = torch.empty(w_NK.shape), OneMatrix(factor)
    whole = Rows(w_NK, step, zero, units, bits, among, form)

    def one(part: slice, w: Tensor) -> Tensor:
        rows = replace(whole.part(part), w=w)
        choose(rows, walker, passes)
        return rows.left

    in_turn(w_NK, factor, one)
    return units, step.view(-1)


def in_turn(w_NK: Tensor, factor: Factor, one: Callable[[slice, Tensor], Tensor]) -> None:
    """Choose codes of ranges of rows, one after another, some of which make up for those before.

    one  chooses those of a range of rows that should be w, float32 [n, K]; returns what they leave
    """
    if factor.outputs is None:
        for first in range(0, len(w_NK), ROWS):
            part = slice(first, first + ROWS)
            one(part, w_NK[part].float().contiguous())
        return
    w = w_NK.to(torch.float32, copy=True).contiguous()
    for part, share in factor.outputs.slices():
        left = one(part, w[part])
        walk.subtract(w[part.stop :].numpy(), share.numpy(), left.numpy(), 0, 0)


@dataclass(frozen=True, slots=True)
class OneMatrix:
    """Walks rows of one matrix on the CPU."""

    factor: Factor

    def feed_back(self, rows: Rows) -> None:
        """Fill in the units that GPTQ chooses."""
        order, upper = self.factor.order, self.factor.upper.numpy()
        group_K = order // rows.group
        ordered = rows.w[:, order], rows.d[:, group_K], rows.zero[:, group_K]
        w, d, zero = (x.contiguous().numpy() for x in ordered)
        units = torch.empty(rows.w.shape)
        for first, missed in rows.blocks():
            moved = missed.numpy()
            walk.walk_block(w, d, zero, upper, _end(rows.bits), first, units.numpy(), moved)
            walk.subtract(w, moved, upper, first, first + moved.shape[1])
        rows.units.index_copy_(1, order, units)

    def slope(self, rows: Rows) -> Tensor:
        """Return (w - q) H of the damped Hessian, float32 [N, K]."""
        missed = rows.values - rows.w
        slope = missed * -self.factor.added
        for first, moved in rows.blocks():
            moved.copy_(missed[:, first : first + BLOCK])
            walk.subtract(slope.numpy(), moved.numpy(), self.factor.hessian.numpy(), first, 0)
        return slope

    def settle(self, rows: Rows, slope: Tensor) -> None:
        """Choose each unit again, and steps of whole numbers in groups of up to a block."""
        hessian, added = self.factor.hessian.numpy(), np.float32(self.factor.added)
        units, d, zero, pull = (x.numpy() for x in (rows.units, rows.d, rows.zero, slope))
        for first, moved in rows.blocks():
            walk.settle_block(
                units, d, zero, pull, hessian, added, _end(rows.bits), first, rows.group,
                rows.refit, moved.numpy(),
            )  # fmt: skip
            walk.subtract(pull, moved.numpy(), hessian, first, 0)
            slope[:, first : first + BLOCK] -= moved * self.factor.added

    def pair(self, rows: Rows, slope: Tensor) -> None:
        """Choose units of a block two by two where that is better."""
        hessian, added = self.factor.hessian.numpy(), np.float32(self.factor.added)
        units, d, zero, pull = (x.numpy() for x in (rows.units, rows.d, rows.zero, slope))
        for first, moved in rows.blocks():
            pair_block(
                units, d, zero, pull, hessian, added, _end(rows.bits), first, rows.group,
                moved.numpy(),
            )  # fmt: skip
            walk.subtract(pull, moved.numpy(), hessian, first, 0)
            slope[:, first : first + BLOCK] -= moved * self.factor.added

    def better_steps(self, rows: Rows, slope: Tensor) -> Tensor:
        """Return the best of `rows.tried` for what each weight should be given all others, [B].

        A form chooses its own, and zeros with them, which the rows take at once.
        """
        known = weights_of(self.factor.diagonal)
        wanted = rows.values + slope / known
        if rows.form is not None:
            step, zero = rows.form.steps(wanted, known)
            rows.zero.copy_(zero)
            return step
        assert rows.tried is not None, "steps are searched for among some"
        return best_steps(wanted, known, rows.tried.flatten(1), rows.bits)


def _end(bits: int) -> np.float32:
    return np.float32(end_of(bits))
