"""What threads have of a row x that is multiplied with units of four-bit weights: see packed_units.

Chosen for: within the kernels of packed_stream, packed_strips and moe.packed_row; never alone.

    pairs    sixteen pairs of columns for each thread that has its own, of one chunk; else zeros
    quarter  four of them, which a thread norms for those that need them: each fetches its sixteen

For NVFP4 they are 2^64 of what they should be: its codes are 2^-126, and their products with small
numbers of x would be subnormal. So numbers of x from 2^64 on become infinite: bfloat16's largest
is 2^128 - 2^120.

In the interpreter a pair is two numbers as they are, and each thread norms all that it needs.

Shape letters: K inputs, C chunks of 256 inputs.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_TRITON, INTERPRET, jit, tl
from runtime.kernels.linear.packed_units import chunk_of, own_of, quad

if HAS_TRITON:
    _LIFT = tl.constexpr("{\n.reg .b32 t;\nmov.b32 t, 0x5F805F80;\nmul.bf16x2 $0, $1, t;\n}")
    _TWO_PAIRS = tl.constexpr(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $3, 0;\nmov.b32 $0, 0;\nmov.b32 $1, 0;\n"
        "@p ld.global.v2.b32 {$0, $1}, [$2];\n}"
    )
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
    """Return sixteen pairs of columns of x of a chunk where a thread has its own; else zeros.

    chunk, used  one for each thread
    K            beyond it are zeros; None: all of the chunk is there
    """
    pairs, used = (), used & own_of(row, place)
    if FP4:
        for i in tl.static_range(4):
            at = chunk * 128 + pair_at(row, place, 4 * i, FP4)
            pairs += quad(x + 2 * at, used if K is None else used & (2 * at < K), 1)
    else:
        for i in tl.static_range(8):
            at = chunk * 128 + pair_at(row, place, 2 * i, FP4)
            inside = used if K is None else used & (2 * at < K)
            pairs += tl.inline_asm_elementwise(
                _TWO_PAIRS,
                "=&r,=&r,l,r",
                [(x + 2 * at).to(tl.int64), inside.to(tl.int32)],
                dtype=(tl.int32,) * 2,
                is_pure=False,
                pack=1,
            )
    return _lifted(pairs, FP4)


@jit
def _lifted(pairs, FP4: tl.constexpr):
    """Return 2^64 of all numbers if they are for NVFP4."""
    lifted = pairs
    if FP4:
        lifted = ()
        for r in tl.static_range(16):
            lifted += (
                tl.inline_asm_elementwise(
                    _LIFT, "=r,r", [pairs[r]], dtype=tl.int32, is_pure=True, pack=1
                ),
            )
    return lifted


def _interpreted_pairs(x, chunk, row, place, used, K, fp4):
    """Say what `_pairs` does: a pair is two numbers (interpreter)."""
    pairs = ()
    for r in range(16):
        column = 2 * (chunk * 128 + pair_at(row, place, r, fp4))
        at, inside = (x + column)[:, None] + tl.arange(0, 2)[None, :], used & own_of(row, place)
        inside = (inside if K is None else inside & (column < K))[:, None]
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
    return _interpreted_pairs(x, chunk, row, place, row >= 0, K, fp4)  # zeros in the others


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
    """Say what `_squares` computes: those that have their own have all (interpreter)."""
    return sum(tl.sum(pair * pair, 1) for pair in quarter)


squares_of = _interpreted_squares if HAS_TRITON and INTERPRET.value else _squares


@jit
def _normed(quarter, weights, root, row, place, FP4: tl.constexpr):
    """Return the sixteen pairs that each thread needs, normed and rounded, from those that have."""
    mine, pairs, own = (), (), own_of(row, place)
    if FP4:
        root *= 1.8446744073709552e19  # 2^64
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
        pair = tl.inline_asm_elementwise(
            _OF_THREAD, "=r,r,r", [mine[r % 4], thread], dtype=tl.int32, is_pure=True, pack=1
        )
        pairs += (tl.where(own, pair, 0),)  # type: ignore[assignment]
    return pairs


def _interpreted_normed(quarter, weights, root, row, place, fp4):
    """Say what `_normed` computes (interpreter)."""
    root = tl.where(own_of(row, place), root, 0.0)[:, None]
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
def normed_chunks(quarters, weights, row, place, K, eps, SHARE: tl.constexpr, FP4: tl.constexpr):
    """Return the pairs of each chunk of a warp, normed: so many threads have the same quarter."""
    squares, parts = tl.zeros(row.shape, tl.float32), ()
    for again in tl.static_range(len(quarters)):
        squares += squares_of(quarters[again])
    root = tl.rsqrt(tl.sum(squares, 0) / (SHARE * K) + eps)
    for again in tl.static_range(len(quarters)):
        parts += (normed_of(quarters[again], weights[again], root, row, place, FP4),)  # type: ignore[assignment]
    return parts
