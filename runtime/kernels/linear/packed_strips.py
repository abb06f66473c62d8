"""One row times weights of four bits, in one kernel: norm, product and addition.

Chosen for: `ROW_PRODUCTS` and `ROW_ADDED` of packed weights of 2048 columns or fewer, or of 4096 if
they are small.

    y[n] = sum_k norm(x)[k] * w[n, k]                 summed in float32, rounded once; see packed
    norm       x is first replaced by its zero-centred RMSNorm, rounded to its dtype, or is not
    residual   y is rounded, then added to it

The warps of a program have different chunks of the same rows, all of them together whole rows, so
that no second kernel adds parts. All of its words are on their way before the kernel waits for x.
The norm of the row is computed by every program, each thread having four of the sixteen pairs that
it multiplies, and fetching the others from those that have them. How units are multiplied: see
packed_units.

Wider rows are for packed_stream: there the norm is a kernel of its own.

Shape letters: N outputs, K inputs, C chunks of 256 inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kernels.conditions import WIDEST_WHOLE
from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.linear.packed import PackedWeight
from runtime.kernels.linear.packed_pairs import (
    normed_chunks,
    pairs_of_chunks,
    quarters_of_chunks,
)
from runtime.kernels.linear.packed_parts import row_factor
from runtime.kernels.linear.packed_units import (
    joined,
    sums_of,
    thread_numbers,
    units_of,
    whole_sums,
)
from runtime.kernels.linear.row_tile import row_tile
from runtime.kernels.linear.weight import NO_PRODUCT, Stored
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.waves import MULTIPROCESSORS

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Fp8Weight, Weight

_WARPS = 8
# H200, 12 layers of 35B-A3B in NVFP4, a layer: 33.0 us with these, 34.4 with the norm in a kernel
# of its own. Four units of a warp, 80 registers 34.8; one unit, 48 registers 34.3; two units with
# 48 or 64 registers 33.8, 34.0. All units copied ahead through shared memory took 4.6 us more.
_MOST_PROGRAMS = 3 * MULTIPROCESSORS
_MOST_UNITS = 2
_REGISTERS = 56
_SECOND_ROWS = 4


def packed_strips(x_1K: Tensor, norm_K: Tensor, eps: float, *weights: Weight) -> tuple[Tensor, ...]:
    """Return norm(x) @ weight.T [1, N] in x's dtype for each of one or two weights.

    The first one is packed, the second one small.
    """
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    others = [weight for weight in weights if not isinstance(weight, PackedWeight)]
    if others:
        return _launch(x_1K, norm_K, eps, None, packed[0], *others)
    return tuple(_launch(x_1K, norm_K, eps, None, weight)[0] for weight in packed)


def packed_strip(x_1K: Tensor, weight: PackedWeight, residual_1N: Tensor | None = None) -> Tensor:
    """Return x @ weight.T [1, N] in x's dtype, added to the residual if there is one."""
    return _launch(x_1K.contiguous(), None, 0.0, residual_1N, weight)[0]


def _launch(
    x_1K: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    first: PackedWeight,
    *more: Tensor | Fp8Weight,
) -> tuple[Tensor, ...]:
    (n, k), chunks = first.shape, first.chunks
    assert k <= WIDEST_WHOLE, f"rows of {k} columns are for packed_stream"
    assert norm is None or norm.dtype == x_1K.dtype, "norm and row are of one dtype"
    outputs = tuple(x_1K.new_empty((1, w.shape[0])) for w in (first, *more))
    across = min(_WARPS, power_of_two(chunks))
    rows = 8 * (_WARPS // across)
    turns, repeats = 1, -(-chunks // across)
    while turns * repeats < _MOST_UNITS and n > rows * turns * _MOST_PROGRAMS:
        turns *= 2
    programs, second = -(-n // (rows * turns)), NO_PRODUCT
    if more:
        programs += -(-outputs[1].shape[1] // _SECOND_ROWS)
        second = Stored.of(more[0]).to_product(outputs[1])
    _strips_kernel[(programs,)](
        x_1K,
        norm,
        residual,
        k,
        eps,
        first.words,
        first.scale,
        first.row,
        outputs[0],
        n,
        chunks,
        *second,
        FP4=int(first.is_nvfp4),
        GROUP=first.group,
        ACROSS=across,
        REPEATS=repeats,
        TURNS=turns,
        EDGE2=Stored.of(more[0]).edge if more else 0,
        WIDTH=power_of_two(k),
        BLOCK_N2=_SECOND_ROWS,
        BLOCK_K2=max(power_of_two(-(-k // 2)), 16),
        WARPS=_WARPS,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **early(),
    )
    return outputs


@jit
def _strip(
    first,
    x,
    norm,
    residual,
    K,
    eps,
    words,
    scale,
    row,
    y,
    N,
    C,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    ACROSS: tl.constexpr,
    REPEATS: tl.constexpr,
    TURNS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Write TURNS times the rows of the warps: ACROSS of them have chunks of the same rows."""
    BESIDE: tl.constexpr = WARPS // ACROSS
    warp, g, place = thread_numbers(32 * WARPS)
    n, units = first + warp // ACROSS * 8 + g, ()
    for turn in tl.static_range(TURNS):
        at = n + turn * BESIDE * 8
        units += units_of(words, scale, at, N, at < N, C, warp, place, FP4, GROUP, ACROSS, REPEATS)
    w_parts = quarters_of_chunks(norm, warp, g, place, K, FP4, ACROSS, REPEATS)
    r, turns = tl.arange(0, 8)[None, :, None], tl.arange(0, TURNS)[None, None, :]
    out = first + tl.arange(0, BESIDE)[:, None, None] * 8 + r + turns * (BESIDE * 8)
    inside = out < N
    factor, before = row_factor(row, out, inside, FP4), tl.zeros(out.shape, tl.float32)
    wait_for_inputs()
    if norm is None:
        x_parts = pairs_of_chunks(x, warp, g, place, K, C, FP4, ACROSS, REPEATS)
    else:
        quarters = quarters_of_chunks(x, warp, g, place, K, FP4, ACROSS, REPEATS)
        x_parts = normed_chunks(quarters, w_parts, g, place, K, eps, BESIDE, FP4)
    if residual is not None:
        before = tl.load(residual + out, mask=inside, other=0.0).to(tl.float32)
    sums = ()
    for turn in tl.static_range(TURNS):
        sums += (sums_of(units, x_parts, turn * REPEATS, FP4, GROUP),)  # type: ignore[assignment]
    y_N = whole_sums(joined(sums, TURNS), BESIDE, ACROSS) * factor
    y_N = y_N.to(y.dtype.element_ty)
    if residual is not None:
        y_N = (before + y_N.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + out, y_N, mask=inside)


@jit
def _strips_kernel(
    x,
    norm,
    residual,
    K,
    eps,
    words,
    scale,
    row,
    y,
    N,
    C,
    weight2,
    scale2,
    y2,
    N2,
    scale_row2,
    scale_col2,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    ACROSS: tl.constexpr,
    REPEATS: tl.constexpr,
    TURNS: tl.constexpr,
    EDGE2: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N2: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Take a tile of the second weight, whose programs come first, or a strip."""
    start_next()
    program, before = tl.program_id(0), tl.cdiv(N2, BLOCK_N2)
    if weight2 is None or program >= before:
        _strip(
            (program - before) * (TURNS * 8 * (WARPS // ACROSS)),
            x,
            norm,
            residual,
            K,
            eps,
            words,
            scale,
            row,
            y,
            N,
            C,
            FP4,
            GROUP,
            ACROSS,
            REPEATS,
            TURNS,
            WARPS,
        )
    else:
        row_tile(
            program,
            x,
            norm,
            None,
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
            1,
            WIDTH,
            BLOCK_N2,
            BLOCK_K2,
            0,
        )
