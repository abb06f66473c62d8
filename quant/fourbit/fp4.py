"""E2M1 codes in groups of columns: what NVFP4 and MXFP4 have in common.

    w ~ code * step of the group        weight_packed  U8 [N, K / 2]        weight_scale  [N, K / g]

Names and layout are those of compressed-tensors, whose arithmetic the encoders follow to the byte.
A format says how its scales follow from the largest weight of a group, and what steps they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.stored import StoredWeight
from formats.tensor import TensorInfo
from quant.fourbit.parts import GLOBAL, PACKED, SCALE, stored_parts
from quant.part import Cost, Part, Shape
from quant.usual import Usual

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from quant.fourbit.calibrate import Grid
    from quant.fourbit.hessian import Factor
    from quant.measure import Error

E2M1_MAX = 6.0


@dataclass(frozen=True, slots=True)
class Fp4(Usual):
    """E2M1 codes in groups; the two formats differ in their scales.

    group       columns of one scale
    scale_type  as files name it
    config      what compressed-tensors says of the weights, beside the type
    """

    name: str
    group: int
    scale_type: str
    format: str
    config: tuple[tuple[str, Any], ...]

    @property
    def label(self) -> str:
        """What a checkpoint of such weights is called."""
        return self.name

    @property
    def calibrated(self) -> bool:
        """Return True: scales are searched for, codes chosen by GPTQ."""
        return True

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return the codes and the scales of the groups."""
        *lead, columns = shape
        packed = TensorInfo(name + PACKED, "U8", (*lead, columns // 2))
        scale = TensorInfo(name + SCALE, self.scale_type, (*lead, columns // self.group))
        return Part(PACKED, packed), Part(SCALE, scale)

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield weights whose parts have these names, types and shapes."""
        for name, info in infos.items():
            if info.dtype == "U8" and name.endswith(PACKED) and len(info.shape) == 2:
                weight, shape = name.removesuffix(PACKED), (info.shape[0], info.shape[1] * 2)
                parts = stored_parts(self, weight, shape, infos)
                if parts:
                    yield StoredWeight(weight, shape, "BF16", self, parts)

    def refuses(self, shape: Shape) -> str | None:
        """Return why rows of this length have no whole groups, or None."""
        if len(shape) != 2:
            return f"{self.name} needs a matrix, its shape is {list(shape)}"
        if shape[1] % self.group:
            return f"{shape[1]} columns are not a whole number of groups of {self.group}"
        return None

    def encode(
        self,
        w_NK: Tensor,
        prepared: Tensor | None = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return the nearest codes under the scales of the largest weights, or calibrated ones."""
        import torch

        from quant.fourbit.calibrate import Grid
        from quant.fourbit.place import place_of

        place, chooser = place_of(factor)
        low, high = place.extremes(w_NK, self.group)
        scale, step = self.scales(low.neg().maximum(high), prepared)
        w_Bg, near = place.grouped(w_NK, self.group), self.candidates(scale, prepared)
        if factor is not None:
            tried = torch.stack([each.step for each in near])
            known = chooser.weights_of(factor.diagonal)
            step = chooser.best_steps(w_NK, known, tried, 0)
            grid = Grid(step, torch.zeros_like(step), step)
            units, step = chooser.choose_units(w_NK, grid, factor, 0, tried=tried)
            scale = self.stored(step, prepared)
            w_Bg, step = place.grouped(units, self.group), torch.ones_like(step)
        elif importance is not None:
            step, _, scale = chooser.sweep(w_NK, chooser.weights_of(importance), near, 0)
        packed = place.encode_e2m1(w_Bg, step).view(len(w_NK), -1)
        return {PACKED: packed, SCALE: scale.view(len(w_NK), -1)}

    def scales(self, amax_B: Tensor, prepared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what is stored for groups with these largest weights, and their steps."""
        raise NotImplementedError

    def candidates(self, scale_B: Tensor, prepared: Tensor | None) -> Iterator[Grid]:
        """Yield scales near these, theirs first."""
        raise NotImplementedError

    def stored(self, step_B: Tensor, prepared: Tensor | None) -> Tensor:
        """Return what is stored for groups with steps that are among the candidates."""
        raise NotImplementedError

    def steps(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the step of each group, float32 [N, G]."""
        raise NotImplementedError

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return codes * step in float32."""
        from quant.fourbit import cpu

        packed, where = rows[PACKED], rows[PACKED].device
        steps = self.steps(rows).reshape(-1).contiguous().cpu()
        values = cpu.decode_e2m1(cpu.grouped(packed, self.group // 2), steps)
        return values.view(len(packed), -1).to(where)

    def measure(self, w_NK: Tensor, rows: Mapping[str, Tensor]) -> Error:
        """Return how far the decoded rows are from the weight."""
        from quant.sums import measure

        return measure(w_NK, self.decode(rows))

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far rows are from the weight, and which strips no right encoder leaves."""
        import torch

        from quant.fourbit.columns import is_usual, spread
        from quant.fourbit.judge import Decoded, judge_rows

        q, own = self.decode(rows), self.decode(self.encode(w_NK, rows.get(GLOBAL)))
        step = self.steps(rows).abs()
        size, steps = q.abs(), spread(step, None, w_NK.shape[1])
        gap = torch.where(
            size < 2 * steps, steps / 2, torch.where(size < 4 * steps, steps, 2 * steps)
        )
        inward = gap.where((size != 2 * steps) & (size != 4 * steps), gap / 2)
        outward = q.sign() * (size >= E2M1_MAX * steps)
        usual = is_usual(w_NK, 2 * E2M1_MAX * step, None)
        stored = Decoded(q, gap, outward, usual, self.group, inward=inward)
        return judge_rows(w_NK, stored, own)

    def judge(self, error: Error) -> list[str]:
        """Return the faults of its groups, and a gain or a bias of the whole."""
        from quant.fourbit.judge import judge_whole

        return judge_whole(error, self.group)

    def cost(self, *, moved: bool) -> Cost:
        """Return what is held: packed codes, values, groups in bfloat16; both sides in float64."""
        return Cost(1 + 4 + 4 + (4 if moved else 0), 8, 104)

    def config_entry(self, modules: Sequence[str]) -> dict[str, Any]:
        """Return compressed-tensors' group: weights alone."""
        common = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": self.group}
        return {
            "targets": list(modules),
            "format": self.format,
            "weights": common | dict(self.config) | {"dynamic": False},
            "input_activations": None,
            "output_activations": None,
        }
