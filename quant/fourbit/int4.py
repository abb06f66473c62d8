"""INT4: four bits, a step for each group of 128 (or `group`) columns.

    weight_packed      I32 [N, K / 8]   element i of a row at bits 4 (i % 8) of word i // 8, plus 8
    weight_scale       BF16 [N, G]
    weight_zero_point  I32 [N / 8, G]
    weight_shape       I64 [2]
    weight_g_idx       I32 [K]          the group of each column, if these are not in order

Symmetric: w ~ code * step. The step has a sign: the largest weight becomes -8, the longer end,
which leaves a tenth less error than making it 7.5. Asymmetric: w ~ (code - zero) * step, the zero
points packed along rows, plus 8.

Names and layout are those of compressed-tensors (`pack-quantized`). Packed codes of eight bits,
four to a word, are read too. Source: compressed-tensors at 0.20, `pack_to_int32`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from formats.stored import ONE_GROUP, ORDERED, ZEROS, StoredWeight
from formats.tensor import TensorInfo
from quant.choices import Choices
from quant.errors import QuantError
from quant.fourbit.integer import (
    SCALE_TYPES,
    Steps,
    between,
    config_group,
    stored_step,
    strategy,
)
from quant.fourbit.parts import ORDER, PACKED, SCALE, SHAPE, ZERO, stored_parts
from quant.fourbit.words import in_a_word, pack_columns, pack_rows, unpack_columns, unpack_rows
from quant.part import Cost, Part, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from formats.stored import Recogniser

# Groups that engines have kernels for: Marlin's, Machete's.
GROUPS = (32, 64, 128)
IN_A_WORD = 8


@dataclass(frozen=True, slots=True)
class Int4(Steps):
    """Four bits in groups, eight codes to a word; of eight bits it is read.

    symmetric   whether there are no zero points
    scale_type  as files name it
    ordered     each column says its group
    """

    symmetric: bool = True
    scale_type: str = "BF16"
    row_multiple: int = IN_A_WORD  # zero points of eight rows share a word
    ordered: bool = False

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return codes, steps, the shape, and zero points and groups if there are any."""
        *lead, rows, columns = shape
        grid, many = (*lead, rows, columns // self.size(columns)), in_a_word(self.bits)
        packed = TensorInfo(name + PACKED, "I32", (*lead, rows, columns // many))
        parts = [
            Part(PACKED, packed),
            Part(SCALE, TensorInfo(name + SCALE, self.scale_type, grid)),
            Part(SHAPE, TensorInfo(name + SHAPE, "I64", (2,)), constant=(rows, columns), rows=None),
        ]
        if not self.symmetric:
            zero = TensorInfo(name + ZERO, "I32", (*lead, rows // many, grid[-1]))
            parts.append(Part(ZERO, zero, unpack=partial(unpack_rows, bits=self.bits)))
        if self.ordered:
            parts.append(Part(ORDER, TensorInfo(name + ORDER, "I32", (columns,)), rows=None))
        return tuple(parts)

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield packed codes with steps for whole groups of columns."""
        for name, info in infos.items():
            weight, scale = name.removesuffix(PACKED), infos.get(name.removesuffix(PACKED) + SCALE)
            if name == weight or info.dtype != "I32" or len(info.shape) != 2 or scale is None:
                continue
            rows, words = info.shape
            shape, groups = (rows, words * in_a_word(self.bits)), scale.shape[-1:]
            if groups in ((), (0,)) or shape[1] % groups[0] or scale.dtype not in SCALE_TYPES:
                continue
            form = replace(
                self,
                group=None if groups == (1,) else shape[1] // groups[0],
                symmetric=weight + ZERO not in infos,
                scale_type=scale.dtype,
                ordered=weight + ORDER in infos,
            )
            parts = stored_parts(form, weight, shape, infos)
            if parts:
                yield StoredWeight(weight, shape, "BF16", form, parts)

    def traits(self, columns: int) -> frozenset[str]:
        """Return whether there are zero points and g_idx, and whether a row is one group."""
        traits = {
            ZEROS: not self.symmetric,
            ORDERED: self.ordered,
            ONE_GROUP: self.size(columns) == columns,
        }
        return frozenset(trait for trait, has in traits.items() if has)

    def refuses(self, shape: Shape) -> str | None:
        """Return why this shape has no whole groups or words, or None."""
        if len(shape) != 2:
            return f"{self.name} needs a matrix, its shape is {list(shape)}"
        if shape[1] % self.size(shape[1]) or shape[1] % IN_A_WORD:
            return f"{shape[1]} columns are not a whole number of groups of {self.size(shape[1])}"
        if not self.symmetric and shape[0] % IN_A_WORD:
            return f"zero points of {IN_A_WORD} rows share a word, it has {shape[0]} rows"
        return None

    def told(self, block: Mapping[str, Any]) -> Recogniser:
        """Return what also finds words of eight bits, where config.json says so."""
        from quant.fourbit.packed_words import PackedWords

        return PackedWords(self, replace(self, name="int8a16", bits=8), block)

    def steps(self, low_B: Tensor, high_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps that make the largest weight -8, or 15 of them from the least to it."""
        import torch

        if not self.symmetric:
            return between(low_B, high_B, self.bits)
        largest = torch.where(high_B > -low_B, high_B, low_B)
        step = stored_step(largest / -(1 << (self.bits - 1)))
        return step, torch.zeros_like(step)

    def stored(self, codes_NK: Tensor, step_NG: Tensor, zero_NG: Tensor) -> dict[str, Tensor]:
        """Return packed codes, steps, and packed zero points if there are any."""
        import torch

        parts = {PACKED: pack_columns(codes_NK, self.bits), SCALE: step_NG.to(torch.bfloat16)}
        return parts if self.symmetric else parts | {ZERO: pack_rows(zero_NG, self.bits)}

    def codes(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the codes of rows, int8 [N, K]."""
        return unpack_columns(rows[PACKED], self.bits)

    def plain(self, _rows: Mapping[str, Tensor]) -> Steps:
        """Return it with columns in order."""
        return Int4(self.name, self.bits, self.group, self.symmetric)

    def config_entry(self, modules: Sequence[str]) -> dict[str, Any] | None:
        """Return compressed-tensors' group: weights alone."""
        weights = {"num_bits": self.bits, "type": "int"} | strategy(self.group)
        weights |= {"symmetric": self.symmetric, "dynamic": False}
        weights |= {"actorder": "group"} if self.ordered else {}
        return config_group(modules, "pack-quantized", weights, None)

    def cost(self, *, moved: bool) -> Cost:
        """Return what is held: of columns that say their groups, also what they are spread to."""
        usual = super(Int4, self).cost(moved=moved)
        spread = 3 * 4 if self.ordered else 0
        return replace(usual, read=usual.read + spread, compare=usual.compare + spread)

    def with_choices(self, choices: Choices) -> Int4:
        """Return it with this group and these zero points. QuantError for what no engine runs."""
        group = choices.group or self.group
        if group not in GROUPS:
            known = ", ".join(map(str, GROUPS))
            raise QuantError(f"group is {group}, expected one that engines run: {known}")
        symmetric = self.symmetric if choices.symmetric is None else choices.symmetric
        return replace(self, group=group, symmetric=symmetric)


INT4 = Int4("int4", 4, 128)
