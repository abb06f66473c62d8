"""The layouts of GPTQ and AWQ, in which columns of the weight come first.

    qweight  I32          GPTQ [K / n, N], n codes of a row of the weight to a word
                          AWQ  [K, N / 8], eight rows to a word, interleaved
    qzeros   I32 [G, N / n]              packed along rows of the weight, by AWQ interleaved
    scales   F16, BF16 or F32 [G, N]
    g_idx    I32 [K]      GPTQ's, the group of each column; without it they follow one another

w ~ (code - zero) * scale. Turned around they are compressed-tensors' parts, so all but names and
packing is `Int4`'s. GPTQ's first version stores zeros less one, which no header shows.

GPTQ's is written too: symmetric, which is what vLLM runs, and with columns in order. vLLM casts the
scales to the model's type, so steps are rounded to bfloat16 first, and have to be float16 as well.

Source: gptqmodel at 7.7, AutoRound at 0.16, AutoAWQ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from formats.quant_methods import GPTQ
from formats.stored import ZEROS
from formats.tensor import TensorInfo
from quant.choices import Choices
from quant.errors import QuantError
from quant.fourbit.int4 import Int4
from quant.fourbit.integer import Steps
from quant.fourbit.parts import ORDER, PACKED, SCALE, ZERO
from quant.fourbit.words import (
    in_a_word,
    one_less,
    one_more,
    pack_columns,
    pack_rows,
    unpack_awq,
    unpack_rows,
)
from quant.part import Part, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

LEAST_HALF = 2.0**-24
WEIGHT, QWEIGHT, QZEROS, SCALES, G_IDX = "weight", "qweight", "qzeros", "scales", "g_idx"


@dataclass(frozen=True, slots=True)
class Turned(Int4):
    """Whole numbers with zero points in groups, columns first."""

    symmetric: bool = False

    def _grid(self, name: str, shape: Shape, zeros: Part) -> list[Part]:
        """Return zero points and steps of a weight of this name."""
        scales = TensorInfo(name + SCALES, self.scale_type, (zeros.info.shape[0], shape[0]))
        return [zeros, Part(SCALE, scales, transposed=True)]

    def _zeros(self, name: str, shape: Shape) -> TensorInfo:
        groups = shape[1] // self.size(shape[1])
        return TensorInfo(name + QZEROS, "I32", (groups, shape[0] // in_a_word(self.bits)))

    def traits(self, columns: int) -> frozenset[str]:
        """Return those of Int4 but zero points, which are always stored: config.json says more."""
        return super(Turned, self).traits(columns) - {ZEROS}

    def plain(self, rows: Mapping[str, Tensor]) -> Steps:
        """Return it rows first, with zero points only if these rows have any."""
        return Int4(self.name, self.bits, self.group, symmetric=not bool(rows[ZERO].any()))

    def config_entry(self, _modules: Sequence[str]) -> dict[str, Any] | None:
        """Return None: compressed-tensors stores rows first."""
        return None


@dataclass(frozen=True, slots=True)
class Gptq(Turned):
    """GPTQ's layout; `less_one`: it stores zeros less one."""

    less_one: bool = True
    dialects: tuple[str, ...] = (GPTQ,)

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return codes, zero points, steps, and groups if columns say theirs."""
        base, (rows, columns) = name.removesuffix(WEIGHT), shape
        words = TensorInfo(base + QWEIGHT, "I32", (columns // in_a_word(self.bits), rows))
        unpack = partial(_zeros, bits=self.bits, less_one=self.less_one)
        zeros = Part(ZERO, self._zeros(base, shape), unpack=unpack, transposed=True)
        order = Part(ORDER, TensorInfo(base + G_IDX, "I32", (columns,)), rows=None)
        parts = [Part(PACKED, words, transposed=True), *self._grid(base, shape, zeros)]
        return (*parts, order) if self.ordered else tuple(parts)

    def refuses(self, shape: Shape) -> str | None:
        """Return why this shape has no whole groups or words, or None."""
        odd = super(Gptq, self).refuses(shape)
        if odd is None and shape[0] % in_a_word(self.bits):
            return (
                f"zero points of {in_a_word(self.bits)} rows share a word, it has {shape[0]} rows"
            )
        return odd

    def steps(self, low_B: Tensor, high_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps that float16 and bfloat16 have, and zero points. QuantError for inf."""
        step, zero = super(Gptq, self).steps(low_B, high_B)
        return _half(step), zero

    def stored(self, codes_NK: Tensor, step_NG: Tensor, zero_NG: Tensor) -> dict[str, Tensor]:
        """Return packed codes, steps, and packed zero points."""
        import torch

        zeros = pack_rows(zero_NG, self.bits)
        return {
            PACKED: pack_columns(codes_NK, self.bits),
            SCALE: step_NG.to(torch.float16),
            ZERO: one_less(zeros, self.bits) if self.less_one else zeros,
        }

    def with_choices(self, choices: Choices) -> Gptq:
        """Return it with this group. QuantError for zero points, or a group that none runs."""
        chosen = super(Gptq, self).with_choices(choices)
        if not chosen.symmetric:
            raise QuantError(
                "int4 in the dialect gptq is symmetric: vLLM runs no other,\n"
                "  expected symmetric: true, or the dialect compressed-tensors"
            )
        return replace(self, group=chosen.group)

    def config_block(self, _kept: Sequence[str]) -> dict[str, Any]:
        """Return what gptqmodel and vLLM read, but the rules for what is not quantised."""
        return {
            "quant_method": GPTQ,
            "bits": self.bits,
            "group_size": self.group,
            "sym": self.symmetric,
            "desc_act": self.ordered,
            "checkpoint_format": "gptq" if self.less_one else "gptq_v2",
            "pack_dtype": "int32",
        }


@dataclass(frozen=True, slots=True)
class Awq(Turned):
    """AWQ's layout."""

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return codes, zero points and steps."""
        base, (rows, columns) = name.removesuffix(WEIGHT), shape
        several = in_a_word(self.bits)
        words = TensorInfo(base + QWEIGHT, "I32", (columns, rows // several))
        codes = Part(PACKED, words, rows=several, unpack=unpack_awq, transposed=True)
        zeros = Part(ZERO, self._zeros(base, shape), unpack=unpack_awq, transposed=True)
        return codes, *self._grid(base, shape, zeros)

    def codes(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the codes of rows, which are apart already."""
        return rows[PACKED]


def _zeros(words: Tensor, *, bits: int, less_one: bool) -> Tensor:
    """Return GPTQ's zero points of each row, less half their range as codes are."""
    return unpack_rows(one_more(words, bits) if less_one else words, bits)


def _half(step: Tensor) -> Tensor:
    """Return bfloat16 steps as float16 holds them, in float32.

    All from 2^-17 on are the same in both. Smaller ones become the next larger of float16's, which
    bfloat16 has too, so that no weight is cut off.
    """
    import torch

    larger = torch.copysign((step.abs() / LEAST_HALF).ceil() * LEAST_HALF, step)
    half = larger.to(torch.float16).float()
    if not bool(half.isfinite().all()):
        raise QuantError(f"a step is {float(step.abs().max()):g}, beyond 65504 of float16")
    return half


GPTQ_4, GPTQ_8 = Gptq("gptq-int4", 4, 128), Gptq("gptq-int8", 8, 128)
GPTQ_WRITTEN = replace(GPTQ_4, symmetric=True, scale_type="F16")
AWQ_4 = Awq("awq-int4", 4, 128)


def fitted(form: Turned, columns: int, scales: TensorInfo, *, ordered: bool) -> Turned:
    """Return a form with the groups and the type of these steps, [G, N]."""
    group = columns // scales.shape[0]
    return replace(form, group=group, scale_type=scales.dtype, ordered=ordered)
