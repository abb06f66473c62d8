"""llama.cpp's importance matrix: what an error in each column of a weight costs.

    importance_k = in_sum2_k / count      the mean square of input k, over the tokens that came by

A file holds for each tensor the sums of E experts, one row for all else, and as many counts, or one
count for all. Who reads the file hands both over as arrays, by the name of the tensor.

An importance of 0 says that the text did not move a column, not that its weights may go: an encoder
that weighs all of a block by 0 stores zeros, and so does llama-quantize. Hence

    some columns are 0      they weigh FLOOR of the mean of the others
    all of a row are 0      nothing is known of it: it is encoded as without an imatrix
    the count is 0          ones, as in llama-quantize, which weigh nothing

and with every importance above NOTHING the bytes are those of llama-quantize.

Source: llama.cpp's tools/quantize/quantize.cpp at b11434. Differently from there, a size that does
not fit is always refused, for the embedding too: whoever quantises with half an imatrix should
know.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from quant.errors import QuantError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import Tensor

# Measured on Q2_K to Q6_K, IQ4_XS and Q4_0 with an eighth to all but 8 of 256 columns at 0: under
# 2^-7 the error of those is 0.9 to 1.3 times that without an imatrix (0: up to 60 times), and that
# of the others grows by at most 4%. Under 2^-1 it grows by up to 36%.
FLOOR = 2.0**-7
# Below this the sums of squares that a search compares leave float32.
NOTHING = 2.0**-100


@dataclass(frozen=True, slots=True)
class Columns:
    """The importance of the columns of one tensor.

    values     float32 [E, K], what to weigh with
    blank      rows of which nothing is known: they are to be encoded without
    uncounted  rows whose count is 0
    floored    how many columns of the other rows have the floor
    """

    values: Tensor
    blank: tuple[int, ...] = ()
    uncounted: tuple[int, ...] = ()
    floored: int = 0


def importances(
    entries: Mapping[str, tuple[Tensor, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Columns]:
    """Return by the name of each tensor the importance of its columns.

    entries  (in_sum2, counts) by the name of the tensor, [E, K] and [E] or [1], in any shape
    shapes   of the tensors, [N, K] or [E, N, K]; those without an entry are left out

    Raises QuantError for an entry of another size, or one that is no mean of squares.
    """
    return {
        name: importance(name, *entries[name], shape)
        for name, shape in shapes.items()
        if name in entries
    }


def importance(name: str, in_sum2: Tensor, counts: Tensor, shape: tuple[int, ...]) -> Columns:
    """Return the importance of the columns of one tensor of this shape."""
    import torch

    expected = (shape[0] if len(shape) > 2 else 1, shape[-1])
    if in_sum2.numel() != prod(expected):
        raise _wrong(name, "in_sum2 has shape", list(in_sum2.shape), list(expected))
    if counts.numel() not in {1, expected[0]}:
        raise _wrong(name, "counts has shape", list(counts.shape), [expected[0]])
    sums = _squares(name, "in_sum2", in_sum2.float().reshape(expected))
    # whole tokens, as llama-quantize takes them
    tokens = (_squares(name, "counts", counts.float().reshape(-1, 1)) + 0.5).floor()
    tokens = tokens.expand(expected[0], 1)
    values = torch.where(tokens > 0, sums / tokens, torch.ones_like(sums))
    return _floored(values, _rows(tokens[:, 0] == 0))


def _floored(values: Tensor, uncounted: tuple[int, ...]) -> Columns:
    """Return the importance with the floor under columns that have none."""
    import torch

    some = values >= NOTHING
    count = some.sum(1, keepdim=True)
    mean = (values.double() * some).sum(1, keepdim=True) / count.clamp(min=1)
    raised = torch.where(some, values, (mean * FLOOR).float().clamp(min=NOTHING))
    partly = (count > 0) & ~some
    return Columns(raised, _rows(count[:, 0] == 0), uncounted, int(partly.sum()))


def _rows(chosen: Tensor) -> tuple[int, ...]:
    return tuple(chosen.nonzero()[:, 0].tolist())


def _squares(name: str, what: str, values: Tensor) -> Tensor:
    """Return the values. QuantError if they cannot be sums of squares, or counts."""
    bad = ~(values.isfinite() & (values >= 0))
    if not bad.any():
        return values
    row, column = bad.nonzero()[0].tolist()
    place = f"column {column}" + (f" of expert {row}" if len(values) > 1 else "")
    got = f"{int(bad.sum())} negative, infinite or NaN values, the first at {place}"
    raise _wrong(name, f"{what} has", got, "finite numbers that are not negative")


def unused(entries: Mapping[str, tuple[Tensor, Tensor]], tensors: Container[str]) -> list[str]:
    """Return the names of entries that no tensor of the file has."""
    return [name for name in entries if name not in tensors]


def _wrong(name: str, what: str, got: object, expected: object) -> QuantError:
    return QuantError(f"{name}: {what}", str(got), str(expected))
