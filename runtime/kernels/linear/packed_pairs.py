"""What threads have of a row x that is multiplied with units of four-bit weights: see packed_units.

Chosen for: within the kernels of packed_strips and moe.packed_row; never alone.

    pairs    sixteen pairs of columns for each thread, of one chunk
    quarter  four of them. Threads of four rows need the same sixteen, so each norms four of them,
             and fetches the others from those that have them

In the interpreter a pair is two numbers, and each thread norms all that it needs.

Shape letters: K inputs, C chunks of 256 inputs.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_TRITON, INTERPRET, jit, tl
from runtime.kernels.linear.packed_units import chunk_of, quad

if HAS_TRITON:
    _PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
    _OF_THREAD = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;")


@jit
def pair_at(row, place, r: tl.constexpr, FP4: tl.constexpr):
    """Return which pair of columns of its chunk is number r of those of each thread."""
    if FP4:
        at = 64 * (row % 2) + 16 * place + r
    else:
        at = 16 * (r // 2) + 8 * (row % 2) + 2 * place + r % 2
    return at


@jit
def _pairs(x, chunk, row, place, used, K, FP4: tl.constexpr):
    """Return the sixteen pairs of columns of x that each thread needs of its chunk; beyond K zeros.

    chunk, used  one for each thread
    """
    pairs = ()
    if FP4:
        for i in tl.static_range(4):
            at = chunk * 128 + pair_at(row, place, 4 * i, FP4)
            pairs += quad(x + 2 * at, used & (2 * at < K), 1)
    else:
        both = x.to(tl.pointer_type(tl.int32), bitcast=True)
        for r in tl.static_range(16):
            at = chunk * 128 + pair_at(row, place, r, FP4)
            pairs += (tl.load(both + at, mask=used & (2 * at < K), other=0),)  # type: ignore[assignment]
    return pairs


def _interpreted_pairs(x, chunk, row, place, used, K, fp4):
    """Say what `_pairs` does: a pair is two numbers (interpreter)."""
    pairs = ()
    for r in range(16):
        column = 2 * (chunk * 128 + pair_at(row, place, r, fp4))
        at, inside = (
            (x + column)[:, None] + tl.arange(0, 2)[None, :],
            (used & (column < K))[:, None],
        )
        pairs += (tl.load(at, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return pairs


pairs_of = _interpreted_pairs if HAS_TRITON and INTERPRET.value else _pairs


@jit
def _quarter(x, chunk, row, place, K, FP4: tl.constexpr):
    """Return the four pairs of `_pairs` that a thread norms: four rows need the same sixteen."""
    quarter = ()
    if FP4:
        at = chunk * 128 + row // 2 * 4 + pair_at(row, place, 0, FP4)
        quarter += quad(x + 2 * at, 2 * at < K, 1)
    else:
        both = x.to(tl.pointer_type(tl.int32), bitcast=True) + chunk * 128
        for i in tl.static_range(4):
            at = row // 2 * 32 + pair_at(row, place, i, FP4)
            inside = 2 * (chunk * 128 + at) < K
            quarter += (tl.load(both + at, mask=inside, other=0),)  # type: ignore[assignment]
    return quarter


def _interpreted_quarter(x, chunk, row, place, K, fp4):
    """Return all pairs: in the interpreter each thread norms what it needs."""
    return _interpreted_pairs(x, chunk, row, place, row >= 0, K, fp4)


quarter_of = _interpreted_quarter if HAS_TRITON and INTERPRET.value else _quarter


@jit
def _halves(pair):
    """Return both numbers of a pair in float32."""
    low = (pair << 16).to(tl.float32, bitcast=True)
    return low, (pair & -65536).to(tl.float32, bitcast=True)


@jit
def _squares(quarter):
    """Return the sum of the squares of what each thread has."""
    total = tl.zeros(quarter[0].shape, tl.float32)
    for i in tl.static_range(4):
        low, high = _halves(quarter[i])
        total += low * low + high * high
    return total


def _interpreted_squares(quarter):
    """Say what `_squares` computes: four rows have the same (interpreter)."""
    return sum(tl.sum(pair * pair, 1) for pair in quarter) / 4


squares_of = _interpreted_squares if HAS_TRITON and INTERPRET.value else _squares


@jit
def _normed(quarter, weights, root, row, place):
    """Return the sixteen pairs that each thread needs, normed and rounded, from those that have."""
    mine, pairs = (), ()
    for i in tl.static_range(4):
        low, high = _halves(quarter[i])
        w_low, w_high = _halves(weights[i])
        low, high = low * root * (1.0 + w_low), high * root * (1.0 + w_high)
        mine += (  # type: ignore[assignment]
            tl.inline_asm_elementwise(
                _PAIR, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
            ),
        )
    for r in tl.static_range(16):
        thread = 4 * (r // 4 * 2 + row % 2) + place
        pairs += (  # type: ignore[assignment]
            tl.inline_asm_elementwise(
                _OF_THREAD, "=r,r,r", [mine[r % 4], thread], dtype=tl.int32, is_pure=True, pack=1
            ),
        )
    return pairs


def _interpreted_normed(quarter, weights, root, row, place):
    """Say what `_normed` computes (interpreter)."""
    return tuple(x * root * (1.0 + w) for x, w in zip(quarter, weights, strict=True))


normed_of = _interpreted_normed if HAS_TRITON and INTERPRET.value else _normed


@jit
def pairs_of_chunks(
    x, warp, row, place, K, C, FP4: tl.constexpr, ACROSS: tl.constexpr, REPEATS: tl.constexpr
):
    """Return the pairs of each chunk of a warp."""
    parts = ()
    for again in tl.static_range(REPEATS):
        c = chunk_of(warp, again, ACROSS)
        parts += (pairs_of(x, c, row, place, c < C, K, FP4),)  # type: ignore[assignment]
    return parts


@jit
def quarters_of_chunks(
    x, warp, row, place, K, FP4: tl.constexpr, ACROSS: tl.constexpr, REPEATS: tl.constexpr
):
    """Return the quarters of each chunk of a warp, or nothing of nothing."""
    quarters = ()
    if x is not None:
        for again in tl.static_range(REPEATS):
            c = chunk_of(warp, again, ACROSS)
            quarters += (quarter_of(x, c, row, place, K, FP4),)  # type: ignore[assignment]
    return quarters


@jit
def normed_chunks(quarters, weights, row, place, K, eps, SHARE: tl.constexpr):
    """Return the pairs of each chunk of a warp, normed: so many threads have the same quarter."""
    squares, parts = tl.zeros(row.shape, tl.float32), ()
    for again in tl.static_range(len(quarters)):
        squares += squares_of(quarters[again])
    root = tl.rsqrt(tl.sum(squares, 0) / (SHARE * K) + eps)
    for again in tl.static_range(len(quarters)):
        parts += (normed_of(quarters[again], weights[again], root, row, place),)  # type: ignore[assignment]
    return parts
