"""INT8: eight bits, a step for each row; engines take the inputs in eight bits too, by token.

    weight        I8 [N, K]
    weight_scale  BF16 [N, 1]

Names and layout are those of compressed-tensors (`int-quantized`). Steps of groups, and zero points
(I8, as the steps are shaped), are read too. Source: compressed-tensors at 0.20.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from formats.stored import StoredWeight
from formats.tensor import TensorInfo
from quant.fourbit.integer import (
    SCALE_TYPES,
    Steps,
    between,
    config_group,
    stored_step,
    strategy,
)
from quant.fourbit.parts import SCALE, ZERO, stored_parts
from quant.part import Part, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

CODES = "codes"


@dataclass(frozen=True, slots=True)
class Int8(Steps):
    """Eight bits, a step for each row; in groups, or with zero points, it is read."""

    symmetric: bool = True
    scale_type: str = "BF16"

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return codes, steps, and zero points if there are any."""
        grid = (*shape[:-1], shape[-1] // self.size(shape[-1]))
        steps = Part(SCALE, TensorInfo(name + SCALE, self.scale_type, grid))
        parts = Part(CODES, TensorInfo(name, "I8", tuple(shape))), steps
        return (
            parts if self.symmetric else (*parts, Part(ZERO, TensorInfo(name + ZERO, "I8", grid)))
        )

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield codes with a step for each row, or for whole groups of columns."""
        for name, info in infos.items():
            scale, columns = infos.get(name + SCALE), info.shape[-1:]
            if info.dtype != "I8" or len(info.shape) != 2 or scale is None:
                continue
            groups = scale.shape[-1:]
            if groups in ((), (0,)) or columns[0] % groups[0] or scale.dtype not in SCALE_TYPES:
                continue
            form = replace(
                self,
                group=None if groups == (1,) else columns[0] // groups[0],
                symmetric=name + ZERO not in infos,
                scale_type=scale.dtype,
            )
            parts = stored_parts(form, name, info.shape, infos)
            if parts:
                yield StoredWeight(name, info.shape, "BF16", form, parts)

    def refuses(self, shape: Shape) -> str | None:
        """Return why the kernels cannot take this shape, or None."""
        if len(shape) != 2:
            return f"{self.name} needs a matrix, its shape is {list(shape)}"
        odd = [str(size) for size in shape if size % 16]
        need = "INT8 kernels need rows and columns divisible by 16"
        return f"{need}, its shape is {list(shape)}" if odd else None

    def steps(self, low_B: Tensor, high_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps that make the largest weight 127.5, or 255 from the least to it."""
        if not self.symmetric:
            return between(low_B, high_B, self.bits)
        step = stored_step(high_B.maximum(-low_B) / 127.5)
        return step, step * 0

    def stored(self, codes_NK: Tensor, step_NG: Tensor, zero_NG: Tensor) -> dict[str, Tensor]:
        """Return codes, steps, and zero points if there are any."""
        import torch

        parts = {CODES: codes_NK, SCALE: step_NG.to(torch.bfloat16)}
        return parts if self.symmetric else parts | {ZERO: zero_NG.to(torch.int8)}

    def codes(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the codes of rows, int8 [N, K]."""
        return rows[CODES]

    def config_entry(self, modules: Sequence[str]) -> dict[str, Any]:
        """Return compressed-tensors' group: weights in rows, inputs token by token."""
        common = {"num_bits": 8, "type": "int"}
        weights = common | strategy(self.group) | {"symmetric": self.symmetric, "dynamic": False}
        inputs = common | {"strategy": "token", "symmetric": True, "dynamic": True}
        return config_group(modules, "int-quantized", weights, inputs)


INT8 = Int8("int8", 8, None)
