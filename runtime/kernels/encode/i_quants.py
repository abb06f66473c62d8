"""IQ2_XXS to IQ3_S on the GPU: to the byte what the CPU's encoder writes.

Chosen for: `convert --device cuda` to these types. No layer of a model uses it.

    w ~ +-d (2 l + 1) g      g a point of the grid for 4 or 8 columns, l for 16 or 32 of them

`i_fit` fits the blocks, plain torch stores them: `quant.ggml.i_quants` has what differs between the
types, `quant.ggml.i_store` the layouts. Lists of neighbours are those of `quant.ggml.i_grids`, one
after the other without what fills up a row.

Traps: see k_quants. On a GPU torch multiplies with the reciprocal of a number: it divides by a
tensor only.

Shape letters: N rows, K columns, B super-blocks of 256 columns, n blocks of a super-block.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.encode.i_fit import COUNT_BITS, begin_by_levels_kernel, fit_i_kernel
from runtime.kernels.launch import use_triton

if TYPE_CHECKING:
    from torch import Tensor

SUPER = 256
LANES = 32  # blocks of a program: one to a thread of a warp


class Grid(NamedTuple):
    """Where a search looks for points, see `quant.ggml.i_grids.Neighbours`.

    lists   int32 [places]: where the neighbours of a place begin in `words`, and in the low bits
            how many there are
    words   int32
    number  int32 [places]
    """

    lists: Tensor
    words: Tensor
    number: Tensor


class Fits(NamedTuple):
    """What a search leaves of B super-blocks.

    scales  float32 [B, n]
    places  int64 [B, n, m]: of four points, 16 bits each
    signs   int32 [B, n]: of columns in eights, 8 bits each
    """

    scales: Tensor
    places: Tensor
    signs: Tensor


def encode_i_reference(name: str, w_NK: Tensor, importance: Tensor | None = None) -> Tensor:
    """Say what `encode_i` computes: the blocks of `quant.ggml.codec`."""
    from quant.ggml import codec

    weights = None if importance is None else importance.cpu()
    return codec.encode(name, w_NK.detach().cpu(), importance=weights).to(w_NK.device)


def encode_i(name: str, w_NK: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the super-blocks of a weight, uint8 [N, row_bytes].

    name        "IQ2_XXS" to "IQ3_S"
    w_NK        [N, K] float, contiguous and finite; K a multiple of 256
    importance  [K] float32, what an error of each column weighs; without one the columns of IQ2_XXS
                and IQ2_XS weigh alike
    """
    assert w_NK.shape[1] % SUPER == 0, f"rows of {w_NK.shape[1]} are no super-blocks"
    if not use_triton(w_NK):
        return encode_i_reference(name, w_NK, importance)
    assert w_NK.is_contiguous(), "super-blocks must follow each other"
    if not w_NK.numel():
        return encode_i_reference(name, w_NK)
    return _stored(name, _fitted(name, w_NK, importance)).view(w_NK.shape[0], -1)


@cache
def _grid(name: str, device: torch.device) -> Grid:
    """Return the lists of neighbours of a type."""
    import numpy as np

    from quant.ggml.i_grids import neighbours

    first, words, number = neighbours(name)
    places, rows = len(number), np.diff(first)
    leads = np.repeat(words[first[:-1][rows > 0], 0], rows[rows > 0])
    filled = words == leads[:, None]
    filled[first[:-1][rows > 0], 0] = False
    counts = np.zeros(places, np.int64)
    np.add.at(counts, np.repeat(np.arange(places), rows), (~filled).sum(1))
    lists = (counts.cumsum() - counts) << COUNT_BITS.value | counts
    arrays = lists.astype(np.int32), words[~filled], number
    return Grid(*(torch.from_numpy(array).to(device) for array in arrays))


def _fitted(name: str, w_NK: Tensor, importance: Tensor | None) -> Fits:
    """Return what the search makes of the blocks."""
    from quant.ggml.i_quants import BY_LEVELS, KINDS, LEVELS

    kind, device = KINDS[name], w_NK.device
    if importance is None and kind.plain is None:
        importance = torch.ones(SUPER, device=device)
    num_super, n = w_NK.numel() // SUPER, SUPER // kind.columns
    num_points = kind.columns // kind.group
    fits = Fits(
        torch.empty(num_super, n, device=device),
        torch.empty(num_super, n, -(-num_points // 4), dtype=torch.int64, device=device),
        torch.empty(num_super, n, dtype=torch.int32, device=device),
    )
    source = w_NK, None if importance is None else importance.float().contiguous()
    sizes = num_super * n, SUPER if importance is None else importance.numel()
    shape = {"COLUMNS": kind.columns, "EVEN": kind.signs == 7, "SPREAD": kind.spread}
    grid = (-(-num_super * n // LANES),)
    options = {"LANES": LANES, "num_warps": 1, "enable_fp_fusion": False}
    begun = torch.empty_like(fits.scales) if name == BY_LEVELS else None
    if begun is not None:
        begin_by_levels_kernel[grid](*source, begun, *sizes, LEVELS=LEVELS, **shape, **options)
    fit_i_kernel[grid](
        *source,
        *_grid(name, device)[:2],
        begun,
        *fits,
        *sizes,
        GROUP=kind.group,
        LEAST=kind.smallest,
        PLAIN=kind.plain or 0.0,
        ATTEMPTS=kind.attempts[0],
        STEP=kind.attempts[1],
        AGAIN=int(kind.again),
        **shape,
        **options,
    )
    return fits


def _stored(name: str, fits: Fits) -> Tensor:
    """Return the super-blocks, uint8 [B, bytes]."""
    from quant.ggml.i_quants import KINDS

    kind, num_super = KINDS[name], len(fits.scales)
    places = fits.places.view(torch.int16).view(num_super, -1, fits.places.shape[2] * 4)
    places = places[:, :, : kind.columns // kind.group].reshape(num_super, -1)
    points = _grid(name, places.device).number[places.int()]
    signs = fits.signs.view(torch.uint8).view(num_super, -1, 4)[:, :, : kind.columns // 8].int()
    ones = (1 << kind.signs) - 1
    signs = torch.where((fits.scales < 0)[:, :, None], signs ^ ones, signs).reshape(num_super, -1)
    halves, levels = _levels(fits.scales, kind.factor)
    return torch.cat([halves, *LAYOUTS[name](points, signs, levels)], 1)


def _levels(scales: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return d as bytes [B, 2], and l [B, n]."""
    size = scales.abs()
    top = size.amax(1, keepdim=True)
    d = top / torch.full_like(top, 31)
    y = 0.5 * (torch.ones_like(d) / d * size - 1)
    words = (torch.where(y.isnan(), 0.0, y) + 12582912.0).view(torch.int32)  # NaN is 0 there
    levels = ((words & 0x7FFFFF) - 0x400000).clamp(0, 15)
    return _bytes((d * factor).half()), torch.where(top > 0, levels, 0)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _packed(x: Tensor, bits: int, count: int) -> Tensor:
    """Return int32 [B, m / count] of x [B, m]: numbers of so many bits, the first lowest."""
    shifts = torch.arange(count, dtype=torch.int32, device=x.device) * bits
    return (x.view(len(x), -1, count) << shifts).sum(2, dtype=torch.int32)


def _signs_and_levels(signs: Tensor, levels: Tensor) -> Tensor:
    """Return four of seven signs and l, int32 [B, 8]."""
    return _packed(signs, 7, 4) | levels << 28


def _iq2_xxs(points: Tensor, signs: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
    pairs = torch.stack([_packed(points, 8, 4), _signs_and_levels(signs, levels)], 2)
    return (_bytes(pairs).view(len(points), -1),)


def _iq3_xxs(points: Tensor, signs: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
    return points.byte(), _bytes(_signs_and_levels(signs, levels))


def _iq2_xs(points: Tensor, signs: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
    return _bytes((points | signs << 9).short()), _packed(levels, 4, 2).byte()


def _iq2_s(points: Tensor, signs: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
    high, low = _packed(points >> 8, 2, 4), points & 255
    return low.byte(), signs.byte(), high.byte(), _packed(levels, 4, 2).byte()


def _iq3_s(points: Tensor, signs: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
    high, low = _packed(points >> 8, 1, 8), points & 255
    return low.byte(), high.byte(), signs.byte(), _packed(levels, 4, 2).byte()


# What follows d.
LAYOUTS = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
