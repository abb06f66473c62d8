"""Between a step of drafted tokens and the next: what was right, and where the next one begins.

Chosen for: every step with drafts.

    right = how many drafts, from the first on, are the tokens chosen after the rows before them

It is a dozen whole numbers, and as many kernels if each operation is one. The angles of the rows
to come, which drafts need, come with their places.

Shape letters: B sequences, D rows, as many for each sequence: its last token, then drafts; r pairs
that are rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.attention.rope import store_angles
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


class Places(NamedTuple):
    """Where rows are: ids, positions and lengths [D] int64, a row's length being its position + 1.

    A batch's own; others have the same order.
    """

    ids: Tensor
    positions: Tensor
    lengths: Tensor


class Turns(NamedTuple):
    """Angles of rows: cos and sin [D, r] of any float, to be filled; see attention.rope.

    frequency_r  [r] float32
    factor       what cosines and sines are multiplied by
    """

    cos: Tensor
    sin: Tensor
    frequency_r: Tensor
    factor: float


def settle_reference(
    tokens_D: Tensor,
    rows: Places,
    states_D: Tensor,
    sources_B: Tensor,
    following: Places,
    turns: Turns,
) -> tuple[Tensor, Tensor]:
    """Say what `settle` computes, in plain torch."""
    tokens, ids = (x.view(len(sources_B), -1) for x in (tokens_D, rows.ids))
    right = (tokens[:, :-1] == ids[:, 1:]).long().cumprod(1).sum(1, keepdim=True)
    known = tokens.clamp(min=0)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    for to, numbers in zip(following, (known, rows.positions, rows.lengths), strict=True):
        to.copy_(numbers.flatten())
    ids[:, :1] = known.gather(1, right)
    for numbers in (rows.positions, rows.lengths):
        numbers.view_as(tokens).add_(right + 1)
    angle_Dr = rows.positions[:, None].float() * turns.frequency_r
    turns.cos.copy_(angle_Dr.cos() * turns.factor)
    turns.sin.copy_(angle_Dr.sin() * turns.factor)
    states, free = states_D.view_as(tokens), sources_B.clone()[:, None]
    sources_B.copy_(states.gather(1, right)[:, 0])
    states.scatter_(1, right, free)
    last = right[:, 0] + torch.arange(len(right), device=right.device) * tokens.shape[1]
    return tokens.masked_fill(place > right, -1).flatten(), last


def settle(
    tokens_D: Tensor,
    rows: Places,
    states_D: Tensor,
    sources_B: Tensor,
    following: Places,
    turns: Turns,
) -> tuple[Tensor, Tensor]:
    """Return (the new tokens [D], the last right row of each sequence [B]); go on after these.

    tokens_D   [D] int64, chosen after each row; below 0 if there is none
    rows       the rows: moved on in place to those of the next step, whose drafts are still to come
    states_D   [D] int64, where each row has left its state, and that of the next step will
    sources_B  [B] int64, the state before the rows, replaced by that of the last right row; it is
               free then, and takes the place of that in states_D
    following  filled with the tokens, as ids that can be embedded, and the places of the old rows
    turns      filled with the angles of the next step's rows

    New tokens are those after the right rows; the others are -1.
    """
    if not use_triton(tokens_D):
        return settle_reference(tokens_D, rows, states_D, sources_B, following, turns)
    for x in (tokens_D, *rows, states_D, sources_B, *following):
        assert x.is_contiguous(), "whole numbers one after another"
        assert x.dtype == torch.int64, "int64 throughout"
    assert turns.cos.is_contiguous(), "rows of angles must follow one another"
    assert turns.sin.is_contiguous(), "rows of angles must follow one another"
    new, last = torch.empty_like(tokens_D), torch.empty_like(sources_B)
    each = len(tokens_D) // len(sources_B)
    _settle_kernel[(len(sources_B),)](
        tokens_D,
        *rows,
        states_D,
        sources_B,
        *following,
        new,
        last,
        *turns,
        EACH=each,
        BLOCK=power_of_two(each),
        R=len(turns.frequency_r),
        BLOCK_R=power_of_two(len(turns.frequency_r)),
        num_warps=4,
        **early(),
    )
    return new, last


@jit
def _settle_kernel(
    tokens,
    ids,
    positions,
    lengths,
    states,
    sources,
    next_ids,
    next_positions,
    next_lengths,
    new,
    last,
    cos,
    sin,
    frequency,
    factor,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    start_next()
    n = tl.program_id(0)
    i, r = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)[None, :]
    step = tl.load(frequency + r, mask=r < R, other=0.0)
    wait_for_inputs()
    row, inside = n * EACH + i, i < EACH
    token = tl.load(tokens + row, mask=inside, other=-1)
    draft = tl.load(ids + row + 1, mask=i < EACH - 1, other=-1)
    position = tl.load(positions + row, mask=inside, other=0)
    # the first row whose token is not the draft after it: the last right one
    right = tl.min(tl.where((token == draft) & (i < EACH - 1), EACH - 1, i), 0)
    here = i == right
    tl.store(next_ids + row, tl.maximum(token, 0), mask=inside)
    tl.store(next_positions + row, position, mask=inside)
    tl.store(next_lengths + row, position + 1, mask=inside)
    tl.store(new + row, tl.where(i <= right, token, -1), mask=inside)
    tl.store(last + n, n * EACH + right)
    before, after = tl.load(sources + n), tl.load(states + n * EACH + right)
    tl.debug_barrier()  # ids, sources and states are read above
    tl.store(sources + n, after)
    tl.store(states + n * EACH + right, before)
    tl.store(ids + row - i, tl.maximum(token, 0), mask=here & inside)
    tl.store(positions + row, position + right + 1, mask=inside)
    tl.store(lengths + row, position + right + 2, mask=inside)
    at, turned = row[:, None] * R + r, inside[:, None] & (r < R)
    store_angles(cos + at, sin + at, position[:, None] + right + 1, step, factor, turned)
