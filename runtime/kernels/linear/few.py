"""Two to eight rows times a stored weight: decoding a few sequences, or verifying drafted tokens.

Chosen for: `PRODUCT`, `PRODUCTS` and `UPDATE` of 2 to 8 rows on a GPU, unless packed.

    y[m, n] = sum_k x[m, k] * w[n, k]                   summed in float32, rounded once
    parts      of the sums over K, in float32, which the next norm adds (norm.rms)
    heads      of x that are still to be scaled by their norm (norm.gated): the sums are, instead

How a program multiplies: see few_tile. Where a weight has few rows its columns are split among
programs, so that enough of it is on the way. Adding their sums costs no kernel: only what goes into
the residual stream is split, and the norm after it reads the parts.

Shape letters: M rows of x, N outputs, K inputs, P parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kernels.launch import jit, tl, use_triton
from runtime.kernels.linear.few_tile import (
    ROWS_OF_X,
    SHORT_ROWS,
    TOGETHER,
    columns_of,
    short_tile_of,
    store_rows,
    tile_of,
    tile_sums,
)
from runtime.kernels.linear.weight import NO_PRODUCT, Stored, check_rows, product_reference
from runtime.kernels.norm.rms import Parts
from runtime.kernels.overlap import early, start_next

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.encode.rows import Codes
    from runtime.kernels.linear.weight import Weight
    from runtime.kernels.norm.gated import Unscaled

# Measured on an H200, 8 rows: down of 27B 28.0 us in 3 parts, 31 in 2; four layers of 35B-A3B with
# out in 4 parts 380 us, in 8 387.
# With the norm, down of 9B 28.2 in 6 parts of early tiles, out 13.1 in 4, 13.0 in 3; 31.2 and 14.8
# by more whole tiles than are on the GPU at once.
_PROGRAMS = 480
_MOST_PARTS, _MOST_FP8_PARTS = 8, 4
# of an early tile
_FEWEST_STEPS = 4
# a program for each multiprocessor, at least, where columns are not split
_FEWEST_PROGRAMS = 128
Norm = dict[str, Any]
_NO_NORM: Norm = {"squares": None, "eps": 0.0, "HEAD": 1, "PARTS": 1}
_NO_TILE = {"STEP2": 1, "BLOCK_K2": 1, "EVEN2": 1}


def few_linear(x_MK: Tensor, weight: Weight) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype, M at most 8."""
    return few_products(x_MK, weight)[0]


def few_products(x_MK: Tensor, *weights: Weight, codes: Codes | None = None) -> tuple[Tensor, ...]:
    """Return x @ weight.T [M, N] in x's dtype for each of one or two weights, in one kernel.

    x_MK     [M, K], rows contiguous in themselves
    weights  [N, K] in x's dtype, or an Fp8Weight, each; the second one is small
    codes    None: so few rows have none
    """
    assert codes is None, "so few rows are not quantised"
    if not use_triton(x_MK):
        return tuple(product_reference(x_MK, weight) for weight in weights)
    stored = [Stored.of(weight) for weight in weights]
    outputs = tuple(x_MK.new_empty((x_MK.shape[0], w.values.shape[0])) for w in stored)
    tile = tile_of(stored[0])
    if outputs[0].shape[1] < _FEWEST_PROGRAMS * tile["BLOCK_N"]:
        tile = short_tile_of(stored[0])
    _launch(x_MK, stored, outputs, tile, x_MK.shape[1])
    return outputs


def few_parts(x_MK: Tensor, weight: Weight) -> Tensor | Parts:
    """Return x @ weight.T [M, N] as parts of its sums."""
    if not use_triton(x_MK):
        return product_reference(x_MK, weight)
    return _parts(x_MK, weight)


def few_heads(x: Unscaled, weight: Tensor) -> Parts:
    """Return x @ weight.T [M, N] as parts of its sums, for a small weight of floats.

    x  M at most 8; heads hold whole slices of a step's columns
    """
    tile = tile_of(Stored.of(weight))
    assert tile["SLICES"] > 1, "only sliced tiles scale x"
    assert x.d % tile["BLOCK_K"] == 0, "a slice lies within a head"
    norm = {"squares": x.squares, "eps": x.eps, "HEAD": x.d, "PARTS": x.squares.shape[2]}
    return _parts(x.y, weight, norm)


def _parts(x_MK: Tensor, weight: Weight, norm: Norm = _NO_NORM) -> Parts:
    stored, (m, k) = Stored.of(weight), x_MK.shape
    n, tile = stored.values.shape[0], tile_of(stored, split=True)
    most = _MOST_FP8_PARTS if stored.is_fp8 else _MOST_PARTS
    wanted = min(_num_parts(-(-n // tile["BLOCK_N"]), k, tile), most)
    part = -(-k // (wanted * tile["STEP"])) * tile["STEP"]
    sums_PMN = x_MK.new_empty((-(-k // part), m, n), dtype=torch.float32)
    _launch(x_MK, [stored], (sums_PMN,), tile, part, norm)
    return Parts(sums_PMN)


def _num_parts(tiles: int, k: int, tile: dict[str, int]) -> int:
    """Return in how many parts of so many tiles, of k columns, there are enough programs."""
    if not tile["EARLY"]:
        return -(-_PROGRAMS // tiles)
    return max(1, min(TOGETHER // tiles, -(-k // (_FEWEST_STEPS * tile["STEP"]))))


def _launch(
    x_MK: Tensor,
    weights: list[Stored],
    outputs: tuple[Tensor, ...],
    tile: dict[str, int],
    part: int,
    norm: Norm = _NO_NORM,
) -> None:
    """Fill the outputs, [M, N] or [P, M, N] with `part` columns in each part."""
    (first, *more), (m, k) = weights, check_rows(x_MK, ROWS_OF_X, *weights)
    second, of_second = NO_PRODUCT, _NO_TILE
    n = outputs[0].shape[-1]
    programs = -(-n // tile["BLOCK_N"])
    if more:
        programs += -(-outputs[1].shape[-1] // SHORT_ROWS)
        second = more[0].to_product(outputs[1])
        of_second = _second_columns(more[0], first, tile)
    _few_kernel[(programs, -(-k // part))](
        x_MK,
        m,
        k,
        x_MK.stride(0),
        part,
        first.values,
        first.scale,
        outputs[0],
        n,
        *first.scale_strides,
        *second,
        EDGE=first.edge,
        EDGE2=more[0].edge if more else 0,
        BLOCK_M=ROWS_OF_X,
        EVEN=int(k % tile["STEP"] == 0),
        ROWS2=SHORT_ROWS,
        **tile,
        **of_second,
        **norm,
        **early(),
    )


def _second_columns(second: Stored, first: Stored, tile: dict[str, int]) -> dict[str, int]:
    """Return the columns of the second weight's tile.

    As many of a step as in the first one's, if that is whole; else as many bytes of a slice.
    """
    columns, slices = tile["STEP"] // tile["SLICES"], tile["SLICES"]
    like = second if slices == 1 else first
    own = columns_of(second, columns * like.values.element_size(), slices)
    even = second.values.shape[1] % own["STEP"] == 0
    return {"STEP2": own["STEP"], "BLOCK_K2": own["BLOCK_K"], "EVEN2": int(even)}


@jit
def _few_kernel(
    x,
    M,
    K,
    x_row,
    part,
    weight,
    scale,
    y,
    N,
    scale_row,
    scale_col,
    weight2,
    scale2,
    y2,
    N2,
    scale_row2,
    scale_col2,
    squares,
    eps,
    EDGE: tl.constexpr,
    EDGE2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    ASKED: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS2: tl.constexpr,
    STEP2: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    EVEN2: tl.constexpr,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Take a tile of the second weight, whose programs come first, or one of the first weight."""
    start_next()
    tile, second = tl.program_id(0), tl.cdiv(N2, ROWS2)
    first = tl.program_id(1) * part
    last = tl.minimum(first + part, K)
    if weight2 is None or tile >= second:
        n = (tile - second) * BLOCK_N + tl.arange(0, BLOCK_N)
        sums = tile_sums(
            x,
            M,
            x_row,
            weight,
            scale,
            tl.minimum(n, N - 1),
            K,
            first,
            last,
            scale_row,
            scale_col,
            EDGE,
            BLOCK_N,
            BLOCK_M,
            STEP,
            BLOCK_K,
            SLICES,
            STAGES,
            ASKED,
            EARLY,
            EVEN,
            squares,
            eps,
            HEAD,
            PARTS,
        )
        store_rows(y + tl.program_id(1).to(tl.int64) * M * N, sums, n, M, N)
    else:
        n2 = tile * ROWS2 + tl.arange(0, ROWS2)
        sums2 = tile_sums(
            x,
            M,
            x_row,
            weight2,
            scale2,
            tl.minimum(n2, N2 - 1),
            K,
            first,
            last,
            scale_row2,
            scale_col2,
            EDGE2,
            ROWS2,
            BLOCK_M,
            STEP2,
            BLOCK_K2,
            SLICES,
            STAGES,
            ASKED,
            EARLY,
            EVEN2,
        )
        store_rows(y2, sums2, n2, M, N2)
