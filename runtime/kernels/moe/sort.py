"""The pairs of a token and an expert, sorted by expert and cut into blocks of one expert each.

Chosen for: `EXPERTS` of more than 8 tokens, before tiles and w8a8.

    place(p) = pairs of lower experts + pairs of the same expert in earlier tiles + rank(p)

A counting sort in three launches: ranks and counts within tiles of pairs, sums of the counts over
the tiles before, then places and blocks. Few pairs take one launch: a program of an expert reads
all of them. Each is stable, so that two runs give the same order; what the experts compute does not
depend on it, as each pair has its own row.

Shape letters: T tokens, k experts per token, P = T*k pairs, E experts, B blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import gl, gluon_jit, jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_TILE = 128
_MOST_EXPERTS = 4096
# As many as a program reads at once. H200, 64 tokens of 35B-A3B, four layers: 1237 us, 1259 in
# three launches. With fewer than there are experts, blocks would have more rows.
_FEW_PAIRS = 1024


def expert_blocks_reference(
    experts_Tk: Tensor, num_experts: int, block: int
) -> tuple[Tensor, Tensor]:
    """Say what `expert_blocks` computes, in plain torch."""
    ordered, order = experts_Tk.flatten().sort(stable=True)
    num_pairs, device = order.numel(), order.device
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=device))
    counts = (bounds.diff() + block - 1) // block
    ends = counts.cumsum(0)
    number = torch.arange(most_blocks(num_pairs, num_experts, block), device=device)
    owner = torch.searchsorted(ends, number, right=True)
    expert = owner.clamp(max=num_experts - 1)
    first = bounds[expert] + (number - (ends - counts)[expert]) * block
    end = torch.minimum(first + block, bounds[expert + 1])
    used = torch.where(owner < num_experts, owner, -1)
    return order, torch.stack([used, first, end], dim=1).int()


def most_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Return how many blocks there may be, whoever the pairs belong to."""
    return num_pairs // block + min(num_experts, num_pairs)


def expert_blocks(experts_Tk: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Return (order, blocks): the pairs sorted by expert, cut into blocks of one expert each.

    experts_Tk  [T, k] int64, contiguous, below num_experts
    order       [P] int64, pair numbers t*k + j
    blocks      [B, 3] int32: expert, first and end place in `order`; expert -1 marks an unused row.
                B depends on T, k and E alone, so that nothing waits for the GPU
    """
    if not use_triton(experts_Tk):
        return expert_blocks_reference(experts_Tk, num_experts, block)
    assert experts_Tk.is_contiguous(), "the experts must be contiguous"
    assert num_experts < _MOST_EXPERTS, "a program counts all experts"
    num_pairs, device = experts_Tk.numel(), experts_Tk.device
    if num_experts <= num_pairs <= _FEW_PAIRS:
        return _few_blocks(experts_Tk, num_experts, block)
    tiles, num_blocks = -(-num_pairs // _TILE), most_blocks(num_pairs, num_experts, block)
    rank_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    counts = torch.empty((tiles + 1, num_experts), dtype=torch.int32, device=device)
    order_P = torch.empty(num_pairs, dtype=torch.int64, device=device)
    blocks_B3 = torch.empty((num_blocks, 3), dtype=torch.int32, device=device)
    sizes = {"TILE": _TILE, "BINS": power_of_two(num_experts + 1)}
    _rank_kernel[(tiles,)](
        experts_Tk, rank_P, counts, num_pairs, num_experts, **sizes, num_warps=4, **early()
    )
    _before_kernel[(-(-num_experts // 8),)](
        counts, tiles, num_experts, ROWS=256, COLS=8, num_warps=4, **early()
    )
    _place_kernel[(tiles + num_experts + 1,)](
        experts_Tk,
        rank_P,
        counts,
        order_P,
        blocks_B3,
        num_pairs,
        num_experts,
        tiles,
        num_blocks,
        SIZE=block,
        **sizes,
        num_warps=4,
        **early(),
    )
    return order_P, blocks_B3


def _few_blocks(experts_Tk: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Return `expert_blocks`, unused rows between those of the experts."""
    num_pairs, device = experts_Tk.numel(), experts_Tk.device
    order_P = torch.empty(num_pairs, dtype=torch.int64, device=device)
    num_blocks = num_pairs // block + num_experts
    blocks_B3 = torch.empty((num_blocks, 3), dtype=torch.int32, device=device)
    _few_kernel[(num_experts,)](
        experts_Tk,
        order_P,
        blocks_B3,
        num_pairs,
        SIZE=block,
        PAIRS=power_of_two(num_pairs),
        ROWS=power_of_two(num_pairs // block + 1),
        num_warps=4,
        **early(),
    )
    return order_P, blocks_B3


@jit
def block_of(blocks):
    """Return (expert or -1, first place in the order, end) of the program's block."""
    block = blocks + tl.program_id(0) * 3
    first, end = tl.load(block + 1).to(tl.int64), tl.load(block + 2).to(tl.int64)
    return tl.load(block).to(tl.int64), first, end


@jit
def expert_block(blocks, BLOCK_M: tl.constexpr):
    """Return (expert or -1, places in the order [BLOCK_M], which of them are the block's)."""
    expert, first, end = block_of(blocks)
    place = first + tl.arange(0, BLOCK_M)
    return expert, place, place < end


@gluon_jit
def part_at(blocks, number, B, PARTS: gl.constexpr):
    """Return (expert, first place, end, part) of a part of a block, each block having PARTS.

    The expert is -1 beyond the last block in use.
    """
    inside, block = number < B * PARTS, blocks + number // PARTS * 3
    expert = gl.load(block, mask=inside, other=-1)
    first = gl.load(block + 1, mask=inside, other=0)
    return expert, first, gl.load(block + 2, mask=inside, other=0), number % PARTS


@jit
def _few_kernel(
    experts, order, blocks, P, SIZE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr
):
    """Write the places of one expert's pairs, and its blocks.

    An expert whose first pair stands at place l has rows l / SIZE + e on: as many as it may need,
    and the next expert's begin after them.
    """
    start_next()
    wait_for_inputs()
    e, p, j = tl.program_id(0), tl.arange(0, PAIRS), tl.arange(0, ROWS)
    expert = tl.load(experts + p, mask=p < P, other=1 << 30).to(tl.int32)
    own = (expert == e).to(tl.int32)
    # both numbers in one sum
    both = tl.sum((expert < e).to(tl.int32) * 65536 + own, 0)
    first, num_pairs = both // 65536, both % 65536
    place = first + tl.cumsum(own, 0) - 1
    tl.store(order + place, p.to(tl.int64), mask=own > 0)
    row, end = first // SIZE + e, (first + num_pairs) // SIZE + e + 1
    at, start = blocks + (row + j) * 3, first + j * SIZE
    inside = row + j < end
    tl.store(at, tl.where(j * SIZE < num_pairs, e, -1), mask=inside)
    tl.store(at + 1, start, mask=inside)
    tl.store(at + 2, tl.minimum(start + SIZE, first + num_pairs), mask=inside)


@jit
def _rank_kernel(experts, rank, counts, P, E, TILE: tl.constexpr, BINS: tl.constexpr):
    """Write how many pairs of a tile each expert has, and how many of them stand before a pair."""
    start_next()
    wait_for_inputs()
    i, bins = tl.arange(0, TILE), tl.arange(0, BINS)
    pair = tl.program_id(0) * TILE + i
    expert = tl.load(experts + pair, mask=pair < P, other=BINS - 1).to(tl.int32)
    equal = (expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])
    tl.store(rank + pair, tl.sum(equal.to(tl.int32), 1), mask=pair < P)
    tl.store(counts + tl.program_id(0) * E + bins, tl.histogram(expert, BINS), mask=bins < E)


@jit
def _before_kernel(counts, tiles, E, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Replace counts [tiles, E] by those of all tiles before; their sums become the last row."""
    start_next()
    wait_for_inputs()
    e = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.int32)
    for start in range(0, tiles, ROWS):
        row = start + tl.arange(0, ROWS)
        at = counts + row[:, None] * E + e[None, :]
        inside = (row < tiles)[:, None] & (e < E)[None, :]
        number = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(number, 0) - number, mask=inside)
        total += tl.sum(number, 0)
    tl.store(counts + tiles * E + e, total, mask=e < E)


@jit
def _place_kernel(
    experts,
    rank,
    before,
    order,
    blocks,
    P,
    E,
    tiles,
    B,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    bins, program = tl.arange(0, BINS), tl.program_id(0)
    totals = tl.load(before + tiles * E + bins, mask=bins < E, other=0)
    if program < tiles:
        pair = program * TILE + tl.arange(0, TILE)
        expert = tl.load(experts + pair, mask=pair < P, other=0).to(tl.int32)
        place = tl.gather(tl.cumsum(totals, 0) - totals, expert, 0)
        place += tl.load(before + program * E + expert)
        place += tl.load(rank + pair, mask=pair < P, other=0)
        tl.store(order + place, pair.to(tl.int64), mask=pair < P)
    else:
        _write_blocks(blocks, totals, bins, program - tiles, E, B, SIZE)


@jit
def _write_blocks(blocks, totals, bins, expert, E, B, SIZE: tl.constexpr):
    """Write the blocks of one expert; those of expert E are the unused ones."""
    counts = (totals + SIZE - 1) // SIZE
    lower, own = bins < expert, bins == expert
    first, num_pairs = tl.sum(tl.where(lower, totals, 0), 0), tl.sum(tl.where(own, totals, 0), 0)
    row = tl.sum(tl.where(lower, counts, 0), 0)
    number = tl.where(expert < E, (num_pairs + SIZE - 1) // SIZE, B - row)
    for start in range(0, number, 128):
        j = start + tl.arange(0, 128)
        at, place = blocks + (row + j) * 3, first + j * SIZE
        tl.store(at, tl.where(expert < E, expert, -1) + j * 0, mask=j < number)
        tl.store(at + 1, place, mask=j < number)
        tl.store(at + 2, tl.minimum(place + SIZE, first + num_pairs), mask=j < number)
