"""The order in which codes and steps are chosen, the same on the CPU and on a GPU.

    feed back     units by GPTQ, column by column
    settle        each unit again, the best one given all others
    better steps  now and then before that, of E2M1 and ggml's types: steps by what each weight
                  should be
    pairs         after that, of whole numbers in groups whose steps settle too: two units at once

Whatever settles keeps the slopes (w - q) H up to date, so they are computed only when steps have
changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.rows import Rows

# How often every code is chosen again, and after how many of these times steps are, too.
PASSES = 6
SWEPT_AGAIN = (1, 3)


class Walker(Protocol):
    """Walks rows under the factors of their matrices."""

    def feed_back(self, rows: Rows) -> None:
        """Fill in the units that GPTQ chooses."""

    def slope(self, rows: Rows) -> Tensor:
        """Return (w - q) H of the damped Hessian, float32 like w."""

    def settle(self, rows: Rows, slope: Tensor) -> None:
        """Choose each unit again, and steps if `rows.refit`; the slope follows."""

    def pair(self, rows: Rows, slope: Tensor) -> None:
        """Choose units two by two where that is better; the slope follows."""

    def better_steps(self, rows: Rows, slope: Tensor) -> Tensor:
        """Return the best of `rows.tried` for what each weight should be given all others, [B]."""


def choose(rows: Rows, walker: Walker, passes: int = PASSES) -> None:
    """Fill in units, and the steps that they belong to.

    passes  0: GPTQ alone, under the steps that are given
    """
    walker.feed_back(rows)
    if not passes:
        return
    slope = walker.slope(rows)
    for done in range(passes):
        if done in SWEPT_AGAIN and rows.searched:
            rows.take(walker.better_steps(rows, slope))
            slope = walker.slope(rows)
        walker.settle(rows, slope)
        if rows.refit and done < passes - 1:
            walker.pair(rows, slope)
