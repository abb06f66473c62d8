"""What errors in outputs cost together, and the slices of rows that make up for one another.

    G = R^T R for the linear R that reads the outputs        error of d = w - q:  tr(d H d^T G)

GPTQ moves what a column loses into the columns after it. Rows do likewise, slice by slice: with V
the upper Cholesky factor of the inverse of the damped G, V^T V = G^-1, a slice s that was left
with d is followed by rows

    w_rest -= V_s,rest^T V_ss^-T d_s

which is the best the rest can do if it were free. Within a slice rows are independent.

What counts is the covariance of the gradient of the loss. On trained models, of what is added to
the residual stream, the next layer's R^T R is like it by a cosine of 0.6 off the diagonal, and half
as much again in size: hence the damping.

Shape letters: N rows of a weight, n of a slice, M after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.fourbit.cholesky import upper_of_inverse

if TYPE_CHECKING:
    from torch import Tensor

# Of the mean of the diagonal of G. Fewer slices gain less; more are slower on a GPU.
DAMP, SLICES = 1.0, 16
LEAST_ROWS = 16  # of a slice


@dataclass(frozen=True, slots=True)
class Outputs:
    """What each slice of rows passes on: [M, n] float32, times what it was left with."""

    shares: tuple[Tensor, ...]

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each slice, and what it passes on to those after it."""
        start = 0
        for share in self.shares:
            stop = start + share.shape[1]
            yield slice(start, stop), share
            start = stop

    def on_cpu(self) -> Outputs:
        """Return them in the CPU's memory."""
        return Outputs(tuple(share.cpu() for share in self.shares))


def outputs(gram_NN: Tensor) -> Outputs | None:
    """Return what slices pass on under G; None if G is zero, or holds a NaN or an infinity."""
    import torch

    typical = float(gram_NN.diagonal().mean())
    if not 0 < typical < torch.inf:
        return None
    rows = torch.arange(len(gram_NN), device=gram_NN.device)
    upper = upper_of_inverse(gram_NN, rows, DAMP * typical)
    if upper is None:
        return None
    starts = range(0, len(rows), max(LEAST_ROWS, -(-len(rows) // SLICES)))
    return Outputs(tuple(_share(upper, start, starts.step) for start in starts))


def _share(upper: Tensor, start: int, size: int) -> Tensor:
    """Return V_s,rest^T V_ss^-T, float32 [M, n]."""
    import torch

    stop = start + size
    own, rest = upper[start:stop, start:stop], upper[start:stop, stop:]
    share: Tensor = torch.linalg.solve_triangular(own, rest, upper=True)
    return share.T.float().contiguous()
