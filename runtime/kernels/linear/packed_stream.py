"""One row times wide or large weights of four bits, in one kernel: product, gate and addition.

Chosen for: `PRODUCT` and `GATED` of one row and packed weights, `ROW_PRODUCTS` and `ROW_ADDED` of
wide or large ones.

    y[n] = sum_k x[k] * w[n, k]                       summed in float32, rounded once; see packed
    gated     silu(gate) * up, each step rounded to x's dtype
    residual  y is rounded, then added to it

A program has some rows, its warps have different chunks of them, one step after another. Each warp
has two steps of its words on their way in registers: the first two are asked for while the
preceding kernels still run. How units are multiplied: see packed_units.

Trap: all rows of a program must be there. The last program begins earlier for that, and writes
some sums again.

Shape letters: N outputs, K inputs, C chunks of 256 inputs, H hidden, F inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.nn.functional import silu

from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.linear.packed import CHUNK, PackedWeight, unpacked_reference
from runtime.kernels.linear.packed_pairs import pairs_of
from runtime.kernels.linear.packed_parts import row_factor
from runtime.kernels.linear.packed_units import (
    blocks_of,
    joined,
    thread_numbers,
    unit_sums,
    whole_sums,
)
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


class Plan(NamedTuple):
    """How a program goes through its rows.

    turns      eights of rows
    units      of a warp's step: chunks of each of them
    registers  of a thread at most
    """

    turns: int
    units: int
    registers: int


# H200, NVFP4 of 27B, one after another, us: gate and up 28.6; two eights, 96 registers 30.7. The
# rule's 14.3 with 112 or 128 registers, 15.0 with 104; one eight, 72 registers 16.0. down 14.9; two
# eights, 96 registers 17.1; one, 72 registers 18.5, 64 21.3: spilling costs more than programs that
# wait. Asking for later steps as far as the L2 cache costs 0.1 to 5 us everywhere.
_GATED = Plan(4, 4, 168)
_GATED_INT4 = Plan(2, 2, 128)  # a layer of 27B 78.0, by the plan above 83.3
_MANY = Plan(2, 2, 128)
_FEW = Plan(1, 2, 96)
_MANY_ROWS = 132 * 16 * 6


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


def _plan(n: int, halves: int, *, nvfp4: bool) -> Plan:
    """Return the plan for a weight of so many times n rows."""
    gated = _GATED if nvfp4 else _GATED_INT4
    plan = gated if halves == 2 else _MANY if n >= _MANY_ROWS else _FEW
    while plan.turns > halves and n < 8 * plan.turns // halves:
        plan = plan._replace(turns=plan.turns // 2)
    return plan


def _at_once(chunks: int, most: int) -> int:
    """Return how many chunks of a warp a step has: of the most and one fewer, what fits better."""
    most = max(min(most, chunks), 1)
    return min(range(most, max(most - 2, 0), -1), key=lambda some: -(-chunks // some) * some)


def _launch(
    x_1K: Tensor,
    residual: Tensor | None,
    first: PackedWeight,
    *more: Tensor | Fp8Weight,
    halves: int = 1,
) -> tuple[Tensor, ...]:
    (n, k), chunks = first.shape, first.chunks
    out = n // halves
    plan = _plan(out, halves, nvfp4=first.is_nvfp4)
    blocks = plan.turns // halves
    y = x_1K.new_empty((1, out))
    outputs = (y, *(x_1K.new_empty((1, w.shape[0])) for w in more))
    each = -(-chunks // _WARPS)
    at_once = _at_once(each, plan.units // plan.turns)
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
def _loaded_step(
    step,
    words,
    scale,
    n,
    N,
    OUT,
    C,
    warp,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the units of a step: of each chunk some blocks of rows, or as many of both halves.

    n  the first row of each thread; beyond the last chunk that one is read again
    """
    units = ()
    for i in tl.static_range(CHUNKS):
        at = tl.minimum((step * CHUNKS + i) * WARPS + warp, C - 1) * N + n
        for half in tl.static_range(HALVES):
            units += blocks_of(words, scale, at + half * OUT, place, FP4, GROUP, BLOCKS)
    return units


@jit
def _with_step(
    totals,
    units,
    step,
    x,
    K,
    warp,
    g,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the totals with the products of a step's units.

    WHOLE  1: all of every chunk of every step is there
    """
    TURNS: tl.constexpr = len(totals)
    used = tl.full(totals[0].shape, 1, tl.int32)
    for i in tl.static_range(CHUNKS):
        c = (step * CHUNKS + i) * WARPS + warp
        pairs, sums = pairs_of(x, c, g, place, place >= 0, None if WHOLE else K, FP4), ()
        for turn in tl.static_range(TURNS):
            unit = units[i * TURNS + turn]
            sums += (unit_sums(unit, pairs, used, totals[turn], FP4, GROUP),)  # type: ignore[assignment]
        totals = sums
    return totals


@jit
def _first_steps(
    words,
    scale,
    n,
    N,
    OUT,
    C,
    warp,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the units of the first two steps, or of the only one twice."""
    a = _loaded_step(
        0, words, scale, n, N, OUT, C, warp, place, FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS
    )
    b = a
    if STEPS > 1:
        b = _loaded_step(
            1, words, scale, n, N, OUT, C, warp, place, FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS
        )
    return a, b


@jit
def _all_steps(
    a,
    b,
    x,
    K,
    words,
    scale,
    n,
    N,
    OUT,
    C,
    warp,
    g,
    place,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return the sums of the rows of a program: two steps are on their way while one is added."""
    PAIRS: tl.constexpr = (STEPS - 2) // 2 if STEPS > 1 else 0
    ODD: tl.constexpr = STEPS > 2 and STEPS % 2 == 1
    totals = ()
    for _ in tl.static_range(HALVES * BLOCKS):
        totals += (tl.zeros((32 * WARPS,), tl.float32),)  # type: ignore[assignment]
    for i in tl.range(0, PAIRS, num_stages=1):
        totals = _with_step(
            totals, a, 2 * i, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
        a = _loaded_step(
            2 * i + 2, words, scale, n, N, OUT, C, warp, place,
            FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS,
        )  # fmt: skip
        totals = _with_step(
            totals, b, 2 * i + 1, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
        b = _loaded_step(
            2 * i + 3, words, scale, n, N, OUT, C, warp, place,
            FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS,
        )  # fmt: skip
    totals = _with_step(
        totals, a, 2 * PAIRS, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
    )
    if ODD:
        a = _loaded_step(
            STEPS - 1, words, scale, n, N, OUT, C, warp, place,
            FP4, GROUP, HALVES, BLOCKS, CHUNKS, WARPS,
        )  # fmt: skip
    if STEPS > 1:
        totals = _with_step(
            totals, b, 2 * PAIRS + 1, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
    if ODD:
        totals = _with_step(
            totals, a, STEPS - 1, x, K, warp, g, place, FP4, GROUP, CHUNKS, WHOLE, WARPS
        )
    return whole_sums(joined(totals, HALVES * BLOCKS), 1, WARPS)


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
    a, b = _first_steps(
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
    sums = _all_steps(
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
