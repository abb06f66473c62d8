"""Points of IQ2 and IQ3 by GPTQ: what `calibrate` and `passes` do for codes of single columns.

    feed back    of eight columns the points and signs that are best when the columns behind make up
    settle       of each eight again, the best ones given all others, also under levels near theirs

Scale and levels that the type's own encoder took are a start: other levels lose 10 to 15 % less. To
ask the encoder again for what each weight should be, as `passes` does, loses more.

Eights are walked from the one with the largest mean squares down.

Shape letters: N rows, K columns, E eights, b columns of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quant.fourbit import point_loops, walk
from quant.fourbit.point_fields import EIGHT, FIELDS, Fields
from quant.fourbit.points import Points
from quant.fourbit.rows import BLOCK
from quant.ggml.i_grids import levels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from quant.fourbit.hessian import Factor

# How far from the level that there is others are tried, each time that points are settled.
REACH = (2, 1, 1, 0)


@dataclass(frozen=True, slots=True)
class Walk:
    """Walks rows of points of a type.

    order, upper, hessian, added  of the factor, whose order keeps eights together
    ahead   [E, 8, 8], what errors of an eight cost when the columns behind it make up, in the order
    given   [E, 8, 8], what they cost when all others stay
    """

    fields: Fields
    grid: NDArray[np.float32]
    order: NDArray[np.int64]
    upper: NDArray[np.float32]
    hessian: NDArray[np.float32]
    added: np.float32
    ahead: NDArray[np.float32]
    given: NDArray[np.float32]

    @staticmethod
    def of(name: str, factor: Factor) -> Walk:
        """Return it for a type and a factor on the CPU."""
        own = _diagonal_blocks(factor.upper.double())
        given = _diagonal_blocks(factor.hessian) + factor.added * torch.eye(EIGHT)
        tensors = factor.order, factor.upper, factor.hessian
        order, upper, hessian = (x.contiguous().numpy() for x in tensors)
        ahead, given = torch.linalg.inv(own.mT @ own).float(), given.float()
        metrics = (x.contiguous().numpy() for x in (ahead, given))
        grid = np.ascontiguousarray(levels(name).T)
        return Walk(FIELDS[name], grid, order, upper, hessian, np.float32(factor.added), *metrics)

    def feed_back(self, w: NDArray[np.float32], points: Points) -> None:
        """Fill in the points that GPTQ chooses for rows [N, K]."""
        eights = self.order[::EIGHT] // EIGHT
        moved = np.ascontiguousarray(w[:, self.order])
        of_eights = points.point.reshape(len(w), len(eights), -1)
        steps = np.ascontiguousarray(points.steps(self.fields.block)[:, eights])
        signs = np.ascontiguousarray(points.sign[:, eights])
        chosen = np.ascontiguousarray(of_eights[:, eights])
        for first, missed in _blocks(w):
            point_loops.walk_points(
                moved, self.upper, self.ahead, steps, self.grid, self.fields.even, first,
                chosen.reshape(len(w), -1), signs, missed,
            )  # fmt: skip
            walk.subtract(moved, missed, self.upper, first, first + missed.shape[1])
        of_eights[:, eights], points.sign[:, eights] = chosen, signs

    def values(self, points: Points) -> NDArray[np.float32]:
        """Return what points decode to, [N, K]."""
        level = self.grid.T[points.point].reshape(len(points.point), -1)
        bits = np.unpackbits(points.sign, axis=1, bitorder="little")
        steps = np.repeat(points.steps(self.fields.block), EIGHT, 1)
        return np.where(bits == 1, -level, level) * steps

    def slope(self, missed: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (w - q) H of the damped Hessian for w - q, float32 [N, K]."""
        slope = missed * self.added
        for first, moved in _blocks(missed):
            moved[:] = -missed[:, first : first + BLOCK]
            walk.subtract(slope, moved, self.hessian, first, 0)
        return slope

    def settle(self, points: Points, slope: NDArray[np.float32], reach: int) -> None:
        """Choose points again, and levels up to `reach` from theirs; the slope follows."""
        shifts = np.array(sorted(range(-reach, reach + 1), key=abs), np.int32)
        for first, moved in _blocks(slope):
            own = slice(first, first + moved.shape[1])
            pull = np.ascontiguousarray(slope[:, own])
            point_loops.settle_points(
                pull, self.hessian, self.added, self.given, points.base, points.level, shifts,
                self.grid, self.fields.even, first, points.point, points.sign, moved,
            )  # fmt: skip
            walk.subtract(slope, moved, self.hessian, first, 0)
            slope[:, own] -= moved * self.added


def choose_points(walker: Walk, w: NDArray[np.float32], points: Points, passes: int) -> None:
    """Fill in the points of rows [N, K], and their levels if there are passes."""
    walker.feed_back(w, points)
    if not passes:
        return
    slope = walker.slope(w - walker.values(points))
    for reach in REACH[:passes]:
        walker.settle(points, slope, reach)


def _blocks(w: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the first column of each block, and memory for what its columns move, [N, b]."""
    for first in range(0, w.shape[1], BLOCK):
        yield first, np.empty((len(w), min(BLOCK, w.shape[1] - first)), np.float32)


def _diagonal_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Return the blocks of eight on the diagonal, [E, 8, 8]."""
    count = len(matrix) // EIGHT
    return matrix.view(count, EIGHT, count, EIGHT).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
