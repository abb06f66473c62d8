"""Gated attention of one token for each sequence: a context in parts, then the parts together.

Each program has one part of one context, for the query heads that share a key head; a second kernel
adds up the parts, scaled to their common largest score, and gates the sum.

The first keys and values of a part are asked for while the kernels before still run: those of all
places but the last few, which these kernels may be writing. The others were written in earlier
steps, and a step begins with a kernel that is not launched early: these are complete.

Source: Dao et al. 2023 (Flash-Decoding) for the split over the context; the rest: see attention.
Trap: a CUDA graph is recorded on padding alone, where every choice of blocks takes as long. So they
are not tuned.

Shape letters: B sequences with one token each, n query heads, m key and value heads, d head size, S
slots, L tokens a slot holds, C parts of a context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.kernels.attention.reference import (
    LOG2_E,
    add_tile,
    attention_prefill_reference,
    check,
    gated,
    load_tile,
)
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

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
# float32 is for proof, and takes twice as much of everything
_FLOAT32_BLOCKS = {"GRAIN": 32, "BLOCK_L": 32, "STAGES": 2, "num_warps": 8}
_COMBINED = 2048


@dataclass(frozen=True)
class Parts:
    """What the parts of contexts leave behind, and how their kernel is launched.

    o        [B, n, C, d] float32: sums of exp2(score - top) * v
    top      [B, n, C] the largest score; total [B, n, C] the sum of exp2(score - top)
    """

    o: Tensor
    top: Tensor
    total: Tensor

    @staticmethod
    def empty(q_Bnd: Tensor, kv_heads: int) -> Parts:
        """Return room for as many parts as keep a GPU busy."""
        batch, num_heads, head_dim = q_Bnd.shape
        parts = max(1, min(_PROGRAMS // (batch * kv_heads), _MOST_PARTS))
        parts = power_of_two(parts + 1) // 2
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
            "PARTS": parts, "GROUP": group, "HEAD": head_dim,
            **blocks, "STAGES": 0 if one_tile else blocks["STAGES"],
            "BLOCK_G": max(power_of_two(group), 16), "BLOCK_D": max(power_of_two(head_dim), 16),
        }  # fmt: skip

    def combined(self, gate_Bnd: Tensor) -> Tensor:
        """Return the gated attention [B, n, d] in the dtype of the gate."""
        batch, num_heads, parts, head_dim = self.o.shape
        y_Bnd = torch.empty(gate_Bnd.shape, dtype=gate_Bnd.dtype, device=gate_Bnd.device)
        width = power_of_two(head_dim)
        piece = min(max(_COMBINED // parts, 32), width)
        _combine_kernel[(batch, num_heads, width // piece)](
            self.o, self.top, self.total, gate_Bnd, y_Bnd, num_heads, *gate_Bnd.stride()[:2],
            PARTS=parts, HEAD=head_dim, PIECE=piece, num_warps=4, **early(),
        )  # fmt: skip
        return y_Bnd


def attention_decode_reference(
    q_Bnd: Tensor, gate_Bnd: Tensor, pool_k: Tensor, pool_v: Tensor,
    slots_B: Tensor, lengths_B: Tensor,
) -> Tensor:  # fmt: skip
    """Say what `attention_decode` computes, in plain torch."""
    cu_seqlens = torch.arange(q_Bnd.shape[0] + 1)
    return attention_prefill_reference(
        q_Bnd, gate_Bnd, pool_k, pool_v, slots_B, cu_seqlens, lengths_B - 1
    )


def attention_decode(
    q_Bnd: Tensor, gate_Bnd: Tensor, pool_k: Tensor, pool_v: Tensor,
    slots_B: Tensor, lengths_B: Tensor, late: int = 1,
) -> Tensor:  # fmt: skip
    """Return the gated attention [B, n, d] of one token for each sequence to its whole slot.

    q_Bnd, gate_Bnd  [B, n, d] model dtype, heads contiguous in themselves
    pool_k, pool_v   [S, L, m, d] contiguous, the B tokens included
    slots_B          [B] int32 or int64; below 0 the row is zeros
    lengths_B        [B] int32 or int64, tokens in the slot, this one included
    late             how many of the last places of a row's context this step writes: as many as
                     there are rows of one slot
    """
    check(q_Bnd, gate_Bnd, pool_k, pool_v)
    assert lengths_B.shape == slots_B.shape == q_Bnd.shape[:1], "one slot and length for each row"
    if not use_triton(q_Bnd):
        return attention_decode_reference(q_Bnd, gate_Bnd, pool_k, pool_v, slots_B, lengths_B)
    _, num_heads, head_dim = q_Bnd.shape
    kv_heads = pool_k.shape[2]
    parts = Parts.empty(q_Bnd, kv_heads)
    _decode_kernel[parts.grid(kv_heads)](
        q_Bnd, pool_k, pool_v, parts.o, parts.top, parts.total, slots_B, lengths_B, late,
        pool_k.shape[1], num_heads, kv_heads, *q_Bnd.stride()[:2], head_dim**-0.5 * LOG2_E,
        **parts.options(pool_k), **early(),
    )  # fmt: skip
    return parts.combined(gate_Bnd)


@jit
def part_bounds(part, length, PARTS: tl.constexpr, GRAIN: tl.constexpr):
    """Return the first place of a part, and its end; the last parts may have none."""
    size = tl.cdiv(tl.cdiv(length, PARTS), GRAIN) * GRAIN
    return part * size, tl.minimum((part + 1) * size, length)


@jit
def add_part(
    o, top, total, q, k, v, keys, values, first, end, row, scale,
    part_o, part_max, part_sum, b, head, part, num_heads, inside,
    PARTS: tl.constexpr, HEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
def _decode_kernel(
    q, pool_k, pool_v, part_o, part_max, part_sum, slots, lengths, late, L, num_heads, kv_heads,
    q_row, q_head, scale, PARTS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    GRAIN: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    start_next()
    part, kv_head = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot, length = tl.load(slots + b).to(tl.int64), tl.load(lengths + b).to(tl.int32)
    length = tl.where(slot >= 0, length, 0)
    first, end = part_bounds(part, length, PARTS, GRAIN)
    row = kv_heads * HEAD
    k_head = pool_k + (slot * L * kv_heads + kv_head) * HEAD
    v_head = pool_v + (slot * L * kv_heads + kv_head) * HEAD
    place = first + tl.arange(0, BLOCK_L)
    old = place < tl.minimum(end, length - late)
    k = load_tile(k_head, place, old, 0.0, row, HEAD, BLOCK_D)
    v = load_tile(v_head, place, old, 0.0, row, HEAD, BLOCK_D)
    wait_for_inputs()
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)[None, :]
    head = kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < HEAD)
    q_Gd = tl.load(q + b * q_row + head[:, None] * q_head + d, mask=inside, other=0.0)
    new = (place < end) & (place >= length - late)
    k = load_tile(k_head, place, new, k, row, HEAD, BLOCK_D)
    v = load_tile(v_head, place, new, v, row, HEAD, BLOCK_D)
    o = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_G,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    add_part(
        o, top, total, q_Gd, k, v, k_head, v_head, first, end, row, scale,
        part_o, part_max, part_sum, b, head, part, num_heads, g < GROUP, PARTS, HEAD, STAGES,
    )  # fmt: skip


@jit
def _combine_kernel(
    part_o, part_max, part_sum, gate, y, num_heads, gate_row, gate_head,
    PARTS: tl.constexpr, HEAD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    # the gate may not be there yet: the kernel before lets this one start before it has waited,
    # so that the weights of the next product come sooner
    start_next()
    wait_for_inputs()
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
    tl.store(y + (b * num_heads + head) * HEAD + d, gated(o, gate_d, y), mask=d < HEAD)
