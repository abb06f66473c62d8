"""Schemes: the stored forms of one weight, and the table of their names.

A scheme says before a byte is read what it will write (`stored`) and which shapes no loader takes
(`refuses`); then it encodes, decodes and compares. Importing this module imports no torch.

    fp8-block    one scale per 128x128 block, named x.weight_scale_inv in the official files
    fp8-channel  one scale per row, named x.weight_scale

On disk both scales multiply the codes, whatever the name says.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from quant.errors import QuantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

    from torch import Tensor

    from quant.measure import Error

KEEP = "keep"
FP8_SCHEMES = frozenset({"fp8-block", "fp8-channel"})
SCALE_DTYPES = {"pow2": "BF16", "float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor that a scheme writes: what follows the weight's name, data type and shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]


class Scheme(Protocol):
    """How one weight is stored."""

    @property
    def name(self) -> str:
        """What recipes call it."""
        ...

    @property
    def row_multiple(self) -> int:
        """Rows may be encoded in ranges that start at a multiple of this."""
        ...

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        """Return what is written for a weight [N, K] or [E, N, K]: the codes first, suffix ""."""
        ...

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        """Return why loaders cannot take this shape, or None."""
        ...

    def encode(
        self,
        w_NK: Tensor,
        error: Error | None = None,
        out: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the stored tensors by suffix.

        w_NK     [N, K] bfloat16, float16 or float32, contiguous or not
        error    if given, what was lost is added to it, at three times the time
        out      if given, where the codes go: memory used before is faster than fresh memory
        weights  importance of each column, float32 [K], for the types that search

        Raises QuantError if the weight holds a NaN or an infinity.
        """
        ...

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the weight, [N, K] or [E, N, K] float32."""
        ...

    def compare(self, w: Tensor, stored: Mapping[str, Tensor]) -> Error:
        """Return how far the stored tensors are from a weight [N, K] or [E, N, K]."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8:
    """E4M3 codes and a grid of scales, one for `block_rows` x `block_cols` (None: whole rows).

    divisor  what loaders need rows and columns to be a multiple of
    needs    who needs that, as the subject of a sentence
    scale    pow2, float32 or bfloat16: see `quant.fp8.reference`
    """

    name: str
    block_rows: int
    block_cols: int | None
    divisor: int
    needs: str
    scale: str
    scale_suffix: str

    def __post_init__(self) -> None:
        if self.scale not in SCALE_DTYPES:
            raise _unknown("scale", self.scale, SCALE_DTYPES)

    @property
    def row_multiple(self) -> int:
        """Rows may be encoded in ranges that start at a multiple of this."""
        return self.block_rows

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        """Return the codes' and the scale's suffix, data type and shape."""
        *experts, num_rows, num_cols = shape
        rows, cols = self._block(num_cols)
        grid = (*experts, -(-num_rows // rows), -(-num_cols // cols))
        scale = Stored(self.scale_suffix, SCALE_DTYPES[self.scale], grid)
        return Stored("", "F8_E4M3", tuple(shape)), scale

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        """Return why loaders cannot take this shape, or None."""
        if len(shape) not in {2, 3}:
            return f"FP8 needs a matrix or a stack of them, its shape is {list(shape)}"
        odd = [
            f"{size} {what}"
            for what, size in zip(("rows", "columns"), shape[-2:], strict=True)
            if size % self.divisor
        ]
        if not odd:
            return None
        need = f"{self.needs} need rows and columns divisible by {self.divisor}"
        return f"{need}, it has {' and '.join(odd)}"

    def encode(
        self,
        w_NK: Tensor,
        error: Error | None = None,
        out: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the codes, in `out` if given, and the scale; add what was lost to `error`."""
        assert weights is None, "FP8 rounds to the nearest code, whatever the column"
        block = self._block(w_NK.shape[1])
        codes, scale = _arithmetic(w_NK).quantize(w_NK, block, self.scale, out)
        if error is not None:
            error += _arithmetic(w_NK).compare(w_NK, codes, scale, block)
        return {"": codes, self.scale_suffix: scale}

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return codes * scale in float32."""
        codes, scale = stored[""], stored[self.scale_suffix]
        decoded: Tensor = _arithmetic(codes).dequantize(codes, scale, self._block(codes.shape[-1]))
        return decoded

    def compare(self, w: Tensor, stored: Mapping[str, Tensor]) -> Error:
        """Return how far codes * scale are from the weight."""
        codes, scale = stored[""], stored[self.scale_suffix]
        error: Error = _arithmetic(w).compare(w, codes, scale, self._block(w.shape[-1]))
        return error

    def _block(self, num_cols: int) -> tuple[int, int]:
        return self.block_rows, self.block_cols or num_cols


def fp8_block(scale: str = "pow2", scale_suffix: str = "_scale_inv") -> Fp8:
    """Return 128x128 blocks; `_scale` is the suffix inside a compressed-tensors artifact."""
    return Fp8("fp8-block", 128, 128, 128, "128x128 blocks", scale, scale_suffix)


def fp8_channel(scale: str = "pow2", _block_suffix: str = "") -> Fp8:
    """Return one scale per row; vLLM's CUTLASS kernels read rows and columns in sixteens."""
    return Fp8("fp8-channel", 1, None, 16, "FP8 kernels", scale, "_scale")


SCHEMES: dict[str, Callable[[str, str], Scheme]] = {
    "fp8-block": fp8_block,
    "fp8-channel": fp8_channel,
}


def get_scheme(name: str, scale: str = "pow2", scale_suffix: str = "_scale_inv") -> Scheme:
    """Return the scheme of that name; `scale_suffix` is for blocks, channels have `_scale`.

    Raises QuantError for a name or a scale that is not known.
    """
    if name not in SCHEMES:
        raise _unknown("scheme", name, [*SCHEMES, KEEP])
    return SCHEMES[name](scale, scale_suffix)


def _unknown(what: str, got: str, known: Iterable[str]) -> QuantError:
    """Return the error for a name that is not known, with the nearest ones that are."""
    nearest = get_close_matches(got, known) or list(known)
    return QuantError(f"{what} {got!r} is not known,\n  expected {' or '.join(nearest)}")


def _arithmetic(w: Tensor) -> ModuleType:
    """Return the compiled loops for a CPU's tensor, the definition in torch for a GPU's."""
    from quant.fp8 import cpu as fp8_cpu
    from quant.fp8 import reference as fp8

    return fp8_cpu if w.device.type == "cpu" else fp8
