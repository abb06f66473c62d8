"""Whether weights of few bits are those of a right encoder, whichever it was.

Encoders differ: the nearest codes under the scale of the largest weight, a search for scales, or
GPTQ, which moves what a column loses into the columns after it. So no code is held to the weight by
itself. Beside our own nearest codes of the same weights,

    strips   of 128 columns have at most 2.5 times our error, as RMS; more than half of a weight's
             at most 1.5 times; a column that no token used, which GPTQ erases, counts as we have it
    weights  are at most 4 steps of their code off, or erased
             where a text is known to have chosen the codes, at most 5 times and no more: with few
             tokens GPTQ trades one strip for another (above 2.5 was seen, once in 512 strips)
    gain     and bias: as `quant.ggml.judge` has them, GPTQ's error counted like a search's

Measured on trained models: GPTQ leaves 1.03 to 1.14 times the error of the nearest codes, searches
0.85 to 0.97.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from quant.ggml.judge import find_trends
from quant.measure import Error, Reached, measure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

STRIP = 128
MOST, USUAL, CALIBRATED = 2.5**2, 1.5**2, 5.0**2
FAR = 4
# A source that was made from these weights and stored as BF16 is this far from them, squared.
MADE_BF16 = 2.0**-18

ERROR = f"strips of {STRIP} weights have more than 2.5 times the error that our encoder leaves"
MANY = f"strips of {STRIP} weights have more than 1.5 times the error that our encoder leaves"
AFAR = f"strips of {STRIP} weights have more than 5 times the error that our encoder leaves"
ZERO = f"strips of {STRIP} weights are all zeros, where our encoder leaves values"


def judge_rows(
    w_NK: Tensor, decoded: Tensor, ours: Tensor, gap_NK: Tensor, *, weighed: bool = False
) -> Error:
    """Return the error of decoded rows, with the faults of their strips, and what ours reaches.

    gap      the distance of two codes at each decoded weight, float32
    weighed  a text chose the codes: with few tokens GPTQ trades more of the weights' error than is
             usual, so only a wide bound of each strip holds
    """
    error = measure(w_NK, decoded)
    w, q, own = w_NK.double(), decoded.double(), ours.double()
    bounds = {AFAR: CALIBRATED} if weighed else {ERROR: MOST, MANY: USUAL}
    error.faults = _faults(w, q, own, bounds)
    error.blocks = _strips(w).shape[0] * _strips(w).shape[1]
    error.outside = 0 if weighed else int((((w - q).abs() > FAR * gap_NK) & (q != 0)).sum())
    missed = own - w
    reached = (missed.square(), w * own, missed)
    error.reached = Reached(*(float(x.sum()) for x in reached))
    return error


def judge_whole(error: Error, bits: int = 4) -> list[str]:
    """Return what is wrong with a whole weight: strips, weights, gain and bias.

    Writers cut the largest weight of a group by half a step, or none does: of many bits that is
    more than the gain they otherwise lose.
    """
    faults = Counter(error.faults)
    if faults[MANY] * 2 <= error.blocks:
        del faults[MANY]
    said = [f"{n:,} of {error.blocks:,} {what}" for what, n in faults.items() if n]
    if error.outside:
        said.append(f"{error.outside:,} weights are more than {FAR} steps off")
    return [*said, *find_trends(error, cut=1 / (2**bits - 1) if bits > 4 else 0.0)]


def _faults(w: Tensor, q: Tensor, own: Tensor, bounds: Mapping[str, float]) -> Counter[str]:
    slack = MADE_BF16 * _strips(w.square()).sum(-1)
    erased = (q == 0).all(0) & (own != 0).any(0)
    found = _strips((w - q.where(~erased, own)).square()).sum(-1)
    reached = _strips((w - own).square()).sum(-1)
    empty = (_strips(q) == 0).all(-1) & (_strips(own) != 0).any(-1)
    bad = {what: found > most * reached + slack for what, most in bounds.items()} | {ZERO: empty}
    return Counter({what: int(where.sum()) for what, where in bad.items() if where.any()})


def _strips(x_NK: Tensor) -> Tensor:
    """Return the strips of each row, [N, S, 128]; the last one filled up with zeros."""
    from torch.nn.functional import pad

    return pad(x_NK, (0, -x_NK.shape[1] % STRIP)).reshape(len(x_NK), -1, STRIP)
