"""A row, or a few, times a stored weight: what decoding a sequence, or its drafts, consists of.

Chosen for: `PRODUCT`, `ROW_ADDED` and `ROW_PRODUCTS` of one row on a GPU, of 2 short ones.

    y[n] = sum_k x[k] * w[n, k]                         summed in float32, rounded once
    norm       x is first replaced by its zero-centred RMSNorm, rounded to its dtype
    residual   y is rounded, then added to it

Reading the weight takes nearly all the time. Each thread loads 16 bytes at once, a few loads ahead
of their use, and multiplies in registers: the tensor cores would have nothing to reuse. One more
row of x is one more multiplication for each weight. The first two parts of the columns, their
scales and the norm's weights are loaded while the preceding kernels still run; x is then all that
the first parts wait for. The norm of a short row is computed again by every program, which costs
less than another kernel. For a wide row that would take bandwidth, so it is computed before, or by
programs of many rows: see row_strips.

Trap: the rows of a program must lie within one 128-row block of scales. They start at a multiple of
their number, which is a power of two.

Shape letters: M rows of x, N outputs, K inputs, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.cases import Added, NormedRow
from runtime.kernels.conditions import A_FEW_ROWS, LARGE_WEIGHT
from runtime.kernels.dispatch import ROW_ADDED, ROW_NORM, ROW_PRODUCTS
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.linear.packed_stream import packed_normed, packed_row
from runtime.kernels.linear.packed_strips import packed_strip, packed_strips
from runtime.kernels.linear.row_heads import row_heads
from runtime.kernels.linear.row_parts import normed
from runtime.kernels.linear.row_strips import strips
from runtime.kernels.linear.row_tile import row_tile
from runtime.kernels.linear.weight import (
    NO_PRODUCT,
    Stored,
    Weight,
    check_rows,
    form_of,
    product_reference,
    stored_bytes,
)
from runtime.kernels.norm.gated import Unscaled
from runtime.kernels.norm.rms import rmsnorm, rmsnorm_reference
from runtime.kernels.overlap import early, start_next

# Measured on an H100. Where K is short the norm is most of a program's work: it takes more rows.
_FEWEST_PROGRAMS = 128
SHORT = 1024
_PLAIN = {"BLOCK_N": 4, "BLOCK_K": 1024, "num_warps": 2, "STAGES": 4}
_PLAIN_LITTLE = {"BLOCK_N": 4, "BLOCK_K": 2048, "num_warps": 4, "STAGES": 3}
# FP8, whose conversion is most of the work: twelve layers of 35B-A3B 762 us, 779 with four warps
_PLAIN_LITTLE_FP8 = _PLAIN_LITTLE | {"num_warps": 8}
_NORMED = {"BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 4, "STAGES": 4}
# By rows of x: a multiprocessor has four such programs at once, so that all of 0.8B's largest
# products are there before x is. Those of two rows leave a program of the delta rule its registers,
# and it loads its state meanwhile: H200, a step with one draft 689 us, with 8 warps of 64 695.
_NORMED_SHORT = {
    1: {"BLOCK_N": 16, "BLOCK_K": 1024, "num_warps": 8, "STAGES": 3},
    2: {"BLOCK_N": 16, "BLOCK_K": 1024, "num_warps": 4, "STAGES": 3, "maxnreg": 112},
}


def row_linear_reference(x_MK: Tensor, weight: Weight, residual_MN: Tensor | None) -> Tensor:
    """Say what `row_linear` computes, in plain torch."""
    y_MN = product_reference(x_MK, weight)
    return y_MN if residual_MN is None else residual_MN + y_MN


def norm_row_linear_reference(
    x_MH: Tensor, norm_H: Tensor, eps: float, *weights: Weight
) -> tuple[Tensor, ...]:
    """Say what `norm_row_linear` computes, in plain torch."""
    normed = rmsnorm_reference(x_MH, norm_H, eps)
    return tuple(product_reference(normed, weight) for weight in weights)


def row_linear(x_MK: Tensor, weight: Weight, residual_MN: Tensor | None = None) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype, added to the residual if there is one.

    x_MK         [M, K], M at most 2
    weight       [N, K] in x's dtype, or an Fp8Weight
    residual_MN  [M, N] contiguous, in x's dtype
    """
    if not use_triton(x_MK):
        return row_linear_reference(x_MK, weight, residual_MN)
    return _launch(x_MK.contiguous(), None, 0.0, residual_MN, weight)[0]


def norm_row_linear(
    x_MH: Tensor, norm_H: Tensor, eps: float, *weights: Weight
) -> tuple[Tensor, ...]:
    """Return norm(x) @ weight.T [M, N] in x's dtype for each of one or two weights.

    x_MH     [M, H] contiguous
    norm_H   [H], stored as w: the factor is 1 + w
    weights  [N, H] in x's dtype, or an Fp8Weight, each
    """
    multiply = _products(normed_case(x_MH, weights[0]))
    products: tuple[Tensor, ...] = multiply(x_MH, norm_H, eps, *weights)
    return products


def normed_within(x_MH: Tensor, norm_H: Tensor, eps: float, *weights: Weight) -> tuple[Tensor, ...]:
    """Return `norm_row_linear`, every program norming the row for itself."""
    return _launch(x_MH, norm_H, eps, None, *weights)


def normed_before(x_MH: Tensor, norm_H: Tensor, eps: float, *weights: Weight) -> tuple[Tensor, ...]:
    """Return `norm_row_linear`, the norm in a kernel of its own."""
    return _launch(rmsnorm(x_MH, norm_H, eps), None, 0.0, None, *weights)


def added_linear(
    x_MK: Tensor | Unscaled, weight: Weight, residual_MN: Tensor | None = None
) -> Tensor:
    """Return `row_linear`, whatever the weight is stored in; of floats if x is unscaled."""
    if isinstance(x_MK, Unscaled):
        assert isinstance(weight, Tensor), "only a product with floats scales x"
        assert residual_MN is not None, "what is scaled so goes into the residual stream"
        return row_heads(x_MK, weight, residual_MN)
    case = Added(use_triton(x_MK), form_of(weight)[0], weight.shape[1], stored_bytes(weight))
    y_MN: Tensor = _added(case)(x_MK, weight, residual_MN)
    return y_MN


def normed_and_linear(
    x_1H: Tensor, norm_H: Tensor, eps: float, weight: Weight
) -> tuple[Tensor, Tensor]:
    """Return norm(x) [1, H] too, besides what `norm_row_linear` makes of one weight."""
    if is_normed_before(x_1H, weight):
        normed_1H = rmsnorm(x_1H, norm_H, eps)
        return normed_1H, added_linear(normed_1H, weight)
    normed_1H = torch.empty_like(x_1H)
    (y_1N,) = _launch(x_1H, norm_H, eps, None, weight, kept=normed_1H)
    return normed_1H, y_1N


def is_normed_before(x_1H: Tensor, weight: Weight) -> bool:
    """Return whether the norm of x before this weight is a kernel of its own."""
    return _norm(normed_case(x_1H, weight)) is rmsnorm


def normed_case(x_MH: Tensor, weight: Weight) -> NormedRow:
    """Return what the choice of a norm and the product after it depends on."""
    return NormedRow(use_triton(x_MH), form_of(weight)[0], weight.shape[1], stored_bytes(weight))


def row_blocks(blocks: dict[str, int], num_columns: int, num_rows: int = 1 << 30) -> dict[str, int]:
    """Return launch options: a number of rows that divides N, columns in at least two parts.

    STAGES 0 says that the two parts that are asked for ahead are all.
    """
    width = max(min(blocks["BLOCK_K"], power_of_two(-(-num_columns // 2))), 16)
    return blocks | {
        "BLOCK_N": min(blocks["BLOCK_N"], num_rows & -num_rows),
        "BLOCK_K": width,
        "STAGES": blocks["STAGES"] if num_columns > 2 * width else 0,
    }


def _plan(weight: Stored, rows: int, *, normed: bool) -> dict[str, int]:
    """Return launch options for one weight: small ones are spread over all multiprocessors."""
    (n, k), little = weight.values.shape, weight.values.nbytes < LARGE_WEIGHT
    if normed:
        blocks = row_blocks(_NORMED if k > SHORT else _NORMED_SHORT[rows], k)
    elif little:
        blocks = row_blocks(_PLAIN_LITTLE_FP8 if weight.is_fp8 else _PLAIN_LITTLE, k)
    else:
        blocks = row_blocks(_PLAIN, k)
    while blocks["BLOCK_N"] > 1 and n < _FEWEST_PROGRAMS * blocks["BLOCK_N"]:
        blocks["BLOCK_N"] //= 2
    return blocks


def _launch(
    x_MK: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *weights: Weight,
    kept: Tensor | None = None,
) -> tuple[Tensor, ...]:
    first, *more = [Stored.of(weight) for weight in weights]
    rows, k = check_rows(x_MK, A_FEW_ROWS, first, *more)
    assert x_MK.is_contiguous(), "rows must follow one another"
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    blocks = _plan(first, rows, normed=norm is not None)
    outputs = [x_MK.new_empty((rows, w.values.shape[0])) for w in (first, *more)]
    programs = -(-outputs[0].shape[1] // blocks["BLOCK_N"])
    second, alike = NO_PRODUCT, bool(more) and first.edge == more[0].edge == 0
    if more:
        share = blocks["BLOCK_N"] if alike else max(blocks["BLOCK_N"] // 4, 1)
        programs += -(-outputs[1].shape[1] // share)
        second = more[0].to_product(outputs[1])
    _rows_kernel[(programs,)](
        x_MK,
        norm,
        residual,
        kept,
        k,
        eps,
        *first.to_product(outputs[0]),
        *second,
        EDGE=first.edge,
        EDGE2=more[0].edge if more else 0,
        ALIKE=int(alike),
        ROWS=rows,
        WIDTH=power_of_two(k),
        **blocks,
        **early(),
    )
    return tuple(outputs)


@jit
def _rows_kernel(
    x,
    norm,
    residual,
    kept,
    K,
    eps,
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
    EDGE: tl.constexpr,
    EDGE2: tl.constexpr,
    ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, tiles = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    start_next()
    if ALIKE:
        other = tile >= tiles
        weight = tl.multiple_of(tl.where(other, weight2, weight), 16)
        y, N = tl.where(other, y2, y), tl.where(other, N2, N)
        tile = tl.where(other, tile - tiles, tile)
    if ALIKE or weight2 is None or tile < tiles:
        row_tile(
            tile,
            x,
            norm,
            residual,
            kept,
            K,
            eps,
            weight,
            scale,
            y,
            N,
            scale_row,
            scale_col,
            EDGE,
            ROWS,
            WIDTH,
            BLOCK_N,
            BLOCK_K,
            STAGES,
        )
    else:
        row_tile(
            tile - tiles,
            x,
            norm,
            residual,
            None,
            K,
            eps,
            weight2,
            scale2,
            y2,
            N2,
            scale_row2,
            scale_col2,
            EDGE2,
            ROWS,
            WIDTH,
            max(BLOCK_N // 4, 1),
            BLOCK_K,
            min(STAGES, 2),
        )


_added = ROW_ADDED.bind(row_linear, packed_strip, packed_row)
_products = ROW_PRODUCTS.bind(
    norm_row_linear_reference, packed_strips, packed_normed, normed_within, normed_before, strips
)
_norm = ROW_NORM.bind(normed, rmsnorm)
