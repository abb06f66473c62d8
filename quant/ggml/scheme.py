"""ggml's types as schemes: one stored tensor per weight, its rows whole blocks.

The plain types belong to them too: in a GGUF file F32, F16 and BF16 are chosen like any other, and
a weight is cast, not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.ggml import codec as ggml
from quant.scheme import Stored

SAME_WEIGHT = 0.5

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from quant.measure import Error


@dataclass(frozen=True, slots=True)
class Ggml:
    """One of ggml's types, named as ggml names it ("Q4_K"); recipes write q4_k."""

    type: str

    @property
    def name(self) -> str:
        """What recipes call it."""
        return self.type.lower()

    @property
    def row_multiple(self) -> int:
        """Every row is encoded by itself."""
        return 1

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        """Return the one tensor, of the weight's shape."""
        return (Stored("", self.type, tuple(shape)),)

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        """Return why rows of this length cannot be whole blocks, or None."""
        instead = ggml.fallback(self.type, shape[-1])
        if instead == self.type:
            return None
        return f"{shape[-1]} columns are no whole number of blocks of {self.name}"

    def encode(
        self,
        w_NK: Tensor,
        error: Error | None = None,
        out: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the blocks, uint8 [N, bytes of a row], in `out` if given."""
        rows = w_NK.reshape(-1, w_NK.shape[-1]).cpu()
        room = None if out is None else out.view(rows.shape[0], -1)
        blocks = ggml.encode(self.type, rows, weights=weights, out=room)
        if error is not None:
            error += compare_decoded(self.type, rows, self.decode({"": blocks}), weights)
        return {"": blocks.view(*w_NK.shape[:-1], -1)}

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the weight in float32."""
        blocks = stored[""]
        columns = ggml.columns(self.type, blocks.shape[-1])
        rows = ggml.decode(self.type, blocks.reshape(-1, blocks.shape[-1]), columns)
        return rows.view(*blocks.shape[:-1], columns)

    def compare(self, w: Tensor, stored: Mapping[str, Tensor]) -> Error:
        """Return how far the blocks are from the weight."""
        return compare_decoded(self.type, w, self.decode(stored))


def compare_decoded(
    type_: str, w: Tensor, decoded: Tensor, weights: Tensor | None = None, *, weighed: bool = False
) -> Error:
    """Return how far `decoded`, which was stored in ggml's type, is from the weight.

    weights  the importance of the columns it was encoded with
    weighed  it was encoded with an importance that is not known: then a part of the weight is
             outside if its error is half of itself, which no rounding makes it and any wrong order
             of rows or columns does
    """
    from quant.measure import measure

    error, columns = measure(w, decoded), w.shape[-1]
    rows = w.reshape(-1, columns), decoded.reshape(-1, columns)
    if type_ not in ggml.WRITABLE or (weighed and weights is None and type_ not in ggml.UNWEIGHTED):
        error.outside = error.count if error.relative_rms > SAME_WEIGHT else 0
    else:
        error.outside = ggml.outside(type_, *rows, weights=weights)
    return error
