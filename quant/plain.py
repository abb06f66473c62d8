"""Numbers as they are: the form of whatever is kept, and of every checkpoint to start with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.stored import KEEP, StoredWeight
from formats.tensor import DTYPE_BYTES, TensorInfo
from quant.errors import QuantError
from quant.finite import count_not_finite
from quant.part import Cost, Part, Shape
from quant.usual import Usual

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from quant.measure import Error
    from quant.scheme import Factor, Prepared

PLAIN_TYPES = ("BF16", "F16", "F32")
VALUES = "values"


@dataclass(frozen=True, slots=True)
class Plain(Usual):
    """A weight that is kept in this type, byte for byte if it had it."""

    dtype: str = "BF16"
    name: str = KEEP
    label: None = None
    looked_up: bool = True

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return the one tensor."""
        return (Part(VALUES, TensorInfo(name, self.dtype, tuple(shape))),)

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield every tensor of floats."""
        forms = {dtype: Plain(dtype) for dtype in PLAIN_TYPES}
        for name, info in infos.items():
            if info.dtype in forms:
                yield StoredWeight(name, info.shape, info.dtype, forms[info.dtype], (info,))

    def encode(
        self,
        w_NK: Tensor,
        prepared: Prepared = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return the values in the type of this form, whose range they must not leave."""
        from formats.safetensors.file import torch_dtype

        values = w_NK.to(torch_dtype(self.dtype)).contiguous()
        bad = count_not_finite(values)
        if bad:
            problem = f"{bad} of {values.numel()} weights are NaN or infinite in {self.dtype}"
            raise QuantError(problem)
        return {VALUES: values}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the values as they are stored."""
        return rows[VALUES]

    def measure(self, w_NK: Tensor, rows: Mapping[str, Tensor]) -> Error:
        """Return how far the values are from the weight."""
        from quant.measure import measure

        return measure(w_NK, rows[VALUES])

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far the values are from the weight; equal bits are expected."""
        from quant.measure import measure, same_bits

        if same_bits(rows[VALUES], w_NK):
            return measure(w_NK, w_NK)
        error = measure(w_NK, rows[VALUES])
        error.outside = max(1, int((rows[VALUES] != w_NK).sum()))
        return error

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return values that are NaN or infinite."""
        bad = count_not_finite(rows[VALUES])
        return {VALUES: ("values that are NaN or infinite", bad)} if bad else {}

    def cost(self, *, moved: bool) -> Cost:
        """Return what a cast holds."""
        size = DTYPE_BYTES[self.dtype]
        return Cost(size + (size + 4 if moved else 0), 8, 8)
