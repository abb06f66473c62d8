"""The parts of a weight as compressed-tensors names them, behind the weight's own name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from formats.tensor import TensorInfo
    from quant.part import Shape
    from quant.scheme import Scheme

PACKED, SCALE, GLOBAL = "_packed", "_scale", "_global_scale"
SHAPE, ZERO, ORDER = "_shape", "_zero_point", "_g_idx"
INPUTS = "input_scale"


def stored_parts(
    scheme: Scheme, weight: str, shape: Shape, infos: Mapping[str, TensorInfo]
) -> tuple[TensorInfo, ...] | None:
    """Return the stored tensors of a weight if all are there in a scheme's types and shapes."""
    expected = [part.info for part in scheme.parts(weight, shape)]
    found = [infos.get(info.name) for info in expected]
    pairs = zip(found, expected, strict=True)
    same = all(f is not None and (f.dtype, f.shape) == (e.dtype, e.shape) for f, e in pairs)
    return tuple(info for info in found if info is not None) if same else None
