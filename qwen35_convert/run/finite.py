"""Where a weight that cannot be encoded holds NaN or infinity, if that is why.

Encoders check what they write. Trap: of an infinite logarithm they see the power, which is 0.
"""

from __future__ import annotations

from math import prod

from formats.checkpoint import Checkpoint
from formats.family.arithmetic import NegExp
from formats.family.layout import Atom
from quant.errors import QuantError
from quant.finite import count_not_finite
from quant.opening import open_value
from qwen35_convert.planning.plan import Item


def check_logarithms(source: Checkpoint, item: Item) -> None:
    """Raise QuantError for an item of logarithms that are not finite."""
    problem = describe_not_finite(source, item.atom) if NegExp() in item.ops else None
    if problem:
        raise QuantError(problem)


def describe_not_finite(source: Checkpoint, atom: Atom) -> str | None:
    """Return how many values of an atom are NaN or infinite, and where the first is, or None.

    The place is that in the source, whatever order the values are written in.
    """
    value = open_value(source, atom)
    count, first = 0, ""
    for start, stop in value.chunks(1):
        rows = value.rows(start, stop)
        bad = count_not_finite(rows)
        if bad and not count:
            first = _place(start, (~rows.isfinite()).nonzero()[0].tolist())
        count += bad
        value.release(start, stop)
    if not count:
        return None
    return (
        f"{count} of {prod(value.shape)} weights are NaN or infinite, the first at {first},\n"
        "  expected finite ones"
    )


def _place(start: int, index: list[int]) -> str:
    row, *rest = index
    names = ["row", "column", *("index" for _ in rest[1:])]
    return ", ".join(f"{name} {i}" for name, i in zip(names, [start + row, *rest], strict=False))
