"""FP8 as a checkpoint has it: names and shapes of codes and scales, and what configs say of them.

On disk every scale multiplies the codes, whatever its name says. Writers differ in its axes (one
scale for all is [], [1] or [1, 1], one per row [N] or [N, 1], ModelOpt's blocks [R, 1, C, 1]), and
codes may be E5M2: all of these are read, none is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeVar

from formats.nearest import one_of
from formats.quant_methods import FP8
from formats.stored import StoredWeight
from formats.tensor import TensorInfo
from quant.choices import Choices
from quant.errors import QuantError
from quant.fp8.scales import CODE_TYPE, CODE_TYPES, COMPRESSED, OFFICIAL, SCALE_TYPES, suffix_of
from quant.part import Part, Shape
from quant.usual import Usual

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CODES, SCALE = "codes", "scale"
SCALE_DTYPES = {"pow2": "BF16", "float32": "F32", "bfloat16": "BF16"}
BLOCK = 128
F = TypeVar("F", bound="Fp8Form")


@dataclass(frozen=True, slots=True)
class Fp8Form(Usual):
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

    def spelt(self, shape: Shape) -> Iterator[Self]:
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
            "quant_method": FP8,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(kept),
        }

    def with_choices(self, choices: Choices) -> Self:
        """Return the same with scales of that type. QuantError if there is none of the name."""
        return replace(self, scale=choices.scale)

    def beside_others(self) -> Self:
        """Return it under compressed-tensors' names: the official layout has no other scheme."""
        return replace(self, scale_suffix=COMPRESSED)


@cache
def _changed(form: F, **fields: Any) -> F:
    """Return a form with other fields; thousands of weights have the same one."""
    return replace(form, **fields)
