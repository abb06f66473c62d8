"""Whether blocks of ggml's searched types are those of a right encoder, whichever it was.

    codes     the nearest under the scales stored beside them (`quant.ggml.nearest`)
    signs     those of the weights; of IQ2 and IQ3, where seven of eight are stored, but one
    error     of each super-block at most twice ours, as RMS, on the same weights; in no more than
              half of them over 1.75 times ours
    gain      <w, q> / <w, w> within 3 rms^2 of ours, rms being our relative error
    bias      mean(q - w) within half our RMS error of ours

A step of twice the size makes twice the error, and codes never taken again make more. The error of
a fit by least squares is orthogonal to what it decodes to, so its gain is 1 - rms^2; that of plain
rounding is 1. Where an importance matrix was used that is not known, single super-blocks, gain and
bias are not judged, but codes and the usual error are.

Measured on libgguf's encoders, which write llama.cpp's bytes, for seven kinds of weights (normal,
heavy tails, an outlier, sparse, far from zero, uneven blocks, tiny): without an importance matrix,
ours are the same. With mean squares that differ by a factor of 5 to 1000, the median super-block
has 0.4 to 1.52 times our error, single ones up to 12 times. Only weights that are 95% zeros, with
an importance that is often 0, reach more: 3.3 times, and blocks whose only weights matter to nobody
become zeros.

Q4_0 to Q5_1 with an importance matrix keep codes that were taken before the scale was fitted, and
theirs are not judged one by one if it is not known. Of points of the grids of IQ2 and IQ3 those
are, that no importance chooses (`quant.ggml.i_points`); there the median super-block has 0.78 to
1.30 times our error, single ones up to 4.6 times. Super-blocks have up to a sixth of such points;
up to a half, a third in the median, where every block has one column that weighs 1e4 times more.
Twice the scale makes it nine of ten, half the scale a half (IQ2) or four fifths (IQ3).
The factor that fits a super-block's values best is judged, too: where it is below 0.8 or above 1.35
times ours in nine of ten, the whole was multiplied. An importance that differs by 1e4 leaves eight
of ten so in weights that are 95% zeros, elsewhere at most six. Where a block of 32 is all zeros,
ggml's IQ3_S stores what follows in a wrong place (`quant.ggml.i_store`), and is named for it.

No step is zero, but where the weights that share it are all the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quant.ggml import codec, i_points, kinds, nearest
from quant.measure import Error, Reached

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

TWICE, USUAL = 2.0**2, 1.75**2
MAX_GAIN, MAX_BIAS = 3.0, 0.5
UNIT = 2.0**-24
# The smallest normal float16: a block below it may have a scale that rounds to zero.
NORMAL = 2.0**-14
# A source that was made from these blocks and stored as BF16 is this far from them, squared.
MADE_BF16 = 2.0**-18

# Of eight columns, how many may have a wrong sign; below SMALL another source may have zeros.
SIGNED = {"IQ2_XXS": 1, "IQ2_XS": 1, "IQ2_S": 0, "IQ3_XXS": 1, "IQ3_S": 0}
SMALL = 2.0**-24
# <w, q> / <q, q> of a super-block beside ours.
FITTING = 0.8, 1.35
# The share of a super-block's points that no search may have taken, beside twice the usual number.
BEATEN = 0.25

CODES = "super-blocks have codes that are not the nearest under their scales"
SIGNS = "super-blocks have signs that are not those of the weights"
ERROR = "super-blocks have more than twice the error that our encoder leaves"
ZERO = "super-blocks are all zeros, where our encoder leaves values"
FLAT = "super-blocks have steps of zero, where our encoder leaves values that differ"
POINTS = "super-blocks have points of the grid that no importance chooses"
FACTOR = "super-blocks have values that are times those that fit the weights"
MANY = "super-blocks have more than 1.75 times the error that our encoder leaves"


# Of the super-blocks of a weight, the share that may be so.
SHARES = {MANY: 0.5, FACTOR: 0.9}


class Rows(NamedTuple):
    """Weights [N, K], their blocks [N, B], and what those decode to, float32 [N, K]."""

    w: Tensor
    blocks: Tensor
    decoded: Tensor


def judge_rows(
    error: Error, name: str, rows: Rows, importance: Tensor | None, *, known: bool
) -> None:
    """Fill in the faults of an error, and what our encoder reaches.

    importance  what the rows were encoded with
    known       nothing but that was

    QuantError if our encoder refuses the weights.
    """
    import torch

    own = codec.encode(name, rows.w, importance=importance)
    size, nbytes = kinds.block(name)
    error.blocks = own.numel() // nbytes
    error.alike = size * int((own == rows.blocks).view(-1, nbytes).all(1).sum())
    if torch.equal(own, rows.blocks):
        error.outside, reached = 0, Reached(error.sum_sq_error, error.sum_dot, error.sum_error)
    else:
        ours = codec.decode(name, own, rows.w.shape[1])
        error.faults = _find_faults(name, rows, ours, known=known)
        products, gap = rows.w.double() * ours.double(), ours.double() - rows.w.double()
        reached = Reached(*(float(x.sum()) for x in (gap.square(), products, gap)))
    error.reached = reached if known else None


def _find_faults(name: str, rows: Rows, ours: Tensor, *, known: bool) -> Counter[str]:
    """Return the number of blocks by what is wrong with them, beside ours."""
    size = kinds.block(name)[0]
    found, reached = (_square_errors(rows.w, q, size) for q in (rows.decoded, ours))
    slack = MADE_BF16 * rows.w.reshape(-1, size).double().square().sum(1).numpy()
    empty, full = (_largest(q, size) for q in (rows.decoded, ours))
    flat, uneven = (_widest(q, size) for q in (rows.decoded, ours))
    faults = {MANY: found > USUAL * reached + slack, ZERO: (empty == 0) & (full > NORMAL)}
    faults[FLAT] = (flat == 0) & (empty > 0) & (uneven > NORMAL)
    if known:
        faults[ERROR] = found > TWICE * reached + slack
    if name in nearest.CODES:
        faults[CODES] = _far(name, rows) > 0
    if name in SIGNED:
        faults[SIGNS] = _wrong_signs(rows, size) > SIGNED[name]
        faults[POINTS] = _beaten(name, rows, size)
        faults[FACTOR] = _other_factor(*(x.reshape(-1, size) for x in (rows.w, rows.decoded, ours)))
    return Counter({what: int(bad.sum()) for what, bad in faults.items() if bad.any()})


def whole_faults(error: Error) -> Counter[str]:
    """Return the faults that count for a whole weight: a larger error must be usual."""
    faults = Counter(error.faults)
    for what, share in SHARES.items():
        if faults[what] <= share * error.blocks:
            del faults[what]
    return faults


def find_trends(error: Error, cut: float = 0.0) -> list[str]:
    """Return what is wrong with a weight's gain and its bias, beside those that we reach.

    cut  what a right encoder may lose or keep of the gain that ours does not
    """
    ours = error.reached
    if ours is None or not error.sum_sq:
        return []
    trends = []
    square, certain = ours.sum_sq_error / error.sum_sq, 8 / error.count**0.5
    gain = (error.sum_dot - ours.sum_dot) / error.sum_sq
    if abs(gain) > MAX_GAIN * square + certain * square**0.5 + UNIT + cut:
        trends.append(f"its values are {1 + gain:.4g} times those of our encoder")
    bias, root = (error.sum_error - ours.sum_error) / error.count, ours.sum_sq_error / error.count
    if abs(bias) > root**0.5 * (MAX_BIAS + certain) + UNIT * abs(error.max_abs):
        trends.append(f"its values are {bias:+.3g} off on average, beside those of our encoder")
    return trends


def _other_factor(w: Tensor, decoded: Tensor, ours: Tensor) -> NDArray[Any]:
    """Return which blocks another factor would fit than ours, beside their values."""
    found, least = (
        (w.double() * q.double()).sum(1) / q.double().square().sum(1) for q in (decoded, ours)
    )
    beside = (found / least).numpy()  # NaN for zeros, which have names of their own
    bad: NDArray[Any] = (beside < FITTING[0]) | (beside > FITTING[1])
    return bad


def _square_errors(w: Tensor, decoded: Tensor, size: int) -> NDArray[Any]:
    """Return the square error of each block of so many columns."""
    gap = (w.float() - decoded).reshape(-1, size).double()
    squares: NDArray[Any] = gap.square().sum(1).numpy()
    return squares


def _largest(decoded: Tensor, size: int) -> NDArray[Any]:
    """Return the largest magnitude of each block of so many columns."""
    largest: NDArray[Any] = decoded.reshape(-1, size).abs().amax(1).numpy()
    return largest


def _widest(decoded: Tensor, size: int) -> NDArray[Any]:
    """Return by how much values of 16 columns differ at most, in each block of so many."""
    sixteen = decoded.reshape(-1, size // 16, 16)
    widest: NDArray[Any] = (sixteen.amax(2) - sixteen.amin(2)).amax(1).numpy()
    return widest


def _wrong_signs(rows: Rows, size: int) -> NDArray[Any]:
    """Return the most wrong signs that eight columns of each block have."""
    w, q = (x.float().reshape(-1, 8) for x in (rows.w, rows.decoded))
    wrong = ((w < 0) != (q < 0)) & (q != 0) & (w.abs() >= SMALL)
    most: NDArray[Any] = wrong.sum(1).reshape(-1, size // 8).amax(1).numpy()
    return most


def _beaten(name: str, rows: Rows, size: int) -> NDArray[Any]:
    """Return which blocks have more points that none would choose than is usual among them."""
    w, decoded = (x.float().reshape(-1, size) for x in (rows.w, rows.decoded))
    stored = rows.blocks.reshape(len(w), -1)
    counts = i_points.count_beaten(name, w, stored, decoded)
    bad: NDArray[Any] = counts > BEATEN * i_points.num_points(name) + 2 * np.median(counts)
    return bad


def _far(name: str, rows: Rows) -> NDArray[Any]:
    """Return how many codes of each block are not the nearest."""
    start, stop, most = nearest.CODES[name]
    size, num_bytes = kinds.block(name)
    stored = rows.blocks.reshape(-1, num_bytes)
    ends = []
    for code in (0x00, 0xFF):
        end = stored.clone()
        end[:, start:stop] = code
        ends.append(codec.decode(name, end, size).numpy())
    rounded = np.zeros(len(stored))
    if most == 0:
        d = np.abs(stored[:, :2].numpy().copy().view(np.float16)[:, 0].astype(np.float64))
        rounded = np.where(d > 0, np.maximum(2.0**-11, 2.0**-25 / np.maximum(d, 2.0**-25)), 0)
    counts = np.zeros(len(stored), np.int64)
    values = codec.bits(rows.w).reshape(-1, size), rows.decoded.numpy().reshape(-1, size)
    nearest.count_far(*values, *ends, most, nearest.STEPS, rounded, counts)
    return counts
