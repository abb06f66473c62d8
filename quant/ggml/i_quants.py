"""I-quants on the CPU: rows of IQ2_XXS to IQ3_S, to the byte what ggml's C writes, and back.

`i_grids` has the points, `i_magnitudes` readies blocks, `i_fit` fits them, `i_store` stores them,
`i_decode` decodes. Each call works on one thread, and without the interpreter's lock while its
loops run. Rows are whole super-blocks of 256 columns.

IQ2_XXS and IQ2_XS need an importance: ggml refuses without. Here all columns then weigh alike, as
llama-quantize has it where no token was counted.

Shape letters: N rows, K columns, B super-blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quant.ggml import i_decode, i_fit, i_grids, i_magnitudes, i_store, k_levels
from quant.ggml.batches import SUPER, batches, decode_super_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

f32 = np.float32

# Super-blocks whose blocks fill the lanes.
TOGETHER = 2


class Kind(NamedTuple):
    """How a type is searched.

    columns   of a block
    group     columns of a point
    signs     that are stored of eight columns: 7, where the eighth makes the minus signs even
    smallest  a block below it is nothing
    spread    f of the weights, see `i_magnitudes`
    plain     the share of f mean(w^2) without an importance, None for one that needs one
    attempts  scales that are tried on either side, and the step between them
    again     what is taken again
    factor    of d
    store     the loop that stores super-blocks, and `decode` the one that decodes them
    """

    columns: int
    group: int
    signs: int
    smallest: float
    spread: int
    plain: float | None
    attempts: tuple[int, float]
    again: np.int32
    factor: float
    store: Callable[..., None]
    decode: Callable[..., None]


XXS, XS, S = (
    (i_store.store_xxs, i_decode.decode_xxs),
    (i_store.store_xs, i_decode.decode_xs),
    (i_store.store_s, i_decode.decode_s),
)
KINDS = {
    "IQ2_XXS": Kind(32, 8, 7, 1e-15, 1, None, (6, 0.1), i_fit.ALL, 1.0, *XXS),
    "IQ2_XS": Kind(16, 8, 7, 1e-15, 1, None, (9, 0.1), i_fit.OFF, 1.0, *XS),
    "IQ2_S": Kind(16, 8, 8, 1e-8, 2, 0.25, (9, 0.1), i_fit.OFF, 0.9875, *S),
    "IQ3_XXS": Kind(32, 4, 7, 1e-8, 2, 0.0, (15, 0.2), i_fit.OFF, 1.0125, *XXS),
    "IQ3_S": Kind(32, 4, 8, 0.0, 2, 0.0, (9, 0.2), i_fit.ALL_IF_OFF, 1.033, *S),
}
# Searched without a grid first, for levels 0 to 4.
BY_LEVELS, LEVELS = "IQ2_XXS", 4


def encode_rows(
    name: str, x_NK: NDArray[Any], weights: NDArray[Any] | None, out: NDArray[Any]
) -> None:
    """Fill in the super-blocks of rows.

    name     "IQ2_XXS" to "IQ3_S"
    x_NK     [N, K] float32, or uint16, the bits of bfloat16; finite, magnitudes below 2^32
    weights  [K] float32, what an error of each column weighs (an imatrix), or None
    out      uint8 [N, row_bytes], contiguous; a scale that float16 cannot hold becomes infinite
    """
    importance = _importance(KINDS[name], weights)
    for w, first, rows in batches(x_NK, out, TOGETHER):
        _encode(name, w, importance, first, rows)


def decode_rows(name: str, data: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill out, float32 [N, K] and contiguous, with the values of data, uint8 [N, row_bytes]."""
    decode, levels = KINDS[name].decode, i_grids.levels(name)
    decode_super_blocks(data, out, lambda rows, values: decode(rows, levels, values))


def _importance(kind: Kind, weights: NDArray[Any] | None) -> NDArray[Any]:
    """Return [C, 256], [0, 256] for none."""
    if weights is not None:
        return np.ascontiguousarray(weights, f32).reshape(-1, SUPER)
    return np.ones((int(kind.plain is None), SUPER), f32)


def _encode(
    name: str, w: NDArray[Any], importance: NDArray[Any], first: np.uint64, out: NDArray[Any]
) -> None:
    kind = KINDS[name]
    x, v, signs = np.empty(w.shape, f32), np.empty(w.shape, f32), np.empty((len(w), 32), np.uint8)
    plain = f32(kind.plain or 0)
    even = kind.signs == 7
    i_magnitudes.prepare(w, importance, first, f32(kind.spread), plain, even, x, v, signs)
    tops, scales = _begin(name, x, v)
    signs.reshape(len(tops), -1)[tops == 0] = 0
    grid, (attempts, step) = i_grids.neighbours(name), kind.attempts
    words = np.empty((kind.columns // kind.group, len(tops)), np.int32)
    sizes = np.uint64(kind.columns), np.uint64(kind.group)
    search = np.int32(attempts), f32(step), kind.again
    i_fit.fit(
        x.reshape(-1), v.reshape(-1), tops, grid.first, grid.words.reshape(-1),
        *sizes, *search, scales, words,
    )  # fmt: skip
    kind.store(scales, words, signs, grid.number, f32(kind.factor), out)


def _begin(name: str, x: NDArray[Any], v: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the top of each block and the scale it begins with."""
    kind = KINDS[name]
    blocks = x.reshape(-1, kind.columns)
    tops, scales = np.empty((2, len(blocks)), f32)
    if name == BY_LEVELS:
        levels = np.empty(x.size, np.int32)
        k_levels.weighted_levels(x.reshape(-1), v.reshape(-1), f32(LEVELS), levels, scales)
        return np.maximum(scales, 0) * f32(3), scales
    largest = f32(2 * 7 + 1 if kind.group == 4 else 2 * 2 + 1)
    i_magnitudes.find_tops(blocks, f32(kind.smallest), largest, tops, scales)
    return tops, scales
