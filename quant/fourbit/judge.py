"""Whether weights of few bits are those of a right encoder, whichever it was.

Encoders take the nearest codes under the scale of the largest weight, or search for a scale, or
weigh inputs: GPTQ moves what a column loses into the columns after it. Where a code is the nearest
under a scale that a search may take, or the last of its side with the weight beyond it, the scale
explains it. Elsewhere it is held to what our nearest codes would reach:

    strips   of 128 columns have at most 2.5 times that error, as RMS; more than half of a weight's
             at most 1.5 times; a column that no token used, which GPTQ erases, counts as we have it
    weights  are at most 4 steps of their code off, if hardly any column has moved codes; if hardly
             any code is moved, none is 1.5 steps off alone in its row and its column, and none is
             zero with its whole column
    columns  have at most twice that error, one of them at least: GPTQ takes the nearest codes in
             the column that it begins with, and rounding up or down at will does no worse
    gain     and bias: as `quant.ggml.judge` has them
    sides    codes beside the nearest do not all lie on one (`pushed`)

An encoder that weighs inputs moves codes in most columns. Its error has no bound of use: with
damping c of the mean square it is up to (1 + 1/c)^(1/2) times that of the nearest codes, 10 times
for 0.01, and more where inputs are unequal. But what it moves comes from the rounding of other
columns, which knows nothing of the weight w, so the error d is at right angles to w; wrong values
are not: those of another place, of the same size, have <d, w> = -|w|^2 = -|d|^2 / 2, and a scale by
a factor f has d = (f - 1) w. So where codes are moved in 15 % of the columns or more,

    strips   over the bound have |<d, w>| at most 0.6 |w|^2, or 0.4 |d|^2; of ggml's types also
             without the weights that scales cut off, or 0.2 |d|^2
    zeros    are never all of 16 neighbours of which one is more than 4 steps
    groups   of n columns have at most 10 % + 2 / n of the error along w and along 1, in the codes
             that scales do not explain: chance makes it 2 / n, more where few weights are large
    gain     0.82 to 1.05 times that of the codes that scales explain
    within   of ggml's types: the gain of weights that scales do not cut off, see there

Points of IQ2 and IQ3 are judged as if each level were free,
which it is not: of them strips and what is within are judged, not groups and gain.

Measured on weights of three models, inputs from white to two columns 300 times the others, or of 16
tokens, damping 0.01 and 0.001, all forms: right ones have up to 13 times our error, at most 4 %
beyond chance along w, gains of 0.865 to 1.001, and a column with at most 1.04 times our error.
Scales a fifth off, of another row or group, zero points one off: 10 % and more beyond chance, or a
gain of 1.09 and more. Values of another place: a gain of 0.

Trap: a few bits that flip in such a weight look like what GPTQ does; only the receipt shows them.
Where damping is so small that GPTQ leaves more than the weight itself as its error, as with 0.3 of
the median of a diagonal that spans e^12, the weight is lost, and is named.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from quant.fourbit.pushed import leaning, pushed
from quant.fourbit.within import gain_within, within
from quant.ggml.judge import find_trends
from quant.measure import Error, Pushed, Reached, measure

if TYPE_CHECKING:
    from torch import Tensor

STRIP = 128
MOST, USUAL, BEST = 2.5**2, 1.5**2, 2.0**2
FAR = 4
# A source that was made from these weights and stored as BF16 is this far from them, squared.
MADE_BF16 = 2.0**-18
# The nearest code is half a step away; arithmetic in bfloat16 moves it a little.
NEAR = 1 / 2 + 1 / 16
# A column counts as moved by the share of its codes that are, an eighth of them in full.
IN_FULL, MOVED, HARDLY = 8, 3 / 20, 1 / 20
# Up to here codes are those of the nearest, but for what was done to them afterwards. A code is
# alone if it is one of so many of its row, and of its column.
UNMOVED, ASTRAY, ALONE = 1 / 125, 1.5, 64
LEANS, OF_ERROR, OF_REST = 0.6, 0.4, 0.2
ALONG, LEAST_GAIN, MOST_GAIN = 0.1, 0.82, 1.05

ERROR = f"strips of {STRIP} weights have more than 2.5 times the error that our encoder leaves"
MANY = f"strips of {STRIP} weights have more than 1.5 times the error that our encoder leaves"
OTHER = f"strips of {STRIP} weights hold other values than the source's"
ZERO = f"strips of {STRIP} weights are all zeros, where our encoder leaves values"
BLANK = "groups of 16 weights are all zeros, where our encoder leaves large ones"
ERASED = "weights are zeros with their whole column, where our encoder leaves values"
SINGLE = f"weights are more than {ASTRAY} steps off, where codes are else the nearest"
NOWHERE = "every column has more than twice the error that our encoder leaves"


class Decoded(NamedTuple):
    """Rows as they are stored; all but `group` are [N, K].

    values   what they decode to
    gap      the distance of two codes there
    outward  the sign of what lies beyond, where the code is the last of its side; else 0
    usual    whether encoders take such a scale for the weights of its group
    group    columns of a scale
    cut      whether the weight lies beyond the values that its codes have; None: it is not told
    inward   the distance of the next code towards zero; None: `gap`
    """

    values: Tensor
    gap: Tensor
    outward: Tensor
    usual: Tensor
    group: int
    cut: Tensor | None = None
    inward: Tensor | None = None


def judge_rows(w_NK: Tensor, stored: Decoded, ours: Tensor) -> Error:
    """Return the error of stored rows, with the faults of their strips, and what is right of them.

    ours  what our encoder leaves, [N, K]
    """
    error = measure(w_NK, stored.values)
    w, q, own = w_NK.double(), stored.values.double(), ours.double()
    empty = (_strips(q) == 0).all(-1) & (_strips(own) != 0).any(-1)
    erased = (w.abs() > NEAR * stored.gap) & stored.usual & (q == 0).all(0)
    q = q.where((q != 0).any(0), own)
    missed = q - w
    blank = _blank(q, own, stored.usual & (w.abs() > FAR * stored.gap))
    near = (missed.abs() <= NEAR * stored.gap) | (stored.outward * missed < 0)
    near &= stored.usual
    right = q.where(near, own)
    single = _alone(~near) & stored.usual & (missed.abs() > ASTRAY * stored.gap)
    nowhere = w.numel() if _nowhere(w, missed, right - w) else 0
    counts = {ZERO: int(empty.sum()), ERASED: int(erased.sum()), SINGLE: int(single.sum())}
    counts[BLANK] = int(blank.sum())
    error.faults = _faults(w, missed, right - w, stored.cut) + Counter(counts | {NOWHERE: nowhere})
    error.blocks, error.alike = empty.numel(), int((stored.values == ours).sum())
    error.outside = int(((missed.abs() > FAR * stored.gap) & (q != 0) & ~near).sum())
    error.moved = len(w) * float((IN_FULL * (~near).double().mean(0)).clamp(max=1).sum())
    away = missed.where(~near, 0.0)
    error.pushed = _pushed(w, missed, stored)
    error.along, error.by_chance = _along(w, away, min(stored.group, STRIP))
    if stored.cut is not None:
        error.within = within(*(x.masked_fill(stored.cut, 0.0) for x in (w, q, own)))
    reached = (right - w).square(), w * right, right - w
    error.reached = Reached(*(float(x.sum()) for x in reached))
    return error


def judge_whole(error: Error, group: int, bits: int = 4, *, free: bool = True) -> list[str]:
    """Return what is wrong with a whole weight: strips, weights, gain and bias.

    free  whether a code of one column leaves those of others free

    Writers cut the largest weight of a group by half a step, or none does: of many bits that is
    more than the gain they otherwise lose.
    """
    faults = Counter(error.faults)
    far = [NOWHERE] if faults[NOWHERE] * 2 > error.count else []
    blank = [f"{faults[BLANK]:,} {BLANK}"] if faults[BLANK] else []
    if error.moved > MOVED * error.count:
        wrong = {what: faults[what] for what in (OTHER, ZERO)}
        along = [*far, *_leaning(error, min(group, STRIP)), *leaning(error)] if free else []
        return [*_told(wrong, error), *blank, *(along or gain_within(error))]
    if faults[MANY] * 2 <= error.blocks:
        del faults[MANY]
    said = [*_told({what: faults[what] for what in (ERROR, MANY, ZERO)}, error), *blank, *far]
    if error.moved <= UNMOVED * error.count:
        said += [f"{faults[what]:,} {what}" for what in (ERASED, SINGLE) if faults[what]]
    if error.outside and error.moved <= HARDLY * error.count:
        said.append(f"{error.outside:,} weights are more than {FAR} steps off")
    said += leaning(error) if free else []
    return [*said, *find_trends(error, cut=1 / (2**bits - 1) if bits > 4 else 0.0)]


def _pushed(w: Tensor, missed: Tensor, stored: Decoded) -> Pushed:
    """Return how many codes lie beside the nearest, by the side."""
    half = stored.gap / 2
    if stored.inward is not None:
        half = half.where(stored.values.abs() <= w.abs(), stored.inward / 2)
    return pushed(w, missed, half, stored.usual & (stored.outward * missed >= 0))


def _told(faults: dict[str, int], error: Error) -> list[str]:
    return [f"{n:,} of {error.blocks:,} {what}" for what, n in faults.items() if n]


def _leaning(error: Error, group: int) -> list[str]:
    """Return how the whole error of weights that inputs weighed shows other values or scales."""
    if error.reached is None or not error.sum_sq_error or not error.sum_sq:
        return []
    share, chance = (x / error.sum_sq_error for x in (error.along, error.by_chance))
    gain = 1 + (error.sum_dot - error.reached.sum_dot) / error.sum_sq
    said = []
    if share > ALONG + max(2 / group, chance):
        said.append(f"{share:.0%} of its error lies along the weights: scales are not their own")
    if not LEAST_GAIN <= gain <= MOST_GAIN:
        said.append(f"its values are {gain:.4g} times those of our encoder")
    return said


def _faults(w: Tensor, missed: Tensor, least: Tensor, cut: Tensor | None) -> Counter[str]:
    """Count the strips that have other values, or more error than the least one explains.

    cut  which weights lie beyond the values of their codes, and say nothing of others
    """
    square = _strips(w.square()).sum(-1)
    found, reached = (_strips(x.square()).sum(-1) for x in (missed, least))
    high, many = (found > most * reached + MADE_BF16 * square for most in (MOST, USUAL))
    other = high & _lean(w, missed, OF_ERROR)
    if cut is not None:
        rest_w, rest = (x.masked_fill(cut, 0.0) for x in (w, missed))
        other &= _lean(rest_w, rest, OF_REST)
    bad = {ERROR: high, MANY: many, OTHER: other}
    return Counter({what: int(where.sum()) for what, where in bad.items()})


def _blank(q: Tensor, own: Tensor, large: Tensor) -> Tensor:
    """Return which groups of 16 lost all weights, of which many are no zeros and some are large."""
    q_NGg, own_NGg, large_NGg = (_strips(x, 16) for x in (q, own, large.double()))
    return (q_NGg == 0).all(-1) & ((own_NGg != 0).sum(-1) >= 8) & (large_NGg > 0).any(-1)


def _lean(w: Tensor, missed: Tensor, of_error: float) -> Tensor:
    """Return in which strips the error lies along the weights."""
    lean, square, found = (_strips(x).sum(-1) for x in (w * missed, w.square(), missed.square()))
    return (lean.abs() > LEANS * square) & (lean.abs() > of_error * found)


def _nowhere(w: Tensor, missed: Tensor, least: Tensor) -> bool:
    """Whether no column of some rows has about the error that the least one explains."""
    square, found, reached = (x.square().sum(0) for x in (w, missed, least))
    high = found > BEST * reached + MADE_BF16 * square
    return bool((high | (square == 0)).all() and high.any())


def _alone(off: Tensor) -> Tensor:
    """Return which codes that are not the nearest are alone in their row and their column."""
    rows, columns = off.shape
    few = (off.sum(1, keepdim=True) <= max(1, columns // ALONE)) & (
        off.sum(0) <= max(1, rows // ALONE)
    )
    return off & few


def _along(w: Tensor, missed: Tensor, group: int) -> tuple[float, float]:
    """Return the energy of the error along the weights of each group and along 1; and by chance.

    If signs are those of coins, the products add up like their squares.
    """
    w_NGg, missed_NGg = (_strips(x, group) for x in (w, missed))
    centred = w_NGg - w_NGg.mean(-1, keepdim=True)
    square = centred.square().sum(-1)
    square = square.where(square > 0, 1.0)
    products = centred * missed_NGg
    lean = products.sum(-1).square() / square + group * missed_NGg.mean(-1).square()
    chance = products.square().sum(-1) / square + missed_NGg.square().mean(-1)
    return float(lean.sum()), float(chance.sum())


def _strips(x_NK: Tensor, size: int = STRIP) -> Tensor:
    """Return strips of each row, [N, S, size]; the last one filled up with zeros."""
    from torch.nn.functional import pad

    missing = -x_NK.shape[1] % size  # none: no copy is made
    return (pad(x_NK, (0, missing)) if missing else x_NK).reshape(len(x_NK), -1, size)
