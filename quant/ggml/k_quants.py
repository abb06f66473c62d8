"""K-quants on the CPU: rows of Q2_K to Q6_K, to the byte what ggml's C writes, and back.

`k_lines` and `k_steps` fit scales, `k_levels` rounds those of lines, `k_store` stores them and the
codes, `k_decode` decodes. Each call works on one thread, and without the interpreter's lock while
its loops run. Rows follow each other in memory and are whole super-blocks of 256 columns, so loops
see super-blocks only.

Shape letters: N rows, K columns, B super-blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quant.ggml import k_decode, k_levels, k_lines, k_steps, k_store
from quant.ggml.batches import SUPER, batches, decode_super_blocks
from quant.ggml.lane_types import LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

f32 = np.float32


class Line(NamedTuple):
    """A type with minima: columns of a block, largest code and level, slopes that are tried."""

    columns: int
    most: int
    largest: int
    slopes: tuple[float, float, int]


LINES = {
    "Q2_K": Line(16, 3, 15, (-0.5, 0.1, 16)),
    "Q4_K": Line(32, 15, 63, (-1.0, 0.1, 21)),
    "Q5_K": Line(32, 31, 63, (-0.5, 0.1, 16)),
}
WEIGHTED_SLOPES = (-0.9, 0.05, 37)

DECODERS = {
    "Q2_K": k_decode.decode_q2_k,
    "Q3_K": k_decode.decode_q3_k,
    "Q4_K": k_decode.decode_q4_k,
    "Q5_K": k_decode.decode_q4_k,
    "Q6_K": k_decode.decode_q6_k,
}


def encode_rows(
    name: str, x_NK: NDArray[Any], weights: NDArray[Any] | None, out: NDArray[Any]
) -> None:
    """Fill in the super-blocks of rows.

    name     "Q2_K" to "Q6_K"
    x_NK     [N, K] float32, or uint16, the bits of bfloat16; finite, magnitudes below 2^32
    weights  [K] float32, what an error of each column weighs (an imatrix), or None
    out      uint8 [N, row_bytes], contiguous; a scale that float16 cannot hold becomes infinite
    """
    importance = np.empty(0, f32) if weights is None else np.ascontiguousarray(weights, f32)
    importance = importance.reshape(-1, SUPER)
    encode = _encode_lines if name in LINES else _encode_steps
    for w, first, rows in batches(x_NK, out, LANES):
        encode(name, w, importance, first, rows)


def decode_rows(name: str, data: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill out, float32 [N, K] and contiguous, with the values of data, uint8 [N, row_bytes]."""
    decode_super_blocks(data, out, DECODERS[name])


def _encode_lines(
    name: str, w: NDArray[Any], importance: NDArray[Any], first: np.uint64, out: NDArray[Any]
) -> None:
    line, weighted = LINES[name], len(importance) > 0
    num_blocks = len(w) * SUPER // line.columns
    fits = np.empty((5, num_blocks), f32)
    slopes = np.array(WEIGHTED_SLOPES if weighted else line.slopes, f32)
    k_lines.fit(w, importance, first, np.uint64(line.columns), f32(line.most), slopes, fits)
    levels, units = np.empty((2, num_blocks), np.int32), np.empty((2, len(w)), f32)
    for values, level, unit in zip(fits, levels, units, strict=False):
        if weighted:
            k_levels.weighted_levels(values, fits[4], f32(line.largest), level, unit)
        else:
            k_levels.levels(values, f32(line.largest), level, unit)
    store = k_store.store_q2_k if name == "Q2_K" else k_store.store_q4_k
    store(w, fits, weighted, levels[0], levels[1], units[0], units[1], out)


def _encode_steps(
    name: str, w: NDArray[Any], importance: NDArray[Any], first: np.uint64, out: NDArray[Any]
) -> None:
    six, num_blocks = name == "Q6_K", w.size // 16
    fits, kept = np.empty((3, num_blocks), f32), np.empty((0, SUPER), f32)
    if six or len(importance):
        k_steps.fit(w, importance, first, f32(32 if six else 4), fits)
    else:
        kept = np.empty(w.shape, f32)
        k_steps.fit_by_moves(w, fits, kept)
    level, unit = np.empty(num_blocks, np.int32), np.empty(len(w), f32)
    if six or not len(importance):
        k_steps.levels(fits[0], f32(128 if six else 32), level, unit)
    else:
        k_steps.weighted_levels(fits[0], fits[2], level, unit)
    if six:
        k_store.store_q6_k(w, fits, level, unit, out)
    else:
        k_store.store_q3_k(w, fits, kept, level, unit, out)
