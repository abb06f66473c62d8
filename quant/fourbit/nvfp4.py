"""NVFP4: E2M1 codes in groups of 16, E4M3 scales, and one scale over those of a fused matrix.

    step = weight_scale / weight_global_scale        weight_global_scale = 448 * 6 / largest weight

Trap: this global scale divides, ModelOpt's (`weight_scale_2`) multiplies. Engines run
fused matrices (q, k, v; gate, up of each expert; qkv, z) with one global scale, whichever member's
that is, so they share it.

Source: compressed-tensors at 0.20, `generate_gparam`, `calculate_qparams`; Marlin at vLLM 0.33,
which takes block scales below 2^-6 for 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.tensor import TensorInfo
from quant.fourbit.fp4 import E2M1_MAX, Fp4
from quant.fourbit.parts import GLOBAL, SCALE
from quant.scheme import Part, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from quant.fourbit.calibrate import Grid
    from quant.fourbit.hessian import Factor

E4M3_MAX = 448.0
# E4M3's smallest normal number: Marlin flushes what is below.
LEAST_SCALE = 2.0**-6
# The scale of a group of zeros, which compressed-tensors writes.
ZERO_SCALE = 0.125
# Bytes of E4M3: those of 2^-6 and of 448, and how far from the usual scale one is searched for.
# Five up is 1.5 times, where the largest weight becomes 4 instead of 6.
LEAST_CODE, MOST_CODE = 0x08, 0x7E
DOWN, UP = 4, 6


@dataclass(frozen=True, slots=True)
class Nvfp4(Fp4):
    """Groups of 16 whose scales are E4M3 numbers, over a scale of the whole fused matrix."""

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return codes, scales, and the one scale over them."""
        whole = TensorInfo(name + GLOBAL, "F32", (1,))
        return *super(Nvfp4, self).parts(name, shape), Part(
            GLOBAL, whole, rows=None, stacked=False, fused=True
        )

    def prepare(self, values: Iterator[Tensor]) -> Tensor:
        """Return the global scale of a fused matrix, float32 [1]: 448 * 6 over its largest weight.

        QuantError if a weight is not finite.
        """
        import torch

        from quant.fourbit import cpu

        largest = torch.zeros(1)
        for rows in values:
            low, high = cpu.extremes(rows, rows.shape[-1])
            largest = torch.stack([largest[0], high.max(), -low.min()]).max().reshape(1)
        return 1 / largest * (E4M3_MAX * E2M1_MAX) if largest > 0 else torch.ones(1)

    def scales(self, amax_B: Tensor, prepared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return E4M3 scales and steps; none but those of zeros is below 2^-6 without need."""
        import torch

        assert prepared is not None, "the scale of the matrix comes first"
        wanted = (prepared * (amax_B / E2M1_MAX)).clamp(max=E4M3_MAX)
        scale = torch.where(amax_B > 0, wanted.clamp(min=LEAST_SCALE), ZERO_SCALE)
        codes = scale.to(torch.float8_e4m3fn)
        return codes, codes.float() / prepared

    def candidates(self, scale_B: Tensor, prepared: Tensor | None) -> Iterator[Grid]:
        """Yield the scales whose codes are near, this one first."""
        import torch

        from quant.fourbit.calibrate import Grid

        assert prepared is not None, "the scale of the matrix comes first"
        first, most = LEAST_CODE, MOST_CODE
        for moved in sorted(range(-DOWN, UP + 1), key=abs):
            code = (scale_B.view(torch.uint8).int() + moved).clamp(first, most).byte()
            code = torch.where(scale_B.float() == ZERO_SCALE, scale_B.view(torch.uint8), code)
            scale = code.view(torch.float8_e4m3fn)
            step = scale.float() / prepared
            yield Grid(step, torch.zeros_like(step), scale)

    def steps(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return scale / global scale."""
        return rows[SCALE].float() / rows[GLOBAL].float()

    def encode(
        self,
        w_NK: Tensor,
        prepared: Tensor | None = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return codes and scales, and the global scale as it is."""
        assert prepared is not None, "the scale of the matrix comes first"
        rows = super(Nvfp4, self).encode(w_NK, prepared, importance, out, factor)
        return rows | {GLOBAL: prepared}

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return scales that are NaN, negative, or too small for Marlin; a wrong global one."""
        scale, whole = rows[SCALE].float(), rows[GLOBAL].float()
        bad = int((~(scale >= LEAST_SCALE)).sum())
        wrong = int((~(whole.isfinite() & (whole > 0))).sum())
        counts = {SCALE: ("scales that are not numbers of 2^-6 or more", bad)}
        counts[GLOBAL] = ("global scales that are not finite and positive", wrong)
        return {key: defect for key, defect in counts.items() if defect[1]}


NVFP4 = Nvfp4(
    "nvfp4a16", 16, "F8_E4M3", "nvfp4-pack-quantized",
    (("strategy", "tensor_group"), ("scale_dtype", "torch.float8_e4m3fn")),
)  # fmt: skip
