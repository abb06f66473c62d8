"""The currency of planning: what a header says about a tensor, without its bytes.

Data types are named as safetensors names them ("BF16", "F8_E4M3", ...), and as ggml names its block
formats ("Q8_0", "Q4_K", ...): there a row is a whole number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Protocol

from formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@cache
def block_of(dtype: str) -> tuple[int, int]:
    """Return the elements and the bytes of one block of a data type. KeyError if none has the name.

    The block formats are the `gguf` package's; every other type has blocks of one element.
    """
    if dtype in DTYPE_BYTES:
        return 1, DTYPE_BYTES[dtype]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]


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
        """Bytes of data, header not counted. FormatError if its rows are not whole blocks."""
        block, size = block_of(self.dtype)
        if block > 1 and (not self.shape or self.shape[-1] % block):
            raise FormatError(
                f"{self.name} has shape {list(self.shape)}, "
                f"expected rows of a multiple of {block} ({self.dtype})"
            )
        return self.numel // block * size


class Source(Protocol):
    """Where tensors are read from."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by its name in the files."""
        ...

    def read(self, name: str) -> Tensor:
        """Return the whole tensor as a view on the file: no byte is read before it is used."""
        ...
