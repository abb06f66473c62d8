"""The grids of IQ2 and IQ3: which codes of 4 or 8 columns may stand together.

    w ~ +-d l g[c]     c in 0..2 or 0..7, the codes of a point; encoders think of g as 2 c + 1

Only 256 to 1024 of the 6561 or 4096 combinations are points. For each of the others, a search looks
at the points of the `wanted` smallest distances, nearest first and then by number.

The points are facts of the format, taken from the `gguf` package; what is computed here is what
ggml computes when it starts (`iq2xs_init_impl`, `iq3xs_init_impl`).

A word holds the levels 2 c + 1 of a point, the first column lowest: 3 bits each for 8 columns, 4
for 4. A combination's place is sum(c_i base^i).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quant.ggml.lane_types import LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

WANTED = {"IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 1, "IQ3_XXS": 2, "IQ3_S": 3}


class Neighbours(NamedTuple):
    """Where a search looks for a point.

    first   int32 [places + 1]: neighbours of place u are rows first[u] to first[u + 1]; none of a
            point's own place
    words   int32 [rows, LANES], the last row of a place filled up with its first neighbour
    number  int32 [places]: the number of the point there, or -1
    """

    first: NDArray[np.int32]
    words: NDArray[np.int32]
    number: NDArray[np.int32]


@cache
def levels(name: str) -> NDArray[np.float32]:
    """Return what the points of a type decode to, float32 [points, columns]."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    return np.ascontiguousarray(kind.grid.reshape(kind.grid_shape), np.float32)


@cache
def neighbours(name: str) -> Neighbours:
    """Return the neighbours of every place."""
    points = _codes(name)
    columns = points.shape[1]
    base = 8 if columns == 4 else 3
    powers = base ** np.arange(columns)
    places = np.arange(base**columns)[:, None] // powers % base
    number = np.full(len(places), -1, np.int32)
    number[points @ powers] = np.arange(len(points))
    off = np.flatnonzero(number < 0)
    near, distance = _nearest(places[off], points, WANTED[name])
    row, point = np.nonzero(near)
    order = np.lexsort((point, distance[row, point], row))
    counts = near.sum(1)
    chunks = np.zeros(len(places), np.int32)
    chunks[off] = -(-counts // LANES)
    first = np.concatenate([[0], chunks.cumsum()]).astype(np.int32)
    words = _words(points)[point[order]]
    return Neighbours(first, _filled(words, counts, first[off], int(first[-1])), number)


def _codes(name: str) -> NDArray[np.int64]:
    """Return the codes of a type's points."""
    values = levels(name)
    codes: NDArray[np.int64] = np.searchsorted(np.unique(values), values)
    return codes


def _nearest(
    places: NDArray[np.int64], points: NDArray[np.int64], wanted: int
) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Return which points are at one of the smallest distances of a place, and the distances."""
    p, q = places.astype(np.float32), points.astype(np.float32)
    squares = np.square(p).sum(1)[:, None] + np.square(q).sum(1)
    distance = (squares - 2 * p @ q.T).astype(np.uint16)
    limit = distance.min(1)
    for _ in range(wanted - 1):
        beyond = np.where(distance > limit[:, None], distance, np.uint16(0xFFFF))
        limit = np.where(beyond.min(1) < 0xFFFF, beyond.min(1), limit)
    return distance <= limit[:, None], distance


def _words(points: NDArray[np.int64]) -> NDArray[np.int32]:
    bits = 16 // points.shape[1] if points.shape[1] == 4 else 3
    shifted = (2 * points + 1) << (bits * np.arange(points.shape[1]))
    words: NDArray[np.int32] = shifted.sum(1).astype(np.int32)
    return words


def _filled(
    words: NDArray[np.int32], counts: NDArray[np.int64], first: NDArray[np.int32], rows: int
) -> NDArray[np.int32]:
    """Lay lists of words, one after the other, into rows that begin at `first`."""
    starts = counts.cumsum() - counts
    out = np.repeat(words[starts], -(-counts // LANES) * LANES)
    inside = np.arange(len(words)) - np.repeat(starts, counts)
    out[np.repeat(first * LANES, counts) + inside] = words
    return np.ascontiguousarray(out.reshape(rows, LANES))
