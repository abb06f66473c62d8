"""Groups of columns that do not follow one another: GPTQ by the order of activations.

`g_idx` [K] says the group of each column. Where it counts up, as without it, nothing is moved.

Shape letters: N rows, K columns, G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.errors import QuantError

if TYPE_CHECKING:
    from torch import Tensor


def groups_of(order: Tensor | None, columns: int, count: int) -> Tensor | None:
    """Return the group of each of these columns, int64 [K]; None: they follow one another.

    QuantError if a column's group is none of the `count` that have a step.
    """
    import torch

    if order is None or torch.equal(order.long(), torch.arange(columns) // (columns // count)):
        return None
    outside = ((order < 0) | (order >= count)).nonzero()
    if len(outside):
        column = int(outside[0])
        got = f"column {column} is in group {int(order[column])}"
        raise QuantError(f"g_idx: {got},\n  expected one of the {count} that have a step")
    return order.long()


def spread(x_NG: Tensor, groups_K: Tensor | None, columns: int) -> Tensor:
    """Return for each column what its group has, [N, K]."""
    if groups_K is None:
        return x_NG.repeat_interleave(columns // x_NG.shape[1], 1)
    return x_NG[:, groups_K]
