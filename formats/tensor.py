"""The currency of planning: what a header says about a tensor, without its bytes.

Data types are named as safetensors names them ("BF16", "F8_E4M3", ...).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class FormatError(ValueError):
    """The input's bytes, names or sizes are not what they must be."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, data type and shape of one stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data, header not counted."""
        return self.numel * DTYPE_BYTES[self.dtype]


class Source(Protocol):
    """Where tensors are read from."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by its name in the files."""
        ...

    def read(self, name: str) -> Tensor:
        """Return the whole tensor as a view on the file: no byte is read before it is used."""
        ...


class Sink(Protocol):
    """Where tensors are written: all names, sizes and offsets are fixed beforehand."""

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Put `data` at byte `offset` of tensor `name`. May be called from any thread."""
        ...

    def commit(self) -> None:
        """Make the output durable and visible under its final name."""
        ...
