"""A context in parts: each has its own sum and largest score, which one kernel puts together.

Chosen for: never alone; decode and step share it.

Decode and step have the kernels that compute the parts. The kernel here adds them up, scaled to
their common largest score, and gates the sum.

Source: Dao et al. 2023 (Flash-Decoding).
Trap: a CUDA graph is recorded on padding alone, where every choice of blocks takes the same time,
so they are not tuned.

Shape letters: B sequences with one token each, n query heads, d head size, C parts of a context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.attention.online import add_tile, gated, load_tile
from runtime.kernels.launch import jit, power_of_two, tl
from runtime.kernels.overlap import at_once, early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# two for each multiprocessor of an H100, H200 and GH200: parts do not depend on the card
_PROGRAMS = 264
_MOST_PARTS = 64
# Two such programs fill the registers of a multiprocessor: the first tile of keys and values takes
# half of them. Where a slot has room for 4096 tokens or fewer, no part of one context has a second
# tile: STAGES 0. Twelve layers of 0.8B, three of them attention, took 462 us on an H100 with two
# stages, 440 with one.
_BLOCKS = {"GRAIN": 32, "BLOCK_L": 64, "STAGES": 2, "num_warps": 4}
# One program a multiprocessor keeps too little on the way: 268 MB, the context of 131072 tokens of
# one sequence with two key heads, take 90 us on an H200, 68 with three stages. With 32768 tokens
# that gains less than the next kernels lose, which no longer find memory to start early.
_LONG, _LONG_STAGES = 1 << 16, 3
# float32 is for proof, and takes twice as much of everything
_FLOAT32_BLOCKS = {"GRAIN": 32, "BLOCK_L": 32, "STAGES": 2, "num_warps": 8}
# What a program puts together, a warp. Programs that start early take what is free: 128 of four
# warps were on 22 multiprocessors. H200, 0.8B, 8 rows: 884 us for 908.
_COMBINED, _FEWEST_COLUMNS = 512, 8


class Parts(NamedTuple):
    """What the parts of contexts leave behind, and how their kernel is launched.

    o        [B, n, C, d] float32: sums of exp2(score - top) * v
    top      [B, n, C] the largest score; total [B, n, C] the sum of exp2(score - top)
    """

    o: Tensor
    top: Tensor
    total: Tensor

    @staticmethod
    def empty(q_Bnd: Tensor, pool_k: Tensor, fewest: int = 1) -> Parts:
        """Return room for as many parts as keep a GPU busy, or for fewer that fill their tiles."""
        batch, num_heads, head_dim = q_Bnd.shape
        tiles = -(-pool_k.shape[1] // _BLOCKS["BLOCK_L"])
        parts = max(1, min(_PROGRAMS // (batch * pool_k.shape[2]), _MOST_PARTS))
        parts = min(power_of_two(parts + 1) // 2, power_of_two(tiles))
        parts = max(parts, power_of_two(fewest))
        o = torch.empty((batch, num_heads, parts, head_dim), device=q_Bnd.device)
        top, total = (torch.empty(o.shape[:3], device=q_Bnd.device) for _ in range(2))
        return Parts(o, top, total)

    def grid(self, kv_heads: int) -> tuple[int, int, int]:
        """Return the programs: parts, key heads, sequences."""
        return self.o.shape[2], kv_heads, self.o.shape[0]

    def options(self, pool_k: Tensor) -> dict[str, int]:
        """Return the launch options of a kernel that computes the parts."""
        _, num_heads, parts, head_dim = self.o.shape
        group = num_heads // pool_k.shape[2]
        is_wide = pool_k.is_cuda and pool_k.dtype == torch.float32
        blocks = _FLOAT32_BLOCKS if is_wide else _BLOCKS
        one_tile = pool_k.shape[1] <= parts * blocks["BLOCK_L"]
        return {
            "PARTS": parts,
            "GROUP": group,
            "HEAD": head_dim,
            **blocks,
            "STAGES": 0 if one_tile else self._stages(pool_k, blocks["STAGES"]),
            "BLOCK_G": max(power_of_two(group), 16),
            "BLOCK_D": max(power_of_two(head_dim), 16),
        }

    def _stages(self, pool_k: Tensor, usual: int) -> int:
        """Return the stages of a kernel whose parts have several tiles."""
        _, places, kv_heads, _ = pool_k.shape
        return _LONG_STAGES if self.few(kv_heads) and places > _LONG else usual

    def few(self, kv_heads: int) -> bool:
        """Return whether each program may have a multiprocessor of its own."""
        batch, _, parts, _ = self.o.shape
        return batch * kv_heads * parts <= _PROGRAMS // 2

    def combined(self, gate_Bnd: Tensor, rows_R: Tensor | None = None) -> Tensor:
        """Return the gated attention [B, n, d] in the dtype of the gate, or rows [R, n, d] of it.

        rows_R  [R] int64, written before a kernel that is not launched early, or starts no other
                one before it has waited; None: all
        """
        batch, num_heads, parts, head_dim = self.o.shape
        shape = (batch if rows_R is None else len(rows_R), *gate_Bnd.shape[1:])
        y_Rnd = torch.empty(shape, dtype=gate_Bnd.dtype, device=gate_Bnd.device)
        width = power_of_two(head_dim)
        piece = min(max(_COMBINED // parts, _FEWEST_COLUMNS), width)
        _combine_kernel[(len(y_Rnd), num_heads, width // piece)](
            self.o,
            self.top,
            self.total,
            rows_R,
            gate_Bnd,
            y_Rnd,
            num_heads,
            *gate_Bnd.stride()[:2],
            PARTS=parts,
            HEAD=head_dim,
            PIECE=piece,
            num_warps=1,
            **at_once(),
            **early(),
        )
        return y_Rnd


@jit
def part_bounds(part, length, PARTS: tl.constexpr, GRAIN: tl.constexpr):
    """Return the first place of a part, and its end; the last parts may have none."""
    size = tl.cdiv(tl.cdiv(length, PARTS), GRAIN) * GRAIN
    return part * size, tl.minimum((part + 1) * size, length)


@jit
def add_part(
    o,
    top,
    total,
    q,
    k,
    v,
    keys,
    values,
    first,
    end,
    row,
    scale,
    part_o,
    part_max,
    part_sum,
    b,
    head,
    part,
    num_heads,
    inside,
    PARTS: tl.constexpr,
    HEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add one part, whose first tile is k and v, to (o, top, total); store it for the heads inside.

    keys, values  where the further tiles are; STAGES 0: there are none
    """
    BLOCK_L: tl.constexpr = k.shape[0]
    BLOCK_D: tl.constexpr = k.shape[1]
    place = first + tl.arange(0, BLOCK_L)
    o, top, total = add_tile(o, top, total, q, k, v, place, end, scale)
    if STAGES > 0:
        for start in tl.range(first + BLOCK_L, end, BLOCK_L, num_stages=STAGES):
            place = start + tl.arange(0, BLOCK_L)
            k = load_tile(keys, place, place < end, 0.0, row, HEAD, BLOCK_D)
            v = load_tile(values, place, place < end, 0.0, row, HEAD, BLOCK_D)
            o, top, total = add_tile(o, top, total, q, k, v, place, end, scale)
    at = (b * num_heads + head) * PARTS + part
    d = tl.arange(0, BLOCK_D)[None, :]
    tl.store(part_o + at[:, None] * HEAD + d, o, mask=inside[:, None] & (d < HEAD))
    tl.store(part_max + at, top, mask=inside)
    tl.store(part_sum + at, total, mask=inside)


@jit
def _combine_kernel(
    part_o,
    part_max,
    part_sum,
    rows,
    gate,
    y,
    num_heads,
    gate_row,
    gate_head,
    PARTS: tl.constexpr,
    HEAD: tl.constexpr,
    PIECE: tl.constexpr,
):
    # the gate may not be there yet: the kernel before lets this one start before it has waited,
    # so that the weights of the next product come sooner
    start_next()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = row
    if rows is not None:
        b = tl.load(rows + row)
    wait_for_inputs()
    c = tl.arange(0, PARTS)
    d = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    at = (b * num_heads + head) * PARTS + c
    top, total = tl.load(part_max + at), tl.load(part_sum + at)
    gate_d = tl.load(gate + b * gate_row + head * gate_head + d, mask=d < HEAD, other=0.0)
    o_Cd = tl.load(part_o + at[:, None] * HEAD + d[None, :], mask=(d < HEAD)[None, :], other=0.0)
    # a part without keys has o and total 0; a padding row has only such parts
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(weight * total, 0)
    o = tl.sum(weight[:, None] * o_Cd, 0) / tl.where(total > 0, total, 1.0)
    tl.store(y + (row * num_heads + head) * HEAD + d, gated(o, gate_d, y), mask=d < HEAD)
