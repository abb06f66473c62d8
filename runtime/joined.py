"""Values as one tensor, joined along their rows, which are read a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from quant.stored import Value

Read = Callable[[Value, int, int], Tensor]


def joined_shape(values: Sequence[Value]) -> tuple[int, ...]:
    """Return the shape of values one below the other."""
    return (sum(value.shape[0] for value in values), *values[0].shape[1:])


def decoded(value: Value, first: int, last: int) -> Tensor:
    """Return rows of a value, as numbers."""
    return value.exact(first, last)


def fill(out: Tensor, values: Sequence[Value], read: Read = decoded) -> None:
    """Copy values one below the other into `out`, and give their pages back.

    read  gives rows of a value: decoded, or what is stored
    """
    start = 0
    for value in values:
        num_rows = value.shape[0]
        for first, last in value.chunks():
            part = read(value, first, last)
            out[start + first : start + last].copy_(part.to(out.device))  # which converts it
        value.release(0, num_rows)
        start += num_rows
