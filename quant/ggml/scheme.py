"""ggml's types as schemes: one stored tensor per weight, its rows whole blocks.

The plain types belong to them too: in a GGUF file F32, F16 and BF16 are chosen like any other, and
a weight is cast, not kept.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from formats.stored import StoredWeight
from formats.tensor import DTYPE_BYTES, TensorInfo
from quant.errors import QuantError
from quant.finite import count_not_finite
from quant.ggml import codec, kinds
from quant.part import Cost, Part, Shape
from quant.usual import Usual

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from quant.measure import Error
    from quant.scheme import Factor, Prepared

BLOCKS = "blocks"
# Relative RMS error from which a weight whose encoder is not known is taken for another one.
SAME_WEIGHT = 0.5
# Bytes that judging takes for an element: both sides in float64, their products; the same of ours.
MEASURED = 104


@dataclass(frozen=True, slots=True)
class Ggml(Usual):
    """One of ggml's types, named as ggml names it ("Q4_K"); recipes write q4_k."""

    type: str
    looked_up: bool = True

    @property
    def name(self) -> str:
        """What recipes call it."""
        return self.type.lower()

    @property
    def label(self) -> str | None:
        """What a file of such weights is called."""
        return None if self.plain else f"GGUF with {self.type}"

    @property
    def plain(self) -> bool:
        """Whether rows are numbers."""
        return self.type in kinds.CASTS

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return the one tensor, of the weight's shape."""
        return (Part(BLOCKS, TensorInfo(name, self.type, tuple(shape))),)

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield the tensors of this type."""
        for name, info in infos.items():
            if info.dtype == self.type:
                yield self.stored(name, info)

    def stored(self, name: str, info: TensorInfo) -> StoredWeight:
        """Return the weight of this name that a tensor of this type holds."""
        dtype = self.type if self.plain else "F32"
        return StoredWeight(name, info.shape, dtype, self, (info,))

    def refuses(self, shape: Shape) -> str | None:
        """Return why rows of this length cannot be whole blocks, or None."""
        if kinds.fallback(self.type, shape[-1]) == self.type:
            return None
        return f"{shape[-1]} columns are not a whole number of blocks of {self.name}"

    def encode(
        self,
        w_NK: Tensor,
        prepared: Prepared = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return the blocks, uint8 [N, bytes of a row], in `out` if given."""
        rows = w_NK.reshape(-1, w_NK.shape[-1]).cpu()
        memory = None if out is None else out.view(rows.shape[0], -1)
        blocks = codec.encode(self.type, rows, importance=importance, out=memory)
        return {BLOCKS: blocks.view(*w_NK.shape[:-1], -1)}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the weight in float32; a plain one as it is."""
        blocks = rows[BLOCKS]
        if blocks.is_floating_point():
            return blocks
        columns = kinds.columns(self.type, blocks.shape[-1])
        values = codec.decode(self.type, blocks.reshape(-1, blocks.shape[-1]), columns)
        return values.view(*blocks.shape[:-1], columns)

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far the blocks are from the weight, and which super-blocks are wrong.

        Of a type without an encoder of ours, a weight is outside if its error is half of itself,
        which no rounding makes it and any wrong order of rows or columns does.
        """
        from quant.sums import measure

        decoded, columns = self.decode(rows).float(), w_NK.shape[-1]
        error = measure(w_NK, decoded)
        if not self.bounded:
            error.outside = error.count if error.relative_rms > SAME_WEIGHT else 0
            return error
        flat = w_NK.reshape(-1, columns), decoded.reshape(-1, columns)
        weighed = (weighed or self.type in kinds.WEIGHTED_ONLY) and importance is None
        unknown = weighed and self.type not in kinds.UNWEIGHTED
        if not unknown and self.type in kinds.BOUNDED:
            error.outside = codec.outside(self.type, *flat, importance=importance)
        searched = unknown or self.type in kinds.SUPER_BLOCKS or self.type in ("IQ4_NL", "IQ4_XS")
        if searched and error.count and isfinite(error.sum_sq_error):
            from quant.ggml.judge import Rows, judge_rows

            stored = Rows(flat[0], rows[BLOCKS].reshape(len(flat[0]), -1), flat[1])
            # what our encoder refuses has no blocks of ours to be beside
            with suppress(QuantError):
                judge_rows(error, self.type, stored, importance, known=not unknown)
        return error

    def measure(self, w_NK: Tensor, rows: Mapping[str, Tensor]) -> Error:
        """Return how far the decoded blocks are from the weight."""
        from quant.sums import measure

        return measure(w_NK, self.decode(rows).float())

    @property
    def bounded(self) -> bool:
        """Whether we have an encoder of this type."""
        return self.type in kinds.WRITABLE

    def judge(self, error: Error) -> list[str]:
        """Return the faults of its super-blocks, and a gain or a bias of the whole."""
        from quant.ggml import judge

        trends = [] if self.plain or not self.bounded else judge.find_trends(error)
        faults = super(Ggml, self).judge(replace(error, faults=judge.whole_faults(error)))
        return [*faults, *trends]

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return values that are not finite: a scale that is NaN spreads over its block."""
        bad = count_not_finite(self.decode(rows))
        return {BLOCKS: ("values that are not finite", bad)} if bad else {}

    def cost(self, *, moved: bool) -> Cost:
        """Return what decoding holds: more where the `gguf` package decodes."""
        if self.type in DTYPE_BYTES:
            size = DTYPE_BYTES[self.type]
            return Cost(size + (size + 4 if moved else 0), 8, 8)
        fast = self.type in kinds.WRITABLE
        return Cost((5 if fast else 40) + (4 if moved else 0), 8, MEASURED)
