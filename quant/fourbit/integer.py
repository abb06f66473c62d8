"""Whole numbers as schemes: four bits in groups of columns, eight bits in rows.

    int4   a step for each group of 128 (or `group`) columns; eight codes to a word of 32 bits
    int8   a step for each row; engines take the inputs in eight bits too, token by token

    weight_packed  I32 [N, K / 8]   element i of a row at bits 4 (i % 8) of word i // 8, plus 8
    weight         I8 [N, K]        of int8
    weight_scale   BF16 [N, G]      weight_zero_point  I32 [N / 8, G]      weight_shape  I64 [2]
    weight_g_idx   I32 [K]          the group of each column, where they do not follow one another

Symmetric: w ~ code * step. The step of int4 has a sign: the largest weight becomes -8, the longer
end, which leaves a tenth less error than making it 7.5. Asymmetric: w ~ (code - zero) * step, the
zero points packed along rows, plus 8. Steps are rounded to bfloat16 before codes are taken.

Names and layout are those of compressed-tensors (`pack-quantized`, `int-quantized`). Packed codes
of eight bits, four to a word, are read too, and so are int8's in groups and with zero points.
Source: compressed-tensors at 0.20, `pack_to_int32`, `calculate_qparams`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from formats.stored import StoredWeight
from formats.tensor import TensorInfo
from quant.errors import QuantError
from quant.fourbit.columns import groups_of, spread
from quant.fourbit.parts import ORDER, PACKED, SCALE, SHAPE, ZERO, stored_parts
from quant.fourbit.words import in_a_word, pack_columns, pack_rows, unpack_columns, unpack_rows
from quant.scheme import Choices, Cost, Part, Shape, Usual

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from formats.stored import Recogniser
    from quant.fourbit.calibrate import Grid
    from quant.fourbit.hessian import Factor
    from quant.measure import Error
    from quant.scheme import Scheme

CODES = "codes"
# Groups that engines have kernels for: Marlin's, Machete's.
GROUPS = (32, 64, 128)
IN_A_WORD = 8
# Parts of the range of a group among which a step is searched for.
SHRINKS = tuple(1 - part / 50 for part in range(20))
SCALE_TYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Steps(Usual):
    """Whole numbers of so many bits, and a step for each group of columns (None: each row)."""

    name: str
    bits: int
    group: int | None

    @property
    def label(self) -> str:
        """What a checkpoint of such weights is called."""
        return self.name

    def size(self, columns: int) -> int:
        """Return the columns of one group."""
        return self.group or columns

    def encode(
        self,
        w_NK: Tensor,
        _prepared: None = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return the nearest codes under the steps of the largest weights, or calibrated ones."""
        import torch

        from quant.fourbit.place import place_of

        place, chooser = place_of(factor)
        size = self.size(w_NK.shape[1])
        low, high = place.extremes(w_NK, size)
        step, zero = self.steps(low, high)
        weights = importance if factor is None else factor.diagonal
        w_Bg, used = place.grouped(w_NK, size), step
        if weights is not None:
            known = chooser.weights_of(weights)
            grid = chooser.sweep(w_NK, known, self.candidates(low, high), self.bits)
            step, zero, _ = grid
            used = step
            if factor is not None:
                units, step = chooser.choose_units(w_NK, grid, factor, self.bits)
                w_Bg, used = place.grouped(units, size), torch.ones_like(step)
        codes = place.encode_int(w_Bg, used, zero, self.bits).view(w_NK.shape)
        step_NG, zero_NG = (x.view(len(w_NK), -1).cpu() for x in (step, zero))
        return self.stored(codes, step_NG, zero_NG)

    def candidates(self, low_B: Tensor, high_B: Tensor) -> Iterator[Grid]:
        """Yield steps and zero points for parts of this range, all of it first."""
        from quant.fourbit.calibrate import Grid

        for shrink in SHRINKS:
            step, zero = self.steps(low_B * shrink, high_B * shrink)
            yield Grid(step, zero, step)

    @property
    def calibrated(self) -> bool:
        """Return True: steps are searched for, codes chosen by GPTQ."""
        return True

    def steps(self, low_B: Tensor, high_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return step and zero point of groups whose weights lie between these."""
        raise NotImplementedError

    def stored(self, codes_NK: Tensor, step_NG: Tensor, zero_NG: Tensor) -> dict[str, Tensor]:
        """Return the parts of rows."""
        raise NotImplementedError

    def codes(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the codes of rows, int8 [N, K]."""
        raise NotImplementedError

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return (codes - zero) * step in float32."""
        from quant.fourbit import cpu

        step, codes = rows[SCALE].float().cpu(), self.codes(rows).cpu()
        zero = rows[ZERO].float().cpu() if ZERO in rows else step * 0
        groups = groups_of(rows.get(ORDER), codes.shape[1], step.shape[1])
        if groups is not None:
            moved = (codes.float() - zero[:, groups]) * step[:, groups]
            return moved.to(rows[SCALE].device)
        cut = cpu.grouped(codes, codes.shape[1] // step.shape[1])
        flat = (x.reshape(-1).contiguous() for x in (step, zero))
        return cpu.decode_int(cut, *flat).view(codes.shape).to(rows[SCALE].device)

    def measure(self, w_NK: Tensor, rows: Mapping[str, Tensor]) -> Error:
        """Return how far the decoded rows are from the weight."""
        from quant.sums import measure

        return measure(w_NK, self.decode(rows))

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        _importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far rows are from the weight, and which strips no right encoder leaves."""
        from quant.fourbit.judge import judge_rows
        from quant.measure import Error

        step, columns = rows[SCALE].float(), w_NK.shape[1]
        if ORDER in self.defects(rows):
            return Error()  # which nothing can be compared with: the defect is named by itself
        groups = groups_of(rows.get(ORDER), columns, step.shape[1])
        own = self.nearest(w_NK, rows, groups)
        return judge_rows(
            w_NK, self.decode(rows), own, spread(step.abs(), groups, columns), weighed=weighed
        )

    def nearest(self, w_NK: Tensor, rows: Mapping[str, Tensor], groups: Tensor | None) -> Tensor:
        """Return the values that our encoder leaves of a weight whose columns have these groups.

        rows  as they are stored: they show what headers do not
        """
        plain = self.plain(rows)
        if groups is None:
            return plain.decode(plain.apart(plain.encode(w_NK)))
        together = groups.argsort(stable=True)
        return self.nearest(w_NK[:, together], rows, None)[:, together.argsort()]

    def plain(self, _rows: Mapping[str, Tensor]) -> Steps:
        """Return what encodes with steps as these rows have them, in the simplest layout."""
        return self

    def judge(self, error: Error) -> list[str]:
        """Return the faults of its groups, and a gain or a bias of the whole."""
        from quant.fourbit.judge import judge_whole

        return judge_whole(error, self.bits)

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return steps that are not finite, or zero, and groups that have no step."""
        step, order = rows[SCALE].float(), rows.get(ORDER)
        bad = int((~(step.isfinite() & (step != 0))).sum())
        found = {SCALE: ("scales that are not finite, or zero", bad)} if bad else {}
        beyond = 0 if order is None else int(((order < 0) | (order >= step.shape[1])).sum())
        return found | ({ORDER: ("columns in a group that has no scale", beyond)} if beyond else {})

    def cost(self, *, moved: bool) -> Cost:
        """Return what is held: codes, values, groups in bfloat16; both sides in float64."""
        return Cost(1 + 4 + 4 + (4 if moved else 0), 8, 104)

    def apart(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return encoded parts row by row, as `decode` takes them."""
        from quant.stored import each_row

        count = parts[SCALE].shape[0]
        return each_row(cast("Scheme", self), parts, (count, self.codes(parts).shape[1]))


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

    def refuses(self, shape: Shape) -> str | None:
        """Return why this shape has no whole groups or words, or None."""
        if len(shape) != 2:
            return f"{self.name} needs a matrix, its shape is {list(shape)}"
        if shape[1] % self.size(shape[1]) or shape[1] % IN_A_WORD:
            return f"{shape[1]} columns are no whole number of groups of {self.size(shape[1])}"
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
            return _between(low_B, high_B, self.bits)
        largest = torch.where(high_B > -low_B, high_B, low_B)
        step = _stored_step(largest / -(1 << (self.bits - 1)))
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
        weights = {"num_bits": self.bits, "type": "int"} | _strategy(self.group)
        weights |= {"symmetric": self.symmetric, "dynamic": False}
        weights |= {"actorder": "group"} if self.ordered else {}
        return _entry(modules, "pack-quantized", weights, None)

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
            return _between(low_B, high_B, self.bits)
        step = _stored_step(high_B.maximum(-low_B) / 127.5)
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
        weights = common | _strategy(self.group) | {"symmetric": self.symmetric, "dynamic": False}
        inputs = common | {"strategy": "token", "symmetric": True, "dynamic": True}
        return _entry(modules, "int-quantized", weights, inputs)


def _entry(
    modules: Sequence[str], form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "targets": list(modules),
        "format": form,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def _strategy(group: int | None) -> dict[str, Any]:
    return {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}


def _between(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return steps that part the range of each group evenly, and the zero points of it."""
    end = 1 << (bits - 1)
    step = _stored_step((high - low) / (2 * end - 1))
    return step, (-end - low / step).clamp(-end, end - 1).round()


def _stored_step(step: Tensor) -> Tensor:
    """Return steps as bfloat16 holds them, in float32; 1 for groups of zeros."""
    import torch

    rounded = step.to(torch.bfloat16).float()
    return torch.where(rounded == 0, 1.0, rounded)


INT4 = Int4("int4", 4, 128)
INT8 = Int8("int8", 8, None)
