"""llama.cpp's importance matrix: what an error in each column of a weight costs.

    importance_k = in_sum2_k / count      the mean square of input k, over the tokens that came by

A file holds for each tensor `NAME.in_sum2` [E, K] and `NAME.counts` [E, 1]: one row for each expert
of a stack, one for all else. Who reads the file hands both over as arrays, by NAME.

Source: llama.cpp's tools/quantize/quantize.cpp at b11434. As there, an expert that no token reached
gets ones, which weigh nothing. Differently from there, a size that does not fit is always refused,
for the embedding too: whoever quantises with half an imatrix should know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.errors import QuantError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import Tensor


def importances(
    entries: Mapping[str, tuple[Tensor, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return by the name of each tensor the importance of its columns, float32 [E, K].

    entries  (in_sum2, counts) by the name of the tensor, [E, K] and [E]
    shapes   of the tensors, [N, K] or [E, N, K]; those without an entry are left out

    Raises QuantError for an entry of another size, or one that is no mean of squares.
    """
    return {
        name: importance(name, *entries[name], shape)
        for name, shape in shapes.items()
        if name in entries
    }


def importance(name: str, in_sum2: Tensor, counts: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the importance of the columns of one tensor of this shape, float32 [E, K]."""
    import torch

    expected = (shape[0] if len(shape) > 2 else 1, shape[-1])
    if tuple(in_sum2.shape) != expected:
        raise _wrong(name, "in_sum2 has shape", list(in_sum2.shape), list(expected))
    if counts.numel() != expected[0]:
        raise _wrong(name, "counts has shape", list(counts.shape), [expected[0]])
    sums, counts = in_sum2.float(), counts.float().reshape(-1, 1)
    for what, values in (("in_sum2", sums), ("counts", counts)):
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise _wrong(name, f"{what} has", "a negative, infinite or NaN value", "squares")
    return torch.where(counts > 0, sums / counts, torch.ones_like(sums))


def unused(entries: Mapping[str, tuple[Tensor, Tensor]], tensors: Container[str]) -> list[str]:
    """Return the names of entries that no tensor of the file has."""
    return [name for name in entries if name not in tensors]


def _wrong(name: str, what: str, got: object, expected: object) -> QuantError:
    return QuantError(f"imatrix: {name}: {what} {got},\n  expected {expected}")
