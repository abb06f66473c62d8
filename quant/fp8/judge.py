"""Whether FP8 blocks are those of a right encoder, whichever it was.

A right encoder chooses a scale s0 for each block, rounds every w / s0 to the nearest E4M3 code, and
stores a scale s. `quant.fp8.intervals` finds the scales [low, high] that explain all codes of a
block; with 16384 weights to a block they agree to about 1e-5. Then

    codes   low <= high, or the codes are those of w / s computed in bfloat16 (compressed-tensors)
    scale   s is in [low, high]; or it is the bfloat16 nearest to a scale in there, rounded after
            quantising; or it was fitted to the codes afterwards, and is nearer to <w, c> / <c, c>,
            where their error is least, than [low, high] reaches
    grid    where the weights are numbers on a grid already, of an FP8 source, [low, high] is wide;
            there s is the step of that grid, or the next power of two
    ties    under a scale that is a power of two, w / s is exact: all ties of a block went to the
            even code, or all the same way, as where s0 was a little beside s
    size    amax / 448 <= s0 <= 2 amax / 448, up to the next power of two: E4M3 is floating, so
            within a factor of 2 no scale is worse. Above it is a power of two too large, unless
            amax is below 1e-4, to which DeepGEMM's encoder raises it
    clip    below it, weights saturate: a search did that if it leaves less error than amax / 448
            does, counted in squares or in powers of 2.4 (llm-compressor's norm)

Float32 arithmetic rounds w / s0 by at most 2^-22; TIES grants four times that. Rounding s to
bfloat16 after a search adds at most 2^-8 |w| to each error: by Minkowski's inequality that much of
the weight's norm.

Rows whose block is not whole, and those of one scale for a tensor or more (engines share it among
fused matrices), have no amax of their own: their size is not judged.

Shape letters: N rows, K columns, R x C grid of blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from numpy import empty, float32, int64

from quant.fp8 import cpu, intervals
from quant.fp8 import reference as fp8
from quant.measure import E4M3_MAX

if TYPE_CHECKING:
    from torch import Tensor

TIES = 2.0**-20
FLOOR = 1e-4 / E4M3_MAX
NORM = 2.4
# Weights on a grid: the least relative width of [low, high], the square of how far BF16 may have
# moved them, and how many numbers say that it is no chance.
WIDE, ON_GRID, DISTINCT = 2.0**-6, 2.0**-16, 16

SIGN = "blocks have codes of the wrong sign"
CODES = "blocks have codes that are not the nearest under any one scale"
TORN = "blocks have ties that no rounding of these weights leaves"
SCALE = "blocks have another scale than the one their codes were taken with"
LARGE = "blocks have a scale a power of two or more too large"
CLIPPED = "blocks have a scale too small: weights are cut off, with more error than without"


class Blocks(NamedTuple):
    """Rows of a weight and the scales of their blocks.

    scale   [R, C] float32
    block   rows and columns of one
    narrow  the scale is stored in float16
    whole   every block is here from its first row to its last
    """

    w: Tensor
    codes: Tensor
    scale: Tensor
    block: tuple[int, int]
    narrow: bool = False
    whole: bool = True


def blocks_of(
    w: Tensor, codes: Tensor, each: Tensor, block: tuple[int | None, int | None], *, narrow: bool
) -> Blocks:
    """Return rows by the blocks that share a scale.

    each   the scales of every row, float32 [N, G]
    block  rows and columns of one; None: all
    """
    count, (height, columns) = len(codes), (block[0], block[1] or codes.shape[1])
    if height is None:
        return Blocks(w, codes, each[:1].contiguous(), (count, columns), narrow, whole=False)
    first = torch.arange(0, count, height).repeat_interleave(height)[:count]
    whole = bool((each == each[first]).all())
    grid, rows = (each[::height], height) if whole else (each, 1)
    return Blocks(w, codes, grid.contiguous(), (rows, columns), narrow, whole)


def find_faults(blocks: Blocks) -> Counter[str]:
    """Return the number of blocks by what is wrong with them; w, codes and scales are finite."""
    low, high, top, signs = _intervals(blocks)
    scale, half = blocks.scale, _half_step(blocks.scale, narrow=blocks.narrow)
    base = top / E4M3_MAX
    explained = (low <= high * (1 + TIES)) & (high > 0)
    near = (low <= scale * (1 + TIES)) & (scale * (1 - TIES) <= high)
    rounded = (low <= scale + half) & (scale - half <= high)
    doubtful = ~(explained & (near | rounded)) & (top > 0)
    clipped = (scale < base * (1 - 2.0**-8)) & blocks.whole
    if doubtful.any():
        in_bfloat16 = _count_in_bfloat16(blocks) == 0
        doubtful, explained = doubtful & ~in_bfloat16, explained | in_bfloat16
    if (doubtful & explained).any():
        doubtful = doubtful & ~(explained & _is_refitted(blocks, low, high))
    if (clipped & ~doubtful).any():
        clipped = clipped & _lost_by_clipping(blocks, half / scale)
    wide = (high > low * (1 + WIDE)) & near & (scale > FLOOR * (1 + TIES))
    if blocks.whole and wide.any() and not _are_powers_of_two(scale):
        doubtful = doubtful | (wide & _is_off_grid(blocks, half))
    torn = _have_torn_ties(blocks) if _are_powers_of_two(scale) else torch.zeros_like(doubtful)
    large = (scale > 2 * base * (1 + TIES)) & (scale > FLOOR) & (top > 0) & blocks.whole
    faults = {
        SIGN: signs > 0,
        CODES: doubtful & ~explained,
        TORN: near & torn & ~doubtful,
        SCALE: doubtful & explained,
        LARGE: large & ~doubtful,
        CLIPPED: clipped & ~doubtful,
    }
    return Counter({what: int(bad.sum()) for what, bad in faults.items() if bad.any()})


def _intervals(blocks: Blocks) -> tuple[Tensor, ...]:
    """Return low, high, amax and the number of wrong signs of each block."""
    shape = tuple(blocks.scale.shape)
    low, high, top = (empty(shape, float32) for _ in range(3))
    signs = empty(shape, int64)
    size = cpu.unsigned(blocks.block, blocks.w.shape)
    intervals.find(cpu.bits(blocks.w), cpu.bits(blocks.codes), *size, low, high, top, signs)
    return tuple(map(torch.from_numpy, (low, high, top, signs)))


def _half_step(scale: Tensor, *, narrow: bool) -> Tensor:
    """Return how far rounding may have moved each scale: 0 for one that only float32 holds."""
    exponent = torch.frexp(scale).exponent - 1
    half = torch.ldexp(torch.ones_like(scale), exponent - (11 if narrow else 8))
    if narrow:
        half = half.clamp(min=2.0**-25)
    return torch.where((scale.bfloat16().float() == scale) | narrow, half, 0.0)


def _count_in_bfloat16(blocks: Blocks) -> Tensor:
    """Return how many codes of each block are not those of w / s computed in bfloat16."""
    counts = empty(tuple(blocks.scale.shape), int64)
    size, scale = cpu.unsigned(blocks.block, blocks.w.shape), blocks.scale.numpy()
    intervals.differ_in_bfloat16(cpu.bits(blocks.w), cpu.bits(blocks.codes), scale, *size, counts)
    return torch.from_numpy(counts)


def _are_powers_of_two(scale: Tensor) -> bool:
    """Whether all scales are: where only some are, that is chance, and w / s was not exact."""
    return bool((torch.frexp(scale).mantissa == 0.5).all())


def _have_torn_ties(blocks: Blocks) -> Tensor:
    """Return which blocks have ties on odd codes, though ties went both ways."""
    counts = empty((*blocks.scale.shape, 5), int64)
    size, scale = cpu.unsigned(blocks.block, blocks.w.shape), blocks.scale.numpy()
    intervals.count_ties(cpu.bits(blocks.w), cpu.bits(blocks.codes), scale, *size, counts)
    odd, *ways = (torch.from_numpy(counts) > 0).unbind(-1)
    down, up, minus_down, minus_up = ways
    return odd & ((down & up) | (minus_down & minus_up))


def _is_refitted(blocks: Blocks, low: Tensor, high: Tensor) -> Tensor:
    """Return which scales are nearer to the one of least error than those that give the codes."""
    w, codes = blocks.w.float(), blocks.codes.float()
    fitted = _sum(w * codes, blocks) / _sum(codes * codes, blocks)
    reach = torch.maximum((low - fitted).abs(), (high - fitted).abs())
    moved = _half_step(blocks.scale, narrow=blocks.narrow) + TIES * fitted
    return (blocks.scale - fitted).abs() <= reach + moved


def _is_off_grid(blocks: Blocks, half: Tensor) -> Tensor:
    """Return which scales are not the step of the grid that their weights are numbers on."""
    w, codes = blocks.w.float(), blocks.codes.float()
    step = _sum(w * codes, blocks) / _sum(codes * codes, blocks)
    missed = w - codes * fp8.expand(step.float(), blocks.block, w.shape)
    exact = _sum(missed.square(), blocks) <= ON_GRID * _sum(w.square(), blocks)
    exact &= _count_magnitudes(blocks) >= DISTINCT
    return exact & ((blocks.scale - step).abs() > half + 2.0**-8 * step)


def _count_magnitudes(blocks: Blocks) -> Tensor:
    """Return how many magnitudes the codes of each block have."""
    grid = blocks.scale.shape
    place = fp8.expand(torch.arange(grid.numel()).view(grid), blocks.block, blocks.w.shape)
    index = place.long() * 128 + (blocks.codes.view(torch.uint8) & 127).long()
    found = torch.bincount(index.reshape(-1), minlength=grid.numel() * 128)
    return (found.view(*grid, 128) > 0).sum(-1)


def _lost_by_clipping(blocks: Blocks, moved: Tensor) -> Tensor:
    """Return which blocks have more error than amax / 448 leaves, however that is counted."""
    w = blocks.w.float()
    error = w - fp8.dequantize(blocks.codes, blocks.scale, blocks.block)
    base = (fp8.block_amax(w, blocks.block) / E4M3_MAX).clamp(min=fp8.SMALLEST_SCALE)
    worse = torch.ones_like(blocks.scale, dtype=torch.bool)
    plain = []
    for dtype in (torch.float32, torch.bfloat16):
        scale = fp8.expand(base.to(dtype).float(), blocks.block, w.shape)
        plain.append(w - _round(blocks.w, scale, dtype) * scale)
    for power in (2.0, NORM):
        norms = [_sum(e.abs() ** power, blocks) ** (1 / power) for e in (error, *plain, w)]
        allowed = torch.maximum(norms[1], norms[2]) + moved * norms[3]
        worse &= norms[0] > allowed * (1 + TIES)
    return worse


def _round(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of the codes nearest to w / scale, computed in this type."""
    ratio = (w.to(dtype) / scale.to(dtype)).float().clamp(-E4M3_MAX, E4M3_MAX)
    return ratio.to(torch.float8_e4m3fn).float()


def _sum(x_NK: Tensor, blocks: Blocks) -> Tensor:
    """Return the sum over each block, [R, C] float64."""
    (rows, cols), (num_rows, num_cols) = blocks.block, blocks.scale.shape
    right, below = num_cols * cols - x_NK.shape[1], num_rows * rows - x_NK.shape[0]
    padded = torch.nn.functional.pad(x_NK.double(), (0, right, 0, below))
    return padded.reshape(num_rows, rows, num_cols, cols).sum((1, 3))
