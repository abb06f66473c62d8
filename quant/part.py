"""One stored tensor of a weight, and the memory that reading and writing a weight takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from formats.tensor import TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a weight.

    key         the scheme's word for it: codes, scale, global_scale
    rows        how many rows of the weight share one of its rows; None: all share the whole of it;
                of the first part only where it is packed
    stacked     of a stack of experts it has the leading axis too
    constant    what it holds, where that follows from the shape: it is neither encoded nor decoded
    unpack      makes a row for each row of the weight of one that holds several, packed
    fused       it must be the same in all weights that engines fuse into one matrix
    transposed  columns of the weight come first in the file
    measured    it is found by running the model, not by encoding the weight
    """

    key: str
    info: TensorInfo
    rows: int | None = 1
    stacked: bool = True
    constant: tuple[int, ...] | None = None
    unpack: Callable[[Tensor], Tensor] | None = None
    fused: bool = False
    transposed: bool = False
    measured: bool = False

    @property
    def packed(self) -> int:
        """How many rows of the weight one of its own holds, where it is the first part."""
        return (self.rows or 1) if self.unpack is not None else 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes held for each element of a weight.

    read     mapped, decoded, and on the way there
    write    while encoding, beside what was read
    compare  while comparing, beside both sides as they were read
    measure  while measuring: both sides in float32
    """

    read: int
    write: int
    compare: int
    measure: int = 8
