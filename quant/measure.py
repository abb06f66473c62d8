"""How far a stored weight is from its source: sums that add up over blocks, tensors and files.

    relative_rms = sqrt(sum (w - q)^2 / sum w^2)        cosine = sum w q / sqrt(sum w^2 sum q^2)

w is the source's weight, q what the stored form decodes to. An `Error` holds sums and counts only,
so parts add in any grouping; the loop of `quant.fp8.differences` fills the same fields.

The bound that `outside` counts against, for E4M3 codes with scale s, follows from the format:

    |w - q| <= max(|w| * (2^-4 + 2^-8), s * 2^-10 + |w| * 2^-6) * (1 + 1e-6)

Three mantissa bits put w within half a step, |w| * 2^-4; below the normal codes the step is
s * 2^-9. 2^-8 is the slack of files whose codes came from a scale that was rounded to bfloat16
afterwards. Below the normal codes it moves the half step by s * 2^-18, at most |w| * 2^-8 where
the code is not 0, and q by at most |w| * 2^-7: together less than |w| * 2^-6. 1e-6 is the slack of
float32 arithmetic. An element outside was not rounded, or was cut off.

`faults` counts, by what is wrong, the blocks that no right encoder leaves, of `blocks` that were
judged; each scheme has its own. `reached` is the error of our own encoder on the same weights,
where a scheme is judged by it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from math import inf, isnan, sqrt
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

E4M3_MAX = 448.0
HALF_STEP = 2.0**-4 + 2.0**-8
HALF_SUBNORMAL = 2.0**-10
SUBNORMAL_SLACK = 2.0**-6
ROUNDING = 1.0 + 1e-6


class Reached(NamedTuple):
    """What our own encoder leaves of the same weights."""

    sum_sq_error: float
    sum_dot: float
    sum_error: float


class Within(NamedTuple):
    """Sums over rows of the weights that lie within the values of their codes.

    square      of w^2 of a row
    product     of w q, and `ours` of what our own encoder has for q
    of_squares  of square^2, `of_both` of square product, `of_products` of product^2
    """

    square: float
    product: float
    ours: float
    of_squares: float
    of_both: float
    of_products: float


class Pushed(NamedTuple):
    """How many codes lie beside the nearest: away from zero, towards it; above it, below it.

    early_*  away from zero and towards it, in the columns that have the fewest such codes
    columns  the weights of those columns, and whole of all
    """

    out: float
    back: float
    up: float
    down: float
    early_out: float
    early_back: float
    columns: float
    whole: float


@dataclass(slots=True)
class Error:
    """What is lost in `count` weights: sums in float64, counts of elements (rows: zero_rows).

    saturated   codes of the largest magnitude
    zeros       weights that were not zero and became zero
    zero_rows   rows that were not all zero and became so
    outside     elements farther off than the format's rounding can explain
    faults      blocks by what is wrong with them, of `blocks` that were judged
    sum_error   of q - w
    reached     sums of squares, of products and of q - w that our own encoder leaves
    moved       weights in columns where codes are often not the nearest
    along       of sum_sq_error, what lies along the weights of a group, or is the same in all of it
    by_chance   what errors of these sizes have there by chance
    alike       weights that are stored as our own encoder stores them
    within      sums of weights within the values of their codes, where a scheme is judged by them
    pushed      codes beside the nearest, by the side, where a scheme is judged by them
    """

    sum_sq_error: float = 0.0
    sum_sq: float = 0.0
    sum_dot: float = 0.0
    sum_sq_q: float = 0.0
    max_abs: float = 0.0
    saturated: int = 0
    zeros: int = 0
    zero_rows: int = 0
    outside: int = 0
    count: int = 0
    blocks: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    sum_error: float = 0.0
    reached: Reached | None = None
    moved: float = 0.0
    along: float = 0.0
    by_chance: float = 0.0
    alike: int = 0
    within: Within | None = None
    pushed: Pushed | None = None

    def __iadd__(self, other: Error) -> Error:
        for name, joined in JOINED:
            setattr(self, name, joined(getattr(self, name), getattr(other, name)))
        return self

    def __add__(self, other: Error) -> Error:
        total = replace(self)
        total += other
        return total

    @property
    def relative_rms(self) -> float:
        """Root of the error's energy over the weight's; 0 for nothing lost of nothing."""
        if self.sum_sq == 0.0:
            return inf if self.sum_sq_error else 0.0
        return sqrt(self.sum_sq_error / self.sum_sq)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the weight and what it decodes to; 1 if both are zero."""
        norm = sqrt(self.sum_sq) * sqrt(self.sum_sq_q)
        if norm == 0.0:
            return 1.0 if self.sum_sq == self.sum_sq_q else 0.0
        return self.sum_dot / norm

    def as_dict(self) -> dict[str, float | int]:
        """Return what a report shows, reals to six digits: what float32 lanes can promise."""
        return {
            "relative_rms": _six_digits(self.relative_rms),
            "max_abs": _six_digits(self.max_abs),
            "cosine": _six_digits(self.cosine),
            "saturated": self.saturated,
            "zeros": self.zeros,
            "zero_rows": self.zero_rows,
        }


def measure(
    w: Tensor, decoded: Tensor, *, scale: Tensor | None = None, codes: Tensor | None = None
) -> Error:
    """Return the error of `decoded` against `w`, both [..., K]: the definition, in plain torch.

    scale   E4M3 scale of every element, of w's shape or broadcasting to it: fills `outside`
    codes   E4M3 codes of w's shape: fills `saturated`
    """
    source, stored = w.double(), decoded.double()
    # The difference is the float32 one: both operands are float32 values.
    error = (w.float() - decoded.float()).double().abs()
    lost = (source != 0) & (stored == 0)
    emptied = lost.any(-1) & (stored == 0).all(-1)
    saturated, outside = 0, 0
    if codes is not None:
        saturated = int((codes.float().abs() == E4M3_MAX).sum())
    if scale is not None:
        outside = int((~(error <= bound(source, scale)) | error.isinf()).sum())
    return Error(
        sum_sq_error=float(error.square().sum()),
        sum_sq=float(source.square().sum()),
        sum_dot=float((source * stored).sum()),
        sum_sq_q=float(stored.square().sum()),
        max_abs=float(error.max()) if w.numel() else 0.0,
        saturated=saturated,
        zeros=int(lost.sum()),
        zero_rows=int(emptied.sum()),
        outside=outside,
        count=w.numel(),
        sum_error=float((stored - source).sum()),
    )


def bound(w: Tensor, scale: Tensor) -> Tensor:
    """Return the largest error E4M3 may make of each weight, in float64 (see the module's head)."""
    size = w.double().abs()
    step = scale.double().abs() * HALF_SUBNORMAL + size * SUBNORMAL_SLACK
    return (size * HALF_STEP).maximum(step) * ROUNDING


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bytes; by words, 7 times as fast."""
    import torch

    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    sides = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    words = all(len(t) % 8 == 0 and t.storage_offset() % 8 == 0 for t in sides)
    return torch.equal(*(t.view(torch.int64) if words else t for t in sides))


def within(left: Tensor, right: Tensor, slack: tuple[float, float]) -> bool:
    """Whether two tensors differ nowhere by more than slack: absolute, and relative to `right`."""
    gap, size = (left.double() - right.double()).abs(), right.double().abs()
    return bool((gap <= slack[0] + slack[1] * size).all())


def _larger(a: float, b: float) -> float:
    """Return the larger, a NaN if there is one: `max` would lose it."""
    return a if isnan(a) or a > b else b


Sums = Reached | Within | Pushed


def _add_sums(a: Sums | None, b: Sums | None) -> Sums | None:
    return type(a)(*map(add, a, b)) if a and b else a or b


# How a field adds up that is not a sum; how each does.
ADD: dict[str, Callable[[Any, Any], Any]] = {
    "max_abs": _larger,
    "reached": _add_sums,
    "within": _add_sums,
    "pushed": _add_sums,
}
JOINED = tuple((each.name, ADD.get(each.name, add)) for each in fields(Error))


def _six_digits(x: float) -> float:
    return float(f"{x:.6g}")
