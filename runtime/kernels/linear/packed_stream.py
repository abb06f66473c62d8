"""One row times wide or large weights of four bits, in one kernel: product, gate and addition.

Chosen for: `PRODUCT` and `GATED` of one row and packed weights, `ROW_PRODUCTS` and `ROW_ADDED` of
wide or large ones.

    y[n] = sum_k x[k] * w[n, k]                       summed in float32, rounded once; see packed
    gated     silu(gate) * up, each step rounded to x's dtype
    residual  y is rounded, then added to it

A program has some rows, its warps have different chunks of them, one step after another. Each warp
has two steps of its words on their way in registers: the first two are asked for while the
preceding kernels still run. How many rows and chunks: see packed_plan; how steps follow each
other: packed_steps; how units are multiplied: packed_units.

Trap: all rows of a program must be there. The last program begins earlier for that, and writes
some sums again.

Shape letters: N outputs, K inputs, C chunks of 256 inputs, H hidden, F inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import silu

from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.linear.packed import CHUNK, PackedWeight, unpacked_reference
from runtime.kernels.linear.packed_parts import row_factor
from runtime.kernels.linear.packed_plan import chunks_at_once, plan_of
from runtime.kernels.linear.packed_steps import all_steps, first_steps
from runtime.kernels.linear.packed_units import thread_numbers
from runtime.kernels.linear.row_parts import silu_times
from runtime.kernels.linear.row_tile import row_tile
from runtime.kernels.linear.weight import NO_PRODUCT, Stored
from runtime.kernels.norm.rms import rmsnorm
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Fp8Weight, Weight

_WARPS = 4
_SECOND_ROWS = 4


def packed_row_reference(
    x_1K: Tensor, weight: PackedWeight, residual_1N: Tensor | None = None
) -> Tensor:
    """Say what `packed_row` computes, in plain torch."""
    y_1N = (x_1K.float() @ unpacked_reference(weight).T).to(x_1K.dtype)
    return y_1N if residual_1N is None else residual_1N + y_1N


def packed_gated_reference(x_1H: Tensor, gate_up: PackedWeight) -> Tensor:
    """Say what `packed_gated` computes, in plain torch."""
    gate, up = packed_row_reference(x_1H, gate_up).chunk(2, dim=-1)
    return silu(gate) * up


def packed_row(x_1K: Tensor, weight: PackedWeight, residual_1N: Tensor | None = None) -> Tensor:
    """Return x @ weight.T [1, N] in x's dtype, added to the residual if there is one."""
    if not use_triton(x_1K):
        return packed_row_reference(x_1K, weight, residual_1N)
    return _launch(x_1K.contiguous(), residual_1N, weight)[0]


def packed_gated(x_1H: Tensor, gate_up: PackedWeight) -> Tensor:
    """Return silu(gate) * up [1, F] of [gate | up] = x gate_up^T, gate_up [2F, H]."""
    if not use_triton(x_1H):
        return packed_gated_reference(x_1H, gate_up)
    return _launch(x_1H.contiguous(), None, gate_up, halves=2)[0]


def packed_normed(x_1H: Tensor, norm_H: Tensor, eps: float, *weights: Weight) -> tuple[Tensor, ...]:
    """Return `norm_row_linear` of a packed weight and a small one, the norm a kernel of its own."""
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    others = [weight for weight in weights if not isinstance(weight, PackedWeight)]
    normed_1H = rmsnorm(x_1H, norm_H, eps)
    if others:
        return _launch(normed_1H, None, packed[0], *others)
    return tuple(_launch(normed_1H, None, weight)[0] for weight in packed)


def _launch(
    x_1K: Tensor,
    residual: Tensor | None,
    first: PackedWeight,
    *more: Tensor | Fp8Weight,
    halves: int = 1,
) -> tuple[Tensor, ...]:
    (n, k), chunks = first.shape, first.chunks
    out = n // halves
    plan = plan_of(out, halves, nvfp4=first.is_nvfp4)
    blocks = plan.turns // halves
    y = x_1K.new_empty((1, out))
    outputs = (y, *(x_1K.new_empty((1, w.shape[0])) for w in more))
    each = -(-chunks // _WARPS)
    at_once = chunks_at_once(each, plan.units // plan.turns)
    steps = -(-each // at_once)
    programs, second = -(-out // (8 * blocks)), NO_PRODUCT
    if more:
        programs += -(-outputs[1].shape[1] // _SECOND_ROWS)
        second = Stored.of(more[0]).to_product(outputs[1])
    _stream_kernel[(programs,)](
        x_1K,
        residual,
        k,
        first.words,
        first.scale,
        first.row,
        y,
        n,
        out,
        chunks,
        *second,
        FP4=int(first.is_nvfp4),
        GROUP=first.group,
        HALVES=halves,
        BLOCKS=blocks,
        CHUNKS=at_once,
        STEPS=steps,
        WHOLE=int(k == steps * at_once * _WARPS * CHUNK),
        EDGE2=Stored.of(more[0]).edge if more else 0,
        WIDTH=power_of_two(k),
        BLOCK_N2=_SECOND_ROWS,
        BLOCK_K2=max(min(power_of_two(-(-k // 2)), 1024), 16),
        STAGES2=3 if k > 2048 else 0,
        WARPS=_WARPS,
        num_warps=_WARPS,
        maxnreg=plan.registers,
        **early(),
    )
    return outputs


@jit
def _rows_of_program(
    program,
    x,
    residual,
    K,
    words,
    scale,
    row,
    y,
    N,
    OUT,
    C,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Write eight rows, or some eights of rows."""
    warp, g, place = thread_numbers(32 * WARPS)
    first = tl.maximum(tl.minimum(program * (8 * BLOCKS), OUT - 8 * BLOCKS), 0)
    n = tl.minimum(first + g, OUT - 1)  # of fewer than eight rows the last one again
    a, b = first_steps(
        words, scale, n, N, OUT, C, warp, place,
        FP4, GROUP, HALVES, BLOCKS, CHUNKS, STEPS, WARPS,
    )  # fmt: skip
    out = first + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, BLOCKS)[None, :]
    inside = out < OUT
    factor = row_factor(row, out, inside, FP4)
    factor_up, before = factor, factor
    if HALVES == 2:
        factor_up = row_factor(row + OUT, out, inside, FP4)
    wait_for_inputs()
    if residual is not None:
        before = tl.load(residual + out, mask=inside, other=0.0)  # widened where it is added
    sums = all_steps(
        a, b, x, K, words, scale, n, N, OUT, C, warp, g, place,
        FP4, GROUP, HALVES, BLOCKS, CHUNKS, STEPS, WHOLE, WARPS,
    )  # fmt: skip
    y_N = tl.reshape(sums, (8, HALVES * BLOCKS))
    if HALVES == 2:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (8, 2, BLOCKS)), (0, 2, 1)))
        y_N = silu_times(gate * factor, up * factor_up, y)
    else:
        y_N *= factor
    y_N = y_N.to(y.dtype.element_ty)
    if residual is not None:
        y_N = (before.to(tl.float32) + y_N.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + out, y_N, mask=inside)


@jit
def _stream_kernel(
    x,
    residual,
    K,
    words,
    scale,
    row,
    y,
    N,
    OUT,
    C,
    weight2,
    scale2,
    y2,
    N2,
    scale_row2,
    scale_col2,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    EDGE2: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N2: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    STAGES2: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Take a tile of the second weight, whose programs come first, or some rows."""
    start_next()
    program, before = tl.program_id(0), tl.cdiv(N2, BLOCK_N2)
    if weight2 is None or program >= before:
        _rows_of_program(
            program - before,
            x,
            residual,
            K,
            words,
            scale,
            row,
            y,
            N,
            OUT,
            C,
            FP4,
            GROUP,
            HALVES,
            BLOCKS,
            CHUNKS,
            STEPS,
            WHOLE,
            WARPS,
        )
    else:
        row_tile(
            program,
            x,
            None,
            None,
            None,
            K,
            0.0,
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
            STAGES2,
        )
