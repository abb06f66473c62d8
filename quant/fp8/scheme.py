"""FP8 as schemes: E4M3 codes with a scale for each block, row or tensor.

    fp8-block    one scale per 128x128 block, named x.weight_scale_inv in the official files
    fp8-channel  one scale per row, named x.weight_scale
    fp8-tensor   one scale for all, read only

On disk every scale multiplies the codes, whatever its name says. Writers differ in its axes (one
scale for all is [], [1] or [1, 1], one per row [N] or [N, 1], ModelOpt's blocks [R, 1, C, 1]), and
codes may be E5M2: all of these are read, none is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from formats.nearest import one_of
from formats.stored import Problem, StoredWeight
from formats.tensor import TensorInfo
from quant.errors import QuantError
from quant.fp8.scales import (
    CODE_TYPE,
    CODE_TYPES,
    COMPRESSED,
    OFFICIAL,
    SCALE_TYPES,
    explain,
    suffix_of,
)
from quant.scheme import Choices, Cost, Part, Shape
from quant.usual import Usual

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from torch import Tensor

    from quant.measure import Error
    from quant.scheme import Factor, Prepared, StoredRanges

# Relative RMS error from which a weight in codes without bounds is taken for another one.
SAME_WEIGHT = 0.5
CODES, SCALE = "codes", "scale"
SCALE_DTYPES = {"pow2": "BF16", "float32": "F32", "bfloat16": "BF16"}
BLOCK = 128
DEFECTS = {SCALE: "scales that are not finite and positive", CODES: "codes that are NaN"}


@dataclass(frozen=True, slots=True)
class Fp8(Usual):
    """E4M3 codes and a grid of scales, one for `block_rows` x `block_cols` (None: all of them).

    divisor       what engines need rows and columns to be a multiple of
    needs         who needs that, as the subject of a sentence
    scale         pow2, float32 or bfloat16: see `quant.fp8.reference`
    strategy      what compressed-tensors says of the scales, and of those of the inputs
    scale_suffix  what follows the weight's name
    spellings     how many axes its scale may have, the usual number first
    axes          how many it has; None: the usual number
    code_type     of the codes
    """

    name: str
    block_rows: int | None
    block_cols: int | None
    divisor: int
    needs: str
    strategy: dict[str, Any] = field(hash=False)
    inputs: dict[str, Any] = field(hash=False)
    row_multiple: int = 1
    scale: str = "pow2"
    scale_suffix: str = COMPRESSED
    spellings: tuple[int, ...] = (2,)
    axes: int | None = None
    code_type: str = CODE_TYPE

    def __post_init__(self) -> None:
        if self.scale not in SCALE_DTYPES:
            known = one_of(SCALE_DTYPES)
            raise QuantError(f"scale {self.scale!r} is not known, expected {known}")

    @property
    def label(self) -> str:
        """What a checkpoint of such weights is called."""
        return self.name

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return the codes and the scale."""
        codes = TensorInfo(name, self.code_type, tuple(shape))
        grid = TensorInfo(name + self.scale_suffix, SCALE_DTYPES[self.scale], self.grid(shape))
        return Part(CODES, codes), Part(SCALE, grid, self.block_rows, self.block_rows is not None)

    def grid(self, shape: Shape) -> Shape:
        """Return the shape of the scale of codes of this shape."""
        axes = self.spellings[0] if self.axes is None else self.axes
        if self.block_rows is None:
            return (1,) * axes
        *experts, num_rows, num_cols = shape
        rows = -(-num_rows // self.block_rows)
        columns = -(-num_cols // (self.block_cols or num_cols))
        grids = {1: (rows,), 2: (rows, columns), 4: (rows, 1, columns, 1)}
        return (*experts, *grids[axes])

    def spelt(self, shape: Shape) -> Iterator[Fp8]:
        """Yield this form with its scale as each writer spells it, for codes of this shape."""
        every = len(shape) == 2 or self.block_rows is None
        for axes in self.spellings if every else self.spellings[:1]:
            yield _changed(self, axes=axes)

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield the codes whose scale has the shape of this form."""
        for name, info in infos.items():
            if info.dtype not in CODE_TYPES or len(info.shape) < 2:
                continue
            suffix = suffix_of(name, infos)
            scale = infos.get(name + suffix) if suffix else None
            if scale is None:
                continue
            spelt = {form.grid(info.shape): form for form in self.spelt(info.shape)}
            form = spelt.get(scale.shape) if scale.dtype in SCALE_TYPES else None
            if form is not None:
                form = _changed(form, scale_suffix=suffix, code_type=info.dtype)
                yield StoredWeight(name, info.shape, "BF16", form, (info, scale))

    def explain(self, name: str, infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Say why codes have no scale, or a scale no codes."""
        return explain(name, infos, FORMS)

    def refuses(self, shape: Shape) -> str | None:
        """Return why engines cannot take this shape, or None."""
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

    def config_entry(self, modules: Sequence[str]) -> dict[str, Any]:
        """Return compressed-tensors' group."""
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        return {
            "targets": list(modules),
            "format": "float-quantized",
            "weights": common | self.strategy | {"dynamic": False},
            "input_activations": common | self.inputs | {"dynamic": True},
            "output_activations": None,
        }

    def config_block(self, kept: Sequence[str]) -> dict[str, Any] | None:
        """Return the official block of 128x128 blocks; nobody has one for channels."""
        if self.scale_suffix != OFFICIAL:
            return None
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(kept),
        }

    def with_choices(self, choices: Choices) -> Fp8:
        """Return the same with scales of that type. QuantError if there is none of the name."""
        return replace(self, scale=choices.scale)

    def beside_others(self) -> Fp8:
        """Return it under compressed-tensors' names: the official layout has no other scheme."""
        return replace(self, scale_suffix=COMPRESSED)

    def scale_of_rows(self, scale: Tensor, count: int) -> Tensor:
        """Return the scales of `count` rows, float32 [n, G], also where all share one."""
        scale = scale.float()
        if self.block_rows is None:
            return scale.reshape(1, 1).expand(count, 1)
        return scale.reshape(count, -1)

    def _row_block(self, codes: Tensor) -> tuple[int, int]:
        """Return the block of scales that are given for every row."""
        return 1, self.block_cols or codes.shape[-1]


@cache
def _changed(form: Fp8, **fields: Any) -> Fp8:
    """Return a form with other fields; thousands of weights have the same one."""
    return replace(form, **fields)


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
