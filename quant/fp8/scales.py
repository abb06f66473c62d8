"""Which tensor is the scale of which codes, by name; what is wrong where the two do not fit.

x.weight            codes, E4M3 or E5M2
x.weight_scale_inv  its scale in the official files; x.weight_scale in all others
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from formats.stored import Problem
from quant.errors import RESTORE_SCALE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from formats.tensor import TensorInfo

CODE_TYPE = "F8_E4M3"
CODE_TYPES = (CODE_TYPE, "F8_E5M2")
SCALE_TYPES = ("BF16", "F16", "F32", "F8_E8M0")
OFFICIAL, COMPRESSED = "_scale_inv", "_scale"


def holds_codes(info: TensorInfo) -> bool:
    """Whether a stored tensor holds FP8 codes."""
    return info.dtype in CODE_TYPES


class Form(Protocol):
    """A form of FP8, as far as the shape of its scale goes."""

    @property
    def name(self) -> str:
        """What recipes call it."""
        ...

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scale of codes of this shape."""
        ...

    def spelt(self, shape: tuple[int, ...]) -> Iterator[Form]:
        """Yield this form with its scale as each writer spells it."""
        ...


def suffix_of(weight: str, infos: Mapping[str, TensorInfo]) -> str:
    """Return the ending under which a weight's scale is stored, empty if it has none."""
    return next((s for s in (OFFICIAL, COMPRESSED) if weight + s in infos), "")


def explain(name: str, infos: Mapping[str, TensorInfo], forms: Sequence[Form]) -> Problem | None:
    """Say why codes have no scale of any of these forms, or a scale no codes."""
    suffix = next((s for s in (OFFICIAL, COMPRESSED) if name.endswith(s)), "")
    weight, coded = name.removesuffix(suffix), infos[name].dtype in CODE_TYPES
    if not suffix or (coded and weight not in infos):
        return _wrong_scale(name, infos, forms) if coded else None
    if weight not in infos:
        reason = "scales a weight that does not exist"
        remedy = "restore the weight, or convert the checkpoint that it was made from"
        return Problem(infos[name].name, reason, remedy)
    if infos[weight].dtype in CODE_TYPES:
        chosen = name == weight + suffix_of(weight, infos)
        return _wrong_scale(weight, infos, forms) if chosen else None
    why = f"scales {infos[weight].name}, which is {infos[weight].dtype}, not FP8"
    return Problem(infos[name].name, why, "remove the scale, or restore the FP8 weight")


def _wrong_scale(
    weight: str, infos: Mapping[str, TensorInfo], forms: Sequence[Form]
) -> Problem | None:
    """Say what is wrong with the scale of codes that no form has recognised."""
    info, suffix = infos[weight], suffix_of(weight, infos)
    if len(info.shape) < 2:
        problem = f"is FP8 with shape {list(info.shape)}, expected a matrix"
        return Problem(info.name, problem, "convert a BF16 checkpoint")
    if not suffix:
        problem = "is FP8 without a scale: its values are unknown"
        return Problem(info.name, problem, RESTORE_SCALE)
    scale, restore = infos[weight + suffix], "restore the scale that belongs to this weight"
    every = (one.grid(info.shape) for form in forms for one in form.spelt(info.shape))
    if scale.shape not in every:
        known = " or ".join(f"{list(form.grid(info.shape))} ({form.name})" for form in forms)
        problem = f"has shape {list(scale.shape)}, expected {known}"
        return Problem(scale.name, problem, restore)
    problem = f"has dtype {scale.dtype}, expected one of {', '.join(SCALE_TYPES)}"
    return None if scale.dtype in SCALE_TYPES else Problem(scale.name, problem, restore)
