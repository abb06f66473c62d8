"""The scale search and GPTQ for many matrices at once, where their tensors are: on a GPU.

Matrices of one shape, such as a layer's experts, stand one below the other; each has a factor of
its own. What `calibrate` does row by row is done here for a block of columns of all rows: columns
within a block by three functions (see `Blocks`), all other columns by products in float32.

Units can differ from the CPU's where a number falls on the other side of a tie: products and their
sums are rounded in another order. The same matrices together get the same bytes.

Shape letters: E matrices, N rows of each, K columns, G groups of g columns, B = E N G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from quant.fourbit.calibrate import Grid, best_of
from quant.fourbit.parts import GLOBAL, SCALE
from quant.fourbit.passes import PASSES, choose
from quant.fourbit.rows import Rows, nearest
from quant.importance import FLOOR, NOTHING

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.hessian import Factor
    from quant.fourbit.outputs import Outputs
    from quant.scheme import Prepared, Scheme


class Blocks(NamedTuple):
    """What walks the columns of a block: `walk`, `settle`, `pairs` in `runtime.kernels.gptq`."""

    walk: Callable[[Rows, Tensor, Tensor, int, Tensor], None]
    settle: Callable[[Rows, Tensor, Tensor, Tensor, int, Tensor], None]
    pair: Callable[[Rows, Tensor, Tensor, Tensor, int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of several matrices of one shape, on one device.

    upper, hessian   [E, K, K] float32
    order, diagonal  [E, K]
    added            [E] float32
    outputs          those of the first, which all have
    """

    upper: Tensor
    order: Tensor
    diagonal: Tensor
    hessian: Tensor
    added: Tensor
    blocks: Blocks
    outputs: Outputs | None = None

    @staticmethod
    def of(factors: Sequence[Factor], blocks: Blocks) -> Factors:
        """Return factors together; they are copied."""
        known = ((x.upper, x.order, x.diagonal, x.hessian) for x in factors)
        upper, order, diagonal, hessian = (torch.stack(each) for each in zip(*known, strict=True))
        added = torch.tensor([x.added for x in factors], device=upper.device)
        return Factors(upper, order, diagonal, hessian, added, blocks, factors[0].outputs)


def encode_together(
    scheme: Scheme, w_ENK: Tensor, prepared: Sequence[Prepared], factors: Factors
) -> Iterator[dict[str, Tensor]]:
    """Yield the parts of each matrix, in the memory of the CPU.

    prepared  what `scheme.prepare` found out of each

    QuantError if a weight holds a NaN or an infinity.
    """
    matrices, *shape = w_ENK.shape
    stored = {part.key: part for part in scheme.parts("", tuple(shape))}
    groups = prod(stored[SCALE].info.shape)
    whole = None
    if prepared[0] is not None:
        each = torch.cat([one.reshape(1) for one in prepared])
        whole = each.to(w_ENK.device).repeat_interleave(groups)
    parts = scheme.encode(w_ENK.flatten(0, 1), whole, factor=factors)
    found = {key: data.cpu().chunk(matrices) for key, data in parts.items() if key != GLOBAL}
    for e in range(matrices):
        own = {key: each[e] for key, each in found.items()}
        yield own if whole is None else own | {GLOBAL: prepared[e]}


def weights_of(importance_EK: Tensor) -> Tensor:
    """Return what an error in each column weighs, float32 [E, K], as `calibrate.weights_of`."""
    values = importance_EK.float()
    some = values >= NOTHING
    mean = torch.where(some, values, 0).double().sum(1) / some.sum(1)
    least = (mean * FLOOR).float().clamp(min=NOTHING)[:, None]
    return torch.where(some.any(1)[:, None], torch.where(some, values, least), 1.0)


def sweep(w_NK: Tensor, weights_EK: Tensor, candidates: Iterable[Grid], bits: int) -> Grid:
    """Return of each group the candidate with the least weighted error, the first if several.

    w_NK  rows of all matrices
    """
    w = w_NK.float()
    return best_of(candidates, lambda grid: _weigh_errors(w, weights_EK, grid, bits))


def _weigh_errors(w_NK: Tensor, weights_EK: Tensor, grid: Grid, bits: int) -> Tensor:
    """Return the weighted sum of squared errors of the nearest codes, float32 [B]."""
    matrices, columns = weights_EK.shape
    group = w_NK.numel() // len(grid.step)
    w_ENGg = w_NK.view(matrices, -1, columns // group, group)
    step, zero = (x.view(w_ENGg.shape[:3])[..., None] for x in (grid.step, grid.zero))
    missed = nearest(w_ENGg / step, zero, bits).mul_(step).sub_(w_ENGg)
    weight = weights_EK.view(matrices, 1, columns // group, group)
    return missed.square_().mul_(weight).sum(-1).view(-1)


def best_steps(w_NK: Tensor, weights_EK: Tensor, steps_CB: Tensor, bits: int) -> Tensor:
    """Return of each group the step with the least weighted error, [B], the first if several."""
    zero = torch.zeros_like(steps_CB[0])
    return sweep(w_NK, weights_EK, (Grid(d, zero, d) for d in steps_CB), bits).step


def choose_units(
    w_NK: Tensor,
    grid: Grid,
    factors: Factors,
    bits: int,
    *,
    tried: Tensor | None = None,
    passes: int = PASSES,
) -> tuple[Tensor, Tensor]:
    """Return units, float32 [E N, K], and the steps that they belong to, [B].

    w_NK    rows of all matrices
    tried   steps [C, B] among which each is searched for again; None: whole numbers' alone change
    passes  0: GPTQ alone, under the steps that are given
    """
    matrices, columns = factors.order.shape
    w = w_NK.to(torch.float32, copy=True).reshape(matrices, -1, columns)
    d, zero = (x.clone().view(*w.shape[:2], -1) for x in (grid.step, grid.zero))
    among = None if tried is None else tried.view(-1, *d.shape)
    rows = Rows(w, d, zero, torch.empty_like(w), bits, among)
    if factors.outputs is None:
        choose(rows, ManyMatrices(factors), passes)
    else:
        _choose_in_slices(rows, factors, factors.outputs, passes)
    return rows.units.view(w_NK.shape), rows.d.view(-1)


def _choose_in_slices(rows: Rows, factors: Factors, outputs: Outputs, passes: int) -> None:
    for part, share in outputs.slices():
        some = rows.part(part)
        choose(some, ManyMatrices(factors), passes)
        rows.units[:, part], rows.d[:, part] = some.units, some.d
        rows.w[:, part.stop :] -= share @ some.left


@dataclass(frozen=True, slots=True)
class ManyMatrices:
    """Walks rows of several matrices, where they are."""

    factors: Factors

    def feed_back(self, rows: Rows) -> None:
        """Fill in the units that GPTQ chooses."""
        order, upper = self.factors.order, self.factors.upper
        group_EK = (order // rows.group).int()
        w = rows.w.gather(2, order[:, None].expand(rows.w.shape))
        ordered = replace(rows, w=w, units=torch.empty_like(w))
        for first, missed in rows.blocks():
            stop = first + missed.shape[-1]
            self.factors.blocks.walk(ordered, upper, group_EK, first, missed)
            w[..., stop:].baddbmm_(missed, upper[:, first:stop, stop:], alpha=-1)
        back = order.argsort(1)[:, None].expand(w.shape)
        torch.gather(ordered.units, 2, back, out=rows.units)

    def slope(self, rows: Rows) -> Tensor:
        """Return (w - q) H of the damped Hessians, float32 [E, N, K]."""
        missed = rows.left
        return (missed * self.factors.added[:, None, None]).baddbmm_(missed, self.factors.hessian)

    def settle(self, rows: Rows, slope: Tensor) -> None:
        """Choose each unit again, and steps of whole numbers in groups of up to a block."""
        self._each_block(self.factors.blocks.settle, rows, slope)

    def pair(self, rows: Rows, slope: Tensor) -> None:
        """Choose units of a block two by two where that is better."""
        self._each_block(self.factors.blocks.pair, rows, slope)

    def _each_block(
        self,
        improve: Callable[[Rows, Tensor, Tensor, Tensor, int, Tensor], None],
        rows: Rows,
        slope: Tensor,
    ) -> None:
        hessian, added = self.factors.hessian, self.factors.added
        for first, moved in rows.blocks():
            stop = first + moved.shape[-1]
            improve(rows, slope, hessian, added, first, moved)
            slope.baddbmm_(moved, hessian[:, first:stop], alpha=-1)
            slope[..., first:stop] -= moved * added[:, None, None]

    def better_steps(self, rows: Rows, slope: Tensor) -> Tensor:
        """Return the best of `rows.tried` for what each weight should be given all others, [B]."""
        assert rows.tried is not None, "steps are searched for among some"
        known = weights_of(self.factors.diagonal)
        wanted = (rows.values + slope / known[:, None]).flatten(0, 1)
        return best_steps(wanted, known, rows.tried.flatten(1), rows.bits)
