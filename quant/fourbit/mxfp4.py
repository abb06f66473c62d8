"""MXFP4: E2M1 codes in groups of 32, whose scales are powers of two.

    step = 2^(weight_scale - 127)        a group of zeros has the scale 0

The exponent is two below that of the largest weight, and one below it from a mantissa of 1.75 on,
which would be rounded beyond 6.

Source: compressed-tensors at 0.20, `round_to_power_2`. Trap: ggml's MXFP4 takes the exponent two
below in every case, and sends ties down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.fourbit.fp4 import Fp4
from quant.fourbit.parts import SCALE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from quant.fourbit.calibrate import Grid

BIAS = 127
NAN = 0xFF


@dataclass(frozen=True, slots=True)
class Mxfp4(Fp4):
    """Groups of 32 whose scales are powers of two."""

    def scales(self, amax_B: Tensor, _prepared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return exponents and steps: two below the largest weight's, one from 1.75 on."""
        import torch

        mantissa, exponent = torch.frexp(amax_B)  # of [0.5, 1)
        exponent = exponent - 3 + (mantissa >= 1.75 / 2).int()
        stored = torch.where(amax_B > 0, (exponent + BIAS).clamp(0, 2 * BIAS), 0).byte()
        return stored, _power(stored)

    def candidates(self, scale_B: Tensor, _prepared: Tensor | None) -> Iterator[Grid]:
        """Yield this exponent, the one below and the one above."""
        import torch

        from quant.fourbit.calibrate import Grid

        for moved in (0, -1, 1):
            stored = torch.where(scale_B > 0, (scale_B.int() + moved).clamp(1, 2 * BIAS), 0).byte()
            step = _power(stored)
            yield Grid(step, torch.zeros_like(step), stored)

    def stored(self, step_B: Tensor, _prepared: Tensor | None) -> Tensor:
        """Return the exponents of steps."""
        import torch

        return (step_B.view(torch.int32) >> 23).byte()

    def steps(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return 2^(scale - 127)."""
        return _power(rows[SCALE])

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return scales that are NaN."""
        bad = int((rows[SCALE] == NAN).sum())
        return {SCALE: ("scales that are NaN", bad)} if bad else {}


def _power(stored: Tensor) -> Tensor:
    """Return 2^(x - 127) of bytes, float32; NaN of 255."""
    import torch

    bits = torch.where(stored == 0, 1 << 22, stored.int() << 23)
    return torch.where(stored == NAN, torch.nan, bits.view(torch.float32))


MXFP4 = Mxfp4(
    "mxfp4a16", 32, "U8", "mxfp4-pack-quantized",
    (("strategy", "group"), ("scale_dtype", "torch.uint8")),
)  # fmt: skip
