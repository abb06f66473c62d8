"""Logits in bfloat16 in order without a sort: there are but 65536 different ones.

Chosen for: never alone; draw uses it.

    key of a logit: 0 for NaN, then falling with the logit; both zeros have one

The tokens of one key follow one another in the order of their ids, as in a stable sort.

Shape letters: R rows, V vocabulary, B blocks of keys, C chunks of the vocabulary.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, tl

KEYS = 1 << 16
BLOCK = 1024  # of keys
BLOCKS = KEYS // BLOCK
CHUNK = 4096  # of the vocabulary


@jit
def key_of(bits):
    """Return the keys of bfloat16 numbers, given by their bits as int16."""
    bits = bits.to(tl.int32) & 0xFFFF
    size = bits & 0x7FFF
    rising = tl.where(bits > 0x7FFF, 0x8000 - size, 0x8000 + size)
    return 0xFFFF - tl.where(size > 0x7F80, 0xFFFF, rising)


@jit
def number_of(key):
    """Return the numbers that keys stand for, in float64; the largest ones for infinite ones."""
    rising = 0xFFFF - key
    size = tl.minimum(tl.where(rising < 0x8000, 0x8000 - rising, rising - 0x8000), 0x7F7F)
    number = (size << 16).to(tl.float32, bitcast=True).to(tl.float64)
    return tl.where(rising < 0x8000, -number, number)


@jit
def count_keys(logits, row_stride, V, counts, first, CHUNK: tl.constexpr, KEYS: tl.constexpr):
    """Count the logits of each key [R, KEYS]; store KEYS - 1 less the least of a row in `first`.

    Both begin as zeros.
    """
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    key = key_of(tl.load(logits + row * row_stride + i, mask=i < V, other=0))
    tl.atomic_add(counts + row * KEYS + key, 1, mask=i < V, sem="relaxed")
    tl.atomic_max(first + row, tl.max(tl.where(i < V, KEYS - 1 - key, 0), 0), sem="relaxed")


@jit
def weights_of(counts, row, block, top, temperature, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Return the counts of a block of keys, and exp((number - top) / temperature) of each."""
    key = block * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + row * KEYS + key)
    weight = tl.exp(tl.minimum((number_of(key) - top) / temperature, 0.0))
    return count, tl.where(count > 0, weight, 0.0)


@jit
def sum_blocks(
    counts, first, settings, block_counts, block_sums, BLOCK: tl.constexpr, KEYS: tl.constexpr
):
    """Sum up counts and weights of each block of keys [R, B]."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top = number_of(KEYS - 1 - tl.load(first + row))
    count, weight = weights_of(counts, row, block, top, tl.load(settings + row * 3), BLOCK, KEYS)
    at = row * (KEYS // BLOCK) + block
    tl.store(block_counts + at, tl.sum(count, 0))
    tl.store(block_sums + at, tl.sum(count * weight, 0))


@jit
def count_key(logits, row_stride, V, chosen, chunk_counts, CHUNK: tl.constexpr):
    """Count in each chunk of a row the logits of the chosen key [R, C]."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    key = key_of(tl.load(logits + row * row_stride + i, mask=i < V, other=0))
    same = (key == tl.load(chosen + row)) & (i < V)
    tl.store(chunk_counts + row * tl.num_programs(0) + chunk, tl.sum(same.to(tl.int32), 0))


@jit
def pick_token(
    logits,
    row_stride,
    V,
    chosen,
    rank,
    first,
    chunk_counts,
    C,
    tokens,
    no_token,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the token whose logit has the chosen key, and `rank` others of it before.

    `no_token` where the largest logit is NaN or infinite.
    """
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    count = tl.load(chunk_counts + row * C + c, mask=c < C, other=0)
    before, wanted = tl.cumsum(count, 0) - count, tl.load(rank + row)
    chunk = tl.max(tl.where((before <= wanted) & (count > 0), c, 0), 0)
    wanted -= tl.sum(tl.where(c == chunk, before, 0), 0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    key = key_of(tl.load(logits + row * row_stride + i, mask=i < V, other=0))
    same = (key == tl.load(chosen + row)) & (i < V)
    found = same & (tl.cumsum(same.to(tl.int32), 0) == wanted + 1)
    token = tl.min(tl.where(found, i, V - 1), 0)
    infinite = tl.load(first + row) >= 0xFF80
    tl.store(tokens + row, tl.where(infinite, no_token, token).to(tl.int64))
