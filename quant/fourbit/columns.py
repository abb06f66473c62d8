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


def is_usual(w_NK: Tensor, range_NG: Tensor, groups_K: Tensor | None) -> Tensor:
    """Return whether each weight's scale is one that encoders take: bool [N, K].

    range  from the least to the largest number of each group

    It is a quarter to 4 times twice the group's largest weight; searches take 0.4 to 3 times.
    """
    import torch

    columns, count = w_NK.shape[1], range_NG.shape[1]
    place = torch.arange(columns) // (columns // count) if groups_K is None else groups_K
    index = place.to(w_NK.device).expand(len(w_NK), columns)
    largest = torch.zeros_like(range_NG).scatter_reduce(1, index, w_NK.abs().float(), "amax")
    usual = (range_NG >= largest / 2) & (range_NG <= 8 * largest)
    return spread(usual, groups_K, columns)
