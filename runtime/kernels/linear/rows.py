"""Nine to 64 rows times a stored weight, or codes of theirs: decoding as many sequences.

Chosen for: `PRODUCT`, `PRODUCTS` and `UPDATE` of 9 to 64 rows in BF16 on a GPU, and `CODES_PRODUCT`
and `CODES_UPDATE` of as many on a Hopper.

    y[m, n] = sum_k x[m, k] * w[n, k]                   summed in float32, rounded once
    parts      of the sums over K, in float32, which the next norm adds (norm.rms)

How a program multiplies: see rows_tile. Where a weight has few rows its columns are split among
programs, so that enough of it is on the way. Adding their sums costs no kernel: only what goes into
the residual stream is split, and the norm after it reads the parts. A second, small weight has
programs of its own, which run beside those of the first.

Shape letters: M rows of x, N outputs, K inputs, P parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.cases import GROUP
from runtime.kernels.launch import jit, tl, use_triton
from runtime.kernels.linear.rows_tile import (
    MOST_ROWS,
    Tiles,
    rows_sums,
    store_tile,
)
from runtime.kernels.linear.weight import NO_PRODUCT, Stored, check_rows, product_reference
from runtime.kernels.norm.rms import Parts
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.encode.rows import Codes
    from runtime.kernels.linear.weight import Fp8Weight, Weight

_MOST_PARTS = 4
# of a second weight in a step: no more memory than a tile of the first one takes
_FEWEST_ROWS, _STEP = 16, 64


def rows_linear(x_MK: Tensor, weight: Weight) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype, for a weight in it, M at most 64."""
    return rows_products(x_MK, weight)[0]


def rows_products(x_MK: Tensor, *weights: Weight, codes: Codes | None = None) -> tuple[Tensor, ...]:
    """Return x @ weight.T [M, N] in x's dtype for each of one or two weights, in one kernel.

    x_MK     [M, K], rows contiguous in themselves
    weights  [N, K] in x's dtype, or an Fp8Weight, which takes codes; the second one is small, and
             in x's dtype
    codes    those of x, if the first weight takes them
    """
    if not use_triton(x_MK):
        return tuple(product_reference(x_MK, weight) for weight in weights)
    stored, m = [Stored.of(weight) for weight in weights], x_MK.shape[0]
    outputs = tuple(x_MK.new_empty((m, w.values.shape[0])) for w in stored)
    beside = -(-outputs[1].shape[1] // _FEWEST_ROWS) if len(weights) > 1 else 0
    tiles = Tiles.of(outputs[0].shape[1], beside, 1)
    _launch(x_MK, codes, stored, outputs, tiles.options(stored[0]), x_MK.shape[1])
    return outputs


def rows_parts(x_MK: Tensor, weight: Weight) -> Tensor | Parts:
    """Return x @ weight.T [M, N] as parts of its sums, for a weight in x's dtype."""
    if not use_triton(x_MK):
        return product_reference(x_MK, weight)
    return _parts(x_MK, None, Stored.of(weight), x_MK.shape[0])


def coded_rows(x: Codes, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the product of codes with the weight [M, N]."""
    stored = Stored.of(weight)
    y_MN = x.scale.new_empty((x.codes.shape[0], weight.shape[0]), dtype=dtype)
    tiles = Tiles.of(y_MN.shape[1], 0, 1)
    _launch(x.codes, x, [stored], (y_MN,), tiles.options(stored), weight.shape[1])
    return y_MN


def coded_parts(x: Codes, weight: Fp8Weight, like: Tensor) -> Parts:
    """Return the product of codes with the weight [M, N] as parts of its sums.

    like  as many rows as there are
    """
    return _parts(x.codes, x, Stored.of(weight), like.shape[0])


def _parts(x_MK: Tensor, codes: Codes | None, weight: Stored, m: int) -> Parts:
    n, k = weight.values.shape
    tiles = Tiles.of(n, 0, _MOST_PARTS)
    part = -(-k // (tiles.parts * GROUP)) * GROUP
    sums_PMN = torch.empty((-(-k // part), m, n), dtype=torch.float32, device=x_MK.device)
    _launch(x_MK, codes, [weight], (sums_PMN,), tiles.options(weight), part)
    return Parts(sums_PMN)


def _launch(
    x_MK: Tensor,
    codes: Codes | None,
    weights: list[Stored],
    outputs: tuple[Tensor, ...],
    tile: dict[str, int],
    part: int,
) -> None:
    """Fill the outputs, [M, N] or [P, M, N] with `part` columns in each part."""
    (first, *more), (_, k) = weights, check_rows(x_MK, MOST_ROWS, *weights)
    m, n = outputs[0].shape[-2:]
    programs = -(-n // tile["BLOCK_N"])
    second = NO_PRODUCT
    if more:
        programs += -(-outputs[1].shape[-1] // _FEWEST_ROWS)
        second = more[0].to_product(outputs[1])
    assert (codes is None) == (first.edge == 0), "FP8 weights take codes"
    x, x_scale, height = (x_MK, None, 0) if codes is None else (*codes, codes.scale.stride(1))
    _rows_kernel[(programs, -(-k // part))](
        x,
        x_scale,
        height,
        m,
        k,
        x.stride(0),
        part,
        first.values,
        first.scale,
        outputs[0],
        n,
        *first.scale_strides,
        x_MK,
        x_MK.stride(0),
        *second[:4],
        EDGE=first.edge,
        BLOCK_M=MOST_ROWS,
        EVEN=int(k % tile["BLOCK_K"] == 0),
        STEP2=_STEP,
        EVEN2=int(k % _STEP == 0),
        ROWS2=_FEWEST_ROWS,
        **tile,
        **early(),
    )


@jit
def _rows_kernel(
    x,
    x_scale,
    height,
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
    x2,
    x_row2,
    weight2,
    scale2,
    y2,
    N2,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS2: tl.constexpr,
    STEP2: tl.constexpr,
    EVEN2: tl.constexpr,
):
    """Take a tile of the second weight, whose programs come first, or one of the first weight."""
    start_next()
    wait_for_inputs()
    tile, second = tl.program_id(0), tl.cdiv(N2, ROWS2)
    first = tl.program_id(1) * part
    last = tl.minimum(first + part, K)
    if weight2 is None or tile >= second:
        n = (tile - second) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tl.minimum(n, N - 1)
        scales = scale
        if EDGE > 1:
            scales += (tile - second) * BLOCK_N // EDGE * scale_row
        sums = rows_sums(
            x,
            x_scale,
            height,
            M,
            x_row,
            weight,
            scales,
            rows,
            K,
            first,
            last,
            scale_col,
            EDGE,
            BLOCK_N,
            BLOCK_M,
            BLOCK_K,
            STAGES,
            EVEN,
        )
        store_tile(y + tl.program_id(1).to(tl.int64) * M * N, sums, n, M, N)
    else:
        n2 = tile * ROWS2 + tl.arange(0, ROWS2)
        sums2 = rows_sums(
            x2,
            None,
            0,
            M,
            x_row2,
            weight2,
            scale2,
            tl.minimum(n2, N2 - 1),
            K,
            0,
            K,
            0,
            0,
            ROWS2,
            BLOCK_M,
            STEP2,
            STAGES,
            EVEN2,
        )
        store_tile(y2, sums2, n2, M, N2)
