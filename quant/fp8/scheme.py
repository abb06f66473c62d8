"""FP8 as schemes: E4M3 codes with a scale for each block, row or tensor.

    fp8-block    one scale per 128x128 block, named x.weight_scale_inv in the official files
    fp8-channel  one scale per row, named x.weight_scale
    fp8-tensor   one scale for all, read only

`form` has their names and shapes; here is what their values are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from quant.fp8.form import BLOCK, CODES, SCALE, Fp8Form
from quant.fp8.scales import CODE_TYPE, OFFICIAL, explain
from quant.part import Cost

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch import Tensor

    from formats.stored import Problem
    from formats.tensor import TensorInfo
    from quant.measure import Error
    from quant.scheme import Factor, Prepared, StoredRanges

# Relative RMS error from which a weight in codes without bounds is taken for another one.
SAME_WEIGHT = 0.5
DEFECTS = {SCALE: "scales that are not finite and positive", CODES: "codes that are NaN"}


@dataclass(frozen=True, slots=True)
class Fp8(Fp8Form):
    """E4M3 codes and a grid of scales: how rows are encoded, decoded and compared."""

    def explain(self, name: str, infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Say why codes have no scale, or a scale no codes."""
        return explain(name, infos, FORMS)

    def encode(
        self,
        w_NK: Tensor,
        prepared: Prepared = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return the codes, in `out` if given, and the scale."""
        assert importance is None, "FP8 rounds to the nearest code, whatever the column"
        assert self.block_rows is not None, "one scale for a tensor is read, not written"
        assert self.code_type == CODE_TYPE, "E5M2 is read, not written"
        block = self.block_rows, self.block_cols or w_NK.shape[1]
        codes, scale = _arithmetic(w_NK).quantize(w_NK, block, self.scale, out)
        return {CODES: codes, SCALE: scale}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return codes * scale in float32."""
        codes = rows[CODES]
        scale = self.scale_of_rows(rows[SCALE], len(codes))
        decoded: Tensor = _arithmetic(codes).dequantize(codes, scale, self._row_block(codes))
        return decoded

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far codes * scale are from the weight, and which blocks are wrong."""
        codes, error = rows[CODES], self.measure(w_NK, rows)
        if not self.bounded:
            error.outside = error.count if error.relative_rms > SAME_WEIGHT else 0
        elif error.count and isfinite(error.sum_sq_error):
            import torch

            from quant.fp8.judge import blocks_of, find_faults

            scale = self.scale_of_rows(rows[SCALE].cpu(), len(codes))
            narrow = rows[SCALE].dtype == torch.float16
            block = self.block_rows, self.block_cols
            blocks = blocks_of(w_NK.cpu(), codes.cpu(), scale, block, narrow=narrow)
            error.faults, error.blocks = find_faults(blocks), blocks.scale.numel()
        return error

    def measure(self, w_NK: Tensor, rows: Mapping[str, Tensor]) -> Error:
        """Return how far codes * scale are from the weight."""
        codes = rows[CODES]
        scale = self.scale_of_rows(rows[SCALE], len(codes))
        if not self.bounded:
            from quant.measure import measure

            return measure(w_NK, self.decode(rows))
        error: Error = _arithmetic(w_NK).compare(w_NK, codes, scale, self._row_block(codes))
        return error

    @property
    def bounded(self) -> bool:
        """Whether we have an encoder of these codes."""
        return self.code_type == CODE_TYPE

    def judge(self, error: Error) -> list[str]:
        """Return the faults of its blocks; one scale for all may have been fitted to all."""
        from quant.fp8.judge import SCALE as OTHER_SCALE

        if error.blocks:
            # Nearest codes under a good scale; a search may still have cut weights off.
            error = replace(error, outside=0)
        alone = self.block_rows is None and set(error.faults) == {OTHER_SCALE}
        if alone and abs(error.sum_dot - error.sum_sq_q) <= error.sum_sq_q * 2.0**-8:
            return []
        return super(Fp8, self).judge(error)

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return scales that are not finite and positive, and codes that are NaN."""
        from quant.finite import count_not_finite
        from quant.fp8.defects import count_nan_codes, count_wrong_scales

        codes, e4m3 = rows[CODES], self.code_type == CODE_TYPE
        nan = count_nan_codes(codes) if e4m3 else count_not_finite(codes.float())
        counts = {SCALE: count_wrong_scales(rows[SCALE]), CODES: nan}
        return {key: (DEFECTS[key], count) for key, count in counts.items() if count}

    def check_scales(self, shared: Mapping[str, Tensor], ranges: StoredRanges) -> None:
        """Refuse scales not above 0, but those of zeros. QuantError."""
        from quant.fp8.defects import refuse_lost_codes

        if not bool((shared[SCALE].float() <= 0).any()):
            return
        for start, rows in ranges:
            codes = rows[CODES]
            scale, width = self.scale_of_rows(rows[SCALE], len(codes)), self._row_block(codes)[1]
            refuse_lost_codes(codes, scale, width, start)

    def cost(self, *, moved: bool) -> Cost:
        """Return what is held: codes, also widened; their scales; the product; BF16."""
        return Cost(1 + 3 * 4 + 2 + (4 if moved else 0), 2, 2, measure=2)

    def scale_of_rows(self, scale: Tensor, count: int) -> Tensor:
        """Return the scales of `count` rows, float32 [n, G], also where all share one."""
        scale = scale.float()
        if self.block_rows is None:
            return scale.reshape(1, 1).expand(count, 1)
        return scale.reshape(count, -1)

    def _row_block(self, codes: Tensor) -> tuple[int, int]:
        """Return the block of scales that are given for every row."""
        return 1, self.block_cols or codes.shape[-1]


def _arithmetic(w: Tensor) -> ModuleType:
    """Return the compiled loops for a CPU's tensor, the definition in torch for all else."""
    import torch

    from quant.fp8 import cpu, reference

    return cpu if w.device.type == "cpu" and w.dtype != torch.float8_e5m2 else reference


BLOCKS = Fp8(
    "fp8-block",
    block_rows=BLOCK,
    block_cols=BLOCK,
    row_multiple=BLOCK,
    divisor=BLOCK,
    needs="128x128 blocks",
    strategy={"strategy": "block", "block_structure": [BLOCK, BLOCK]},
    inputs={"strategy": "group", "group_size": BLOCK},
    scale_suffix=OFFICIAL,
    spellings=(2, 4),
)
# vLLM's CUTLASS kernels read rows and columns in sixteens.
CHANNELS = Fp8(
    "fp8-channel",
    block_rows=1,
    block_cols=None,
    divisor=16,
    needs="FP8 kernels",
    strategy={"strategy": "channel"},
    inputs={"strategy": "token"},
    spellings=(2, 1),
)
TENSOR = replace(
    CHANNELS,
    name="fp8-tensor",
    block_rows=None,
    strategy={"strategy": "tensor"},
    inputs={},
    spellings=(1, 0, 2),
)
FORMS = (BLOCKS, CHANNELS, TENSOR)
