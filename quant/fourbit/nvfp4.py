"""NVFP4: E2M1 codes in groups of 16, E4M3 scales, and one scale over those of a fused matrix.

    nvfp4a16   weights alone
    nvfp4      engines with kernels for it take the inputs in four bits too, in groups of 16 whose
               scales are found as they run, over a scale that is stored: the scale of the inputs

    step = weight_scale / weight_global_scale        weight_global_scale = 448 * 6 / largest weight

Trap: this global scale divides, ModelOpt's (`weight_scale_2`) multiplies: see `dialects`. Engines
run fused matrices (q, k, v; gate, up of each expert; qkv, z) with one global scale, whichever
member's that is, so they share it; and one scale of the inputs, which are the same.

Source: compressed-tensors at 0.20, ModelOpt at 0.47. Marlin at vLLM 0.26 multiplies the scales of a
kernel by the largest power of two that leaves none above 448, and takes those below 2^-6 for 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, log2
from typing import TYPE_CHECKING, Any

from formats.quant_methods import COMPRESSED
from formats.stored import StoredWeight
from formats.tensor import TensorInfo
from quant.choices import Choices
from quant.errors import RESTORE_SCALE, QuantError
from quant.fourbit.dialects import DIALECTS, Dialect
from quant.fourbit.fp4 import E2M1_MAX, Fp4
from quant.fourbit.parts import GLOBAL, INPUTS, PACKED, SCALE, stored_parts
from quant.part import Part, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from quant.fourbit.calibrate import Grid
    from quant.fourbit.hessian import Factor
    from quant.scheme import StoredRanges

E4M3_MAX = 448.0
WHOLE = E4M3_MAX * E2M1_MAX
# The bits of two codes that are not signs.
MAGNITUDES = 0x77
# E4M3's smallest normal number: Marlin flushes what is below.
LEAST_SCALE = 2.0**-6
# What the largest input of a linear may be: memory that nobody wrote to holds other numbers.
INPUT_RANGE = 2.0**-26, 2.0**32
FORMAT = "nvfp4-pack-quantized"
WEIGHTS = (("strategy", "tensor_group"), ("scale_dtype", "torch.float8_e4m3fn"))
# What compressed-tensors says of inputs whose groups get their scales as engines run.
INPUT_ARGS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
    "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn", "observer": "static_minmax",
}  # fmt: skip
# Bytes of E4M3: those of 2^-6 and of 448, and how far from the usual scale one is searched for.
# Five up is 1.5 times, where the largest weight becomes 4 instead of 6.
LEAST_CODE, MOST_CODE = 0x08, 0x7E
DOWN, UP = 4, 6


@dataclass(frozen=True, slots=True)
class Nvfp4(Fp4):
    """Groups of 16 whose scales are E4M3 numbers, over a scale of the whole fused matrix.

    static_inputs  a scale of the inputs is stored
    spelling       whose names and scales they are
    axes           of the scales of a matrix; None: as many as the dialect writes
    """

    static_inputs: bool = False
    spelling: Dialect = DIALECTS[COMPRESSED]
    axes: int | None = None
    dialects: tuple[str, ...] = tuple(DIALECTS)

    @property
    def label(self) -> str:
        """What a checkpoint of such weights is called."""
        return self.name if self.dialect == COMPRESSED else f"{self.name} ({self.dialect})"

    @property
    def dialect(self) -> str:
        """Whose names and scales they are."""
        return self.spelling.name

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return codes, scales, the one scale over them, and that of the inputs if it is stored."""
        *lead, columns = shape
        packed = TensorInfo(name + self.spelling.packed, "U8", (*lead, columns // 2))
        scale = TensorInfo(name + SCALE, self.scale_type, (*lead, columns // self.group))
        stored = Part(PACKED, packed), Part(SCALE, scale), self._whole(GLOBAL, name)
        return (*stored, self._whole(INPUTS, name)) if self.static_inputs else stored

    def _whole(self, key: str, weight: str) -> Part:
        """Return a scale of the matrix, or of its inputs, which no encoder of weights knows."""
        inputs, spelt = key == INPUTS, self.spelling
        name = spelt.name_inputs(weight) if inputs else weight + spelt.whole
        axes = spelt.axes if self.axes is None else self.axes
        info = TensorInfo(name, "F32", (1,) * axes)
        return Part(key, info, rows=None, stacked=False, fused=True, measured=inputs)

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield weights whose parts have these names, types and shapes, in any dialect."""
        for spelt in DIALECTS.values():
            for name, info in infos.items():
                weight = name.removesuffix(spelt.packed)
                if info.dtype != "U8" or len(info.shape) != 2 or weight + SCALE not in infos:
                    continue
                shape = info.shape[0], info.shape[1] * 2
                for axes in (0, 1):
                    form = replace(self, spelling=spelt, axes=axes)
                    parts = stored_parts(form, weight, shape, infos)
                    if parts:
                        yield StoredWeight(weight, shape, "BF16", form, parts)

    def prepare(self, values: Iterator[Tensor]) -> Tensor:
        """Return the global scale of a fused matrix, float32, with the axes it is stored with.

        QuantError if a weight is not finite.
        """
        import torch

        from quant.fourbit import cpu

        largest = torch.zeros(())
        for rows in values:
            low, high = cpu.extremes(rows, rows.shape[-1])
            largest = torch.stack([largest, high.max(), -low.min()]).max()
        return self.whole_scale(largest if largest > 0 else torch.tensor(WHOLE))

    def whole_scale(self, amax: Tensor) -> Tensor:
        """Return the scale of a matrix, or of its inputs, whose largest number is this."""
        scale = amax / WHOLE if self.spelling.multiplies else 1 / amax * WHOLE
        return scale.reshape((1,) * (self.spelling.axes if self.axes is None else self.axes))

    def scale_inputs(self, amax: Tensor) -> dict[str, Tensor]:
        """Return the scale of inputs whose largest is this."""
        return {INPUTS: self.whole_scale(amax.clamp(*INPUT_RANGE))}

    def scales(self, amax_B: Tensor, prepared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return E4M3 scales and steps; none but those of zeros is below 2^-6 without need."""
        import torch

        assert prepared is not None, "the scale of the matrix comes first"
        if self.spelling.multiplies:
            wanted = amax_B / (E2M1_MAX * prepared)
        else:
            wanted = prepared * (amax_B / E2M1_MAX)
        wanted = wanted.clamp(min=LEAST_SCALE, max=E4M3_MAX)
        codes = torch.where(amax_B > 0, wanted, self.spelling.zero_scale).to(torch.float8_e4m3fn)
        return codes, self._step(codes, prepared)

    def candidates(self, scale_B: Tensor, prepared: Tensor | None) -> Iterator[Grid]:
        """Yield the scales whose codes are near, this one first."""
        import torch

        from quant.fourbit.calibrate import Grid

        assert prepared is not None, "the scale of the matrix comes first"
        first, most, none = LEAST_CODE, MOST_CODE, torch.zeros(len(scale_B), device=scale_B.device)
        for moved in sorted(range(-DOWN, UP + 1), key=abs):
            code = (scale_B.view(torch.uint8).int() + moved).clamp(first, most).byte()
            zero = scale_B.float() == self.spelling.zero_scale
            code = torch.where(zero, scale_B.view(torch.uint8), code)
            scale = code.view(torch.float8_e4m3fn)
            yield Grid(self._step(scale, prepared), none, scale)

    def stored(self, step_B: Tensor, prepared: Tensor | None) -> Tensor:
        """Return the E4M3 scales of steps: rounding a quotient once does not hide them."""
        import torch

        assert prepared is not None, "the scale of the matrix comes first"
        scale = step_B / prepared if self.spelling.multiplies else step_B * prepared
        return scale.to(torch.float8_e4m3fn)

    def steps(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the scales of groups over, or times, the global scale."""
        return self._step(rows[SCALE], rows[GLOBAL].float())

    def _step(self, scale: Tensor, whole: Tensor) -> Tensor:
        return scale.float() * whole if self.spelling.multiplies else scale.float() / whole

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
        # ModelOpt asks whether a weight is below 0, which -0 is not
        w_NK = w_NK + 0 if self.spelling.multiplies else w_NK
        rows = super(Nvfp4, self).encode(w_NK, prepared, importance, out, factor)
        return rows | {GLOBAL: prepared}

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return scales that are NaN, negative, or 0 for codes that are not; wrong global ones."""
        scale, whole = rows[SCALE].float(), rows[GLOBAL].float()
        used = ((rows[PACKED] & MAGNITUDES) != 0).view(*scale.shape, self.group // 2).any(-1)
        bad = int((~(scale >= 0) | (scale == 0) & used).sum())
        wrong = int((~(whole.isfinite() & (whole > 0))).sum())
        counts = {
            SCALE: ("scales that are not numbers, negative, or 0 for codes that are not", bad)
        }
        counts[GLOBAL] = ("global scales that are not finite and positive", wrong)
        if self.static_inputs:
            odd = int(not self._is_plausible(rows[INPUTS].float()))
            counts[INPUTS] = ("scales of inputs that no calibration gives", odd)
        return {key: defect for key, defect in counts.items() if defect[1]}

    def check_scales(self, shared: Mapping[str, Tensor], _ranges: StoredRanges) -> None:
        """Refuse scales below 0, and global ones not above 0: a small scale may have become 0."""
        scale, whole = shared[SCALE].float(), shared[GLOBAL].float()
        _refuse("scales", scale[~(scale >= 0)])
        _refuse("global scales", whole[~(whole.isfinite() & (whole > 0))])

    @property
    def flushes(self) -> bool:
        """Return True: Marlin does."""
        return True

    def peak(self, rows: Mapping[str, Tensor]) -> float:
        """Return the largest scale of groups."""
        return float(rows[SCALE].float().max())

    def flush(
        self, rows: Mapping[str, Tensor], peak: float | None
    ) -> tuple[Mapping[str, Tensor], int]:
        """Return rows with 0 for the scales that Marlin takes for it, and how many there are."""
        scale = rows[SCALE].float()
        room = floor(log2(E4M3_MAX / peak)) if peak else 0
        lost = (scale > 0) & (scale < LEAST_SCALE / 2**room)
        return {**rows, SCALE: scale.where(~lost, 0.0).to(rows[SCALE].dtype)}, int(lost.sum())

    def _is_plausible(self, inputs: Tensor) -> bool:
        """Whether a scale of inputs can be that of a linear's largest input."""
        amax = float(inputs * WHOLE if self.spelling.multiplies else WHOLE / inputs)
        return INPUT_RANGE[0] <= amax <= INPUT_RANGE[1]

    def config_entry(self, modules: Sequence[str]) -> dict[str, Any]:
        """Return compressed-tensors' group: weights, and inputs if their scale is stored."""
        entry = super(Nvfp4, self).config_entry(modules)
        return entry | {"input_activations": dict(INPUT_ARGS)} if self.static_inputs else entry

    def with_choices(self, choices: Choices) -> Nvfp4:
        """Return it in the dialect that was chosen."""
        return self.in_dialect(choices.dialect)

    def in_dialect(self, dialect: str) -> Nvfp4:
        """Return it under the names, and with the scales, of a dialect."""
        return replace(self, spelling=DIALECTS[dialect])


def _refuse(what: str, bad: Tensor) -> None:
    if bad.numel():
        got = f"holds {float(bad.flatten()[0]):g}"
        raise QuantError(f"one of {bad.numel()} {what}", got, "numbers above 0", RESTORE_SCALE)


NVFP4 = Nvfp4("nvfp4a16", 16, "F8_E4M3", FORMAT, WEIGHTS)
NVFP4_INPUTS = Nvfp4("nvfp4", 16, "F8_E4M3", FORMAT, WEIGHTS, static_inputs=True)
