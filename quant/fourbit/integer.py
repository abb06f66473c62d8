"""Whole numbers in steps, what int4 and int8 have in common: w ~ (code - zero) * step.

A step belongs to a group of columns of a row, or to the row. Steps are rounded to bfloat16 before
codes are taken.

Source: compressed-tensors at 0.20, `calculate_qparams`.

Shape letters: N rows, K columns, G groups of a row, B groups of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from quant.fourbit.columns import groups_of, is_usual, spread
from quant.fourbit.parts import ORDER, SCALE, ZERO
from quant.part import Cost
from quant.usual import Usual

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from quant.fourbit.calibrate import Grid
    from quant.fourbit.hessian import Factor
    from quant.measure import Error
    from quant.scheme import Prepared, Scheme

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
        prepared: Prepared = None,
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
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far rows are from the weight, and which strips no right encoder leaves."""
        from quant.fourbit.judge import Decoded, judge_rows
        from quant.measure import Error

        step, columns = rows[SCALE].float(), w_NK.shape[1]
        if ORDER in self.defects(rows):
            return Error()  # which nothing can be compared with: the defect is named by itself
        groups = groups_of(rows.get(ORDER), columns, step.shape[1])
        codes, end = self.codes(rows), 1 << (self.bits - 1)
        outward = (codes == end - 1).int() - (codes == -end).int()
        stored = Decoded(
            self.decode(rows),
            spread(step.abs(), groups, columns),
            outward * spread(step.sign(), groups, columns),
            is_usual(w_NK, 2 * end * step.abs(), groups),
            self.size(columns),
        )
        return judge_rows(w_NK, stored, self.nearest(w_NK, rows, groups))

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
        from quant.fourbit.judge import STRIP, judge_whole

        return judge_whole(error, self.size(STRIP), self.bits)

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


def goes_in_pairs(scheme: Scheme, columns: int) -> bool:
    """Return whether GPTQ chooses codes of so many columns two by two, as `Rows.refit` has it."""
    from quant.fourbit.rows import BLOCK

    return isinstance(scheme, Steps) and scheme.size(columns) <= BLOCK


def config_group(
    modules: Sequence[str], form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a group of compressed-tensors' config; `inputs`: how they are taken in few bits."""
    return {
        "targets": list(modules),
        "format": form,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def strategy(group: int | None) -> dict[str, Any]:
    """Return compressed-tensors' words for what a step belongs to."""
    return {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}


def between(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return steps that part the range of each group evenly, and the zero points of it."""
    end = 1 << (bits - 1)
    step = stored_step((high - low) / (2 * end - 1))
    return step, (-end - low / step).clamp(-end, end - 1).round()


def stored_step(step: Tensor) -> Tensor:
    """Return steps as bfloat16 holds them, in float32; 1 for groups of zeros."""
    import torch

    rounded = step.to(torch.bfloat16).float()
    return torch.where(rounded == 0, 1.0, rounded)
