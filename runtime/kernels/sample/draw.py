"""Tokens drawn from the likeliest few: by sorting the logits, or by counting them.

Chosen for: every batch with a row that is not greedy, by `DRAW`.

    p = softmax(logits / temperature)     over the top_k likeliest tokens
    of these the fewest whose probabilities reach top_p, renormalised; the token where the
    cumulated probability passes a given number

Source: Holtzman et al. 2020 for top-p, after top-k as in transformers. Sums are in float64.
A logit in bfloat16 is one of 65536 numbers, so that counting how many tokens have each orders them:
of those with one number only how many come before matters. A sort of 248320 logits takes longer
than a step of a small model.

Trap: a row whose largest logit is NaN or infinite has no next token.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.cases import Draw
from runtime.kernels.dispatch import DRAW
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.sample.order import (
    BLOCK,
    BLOCKS,
    CHUNK,
    KEYS,
    count_key,
    count_keys,
    number_of,
    pick_token,
    sum_blocks,
    weights_of,
)

NO_TOKEN = -2  # -1 is a draft in vain


def draw(logits_RV: Tensor, settings_R3: Tensor, at_R: Tensor) -> Tensor:
    """Return the token [R] at each row's number in [0, 1) along its cumulated probabilities.

    NO_TOKEN where the largest logit is NaN or infinite.

    logits_RV    [R, V] any float, rows contiguous in themselves
    settings_R3  [R, 3] float64: temperature above 0, top_k, which may be inf, and top_p
    at_R         [R] float64
    """
    tokens_R: Tensor = _draw(Draw(use_triton(logits_RV), logits_RV.dtype))(
        logits_RV, settings_R3, at_R
    )
    return tokens_R


def by_sort(logits_RV: Tensor, settings_R3: Tensor, at_R: Tensor) -> Tensor:
    """Return `draw` of any float."""
    temperature, top_k, top_p = settings_R3.T[..., None]
    ordered, order = logits_RV.sort(stable=True, dim=-1, descending=True)
    ordered = ordered.double()  # after the sort, which takes as long as its numbers have bits
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    p = (
        ((ordered - ordered[:, :1]) / temperature)
        .masked_fill(rank >= top_k, -torch.inf)
        .softmax(-1)
    )
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    cumulated = p.cumsum(-1)
    place = torch.searchsorted(cumulated, at_R[:, None] * cumulated[:, -1:], right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    tokens = order.gather(1, torch.minimum(place, last).clamp(min=0))[:, 0]
    return torch.where(ordered[:, 0] < torch.inf, tokens, NO_TOKEN)


def by_counts(logits_RV: Tensor, settings_R3: Tensor, at_R: Tensor) -> Tensor:
    """Return `draw` of logits in bfloat16."""
    assert logits_RV.stride(1) == 1, "rows must be contiguous"
    rows, vocabulary = logits_RV.shape
    device, chunks = logits_RV.device, -(-vocabulary // CHUNK)
    zeros = torch.zeros(rows * (KEYS + 1), dtype=torch.int32, device=device)
    counts, first = zeros[rows:], zeros[:rows]
    block_counts = torch.empty((rows, BLOCKS), dtype=torch.int32, device=device)
    block_sums = torch.empty((rows, BLOCKS), dtype=torch.float64, device=device)
    chosen, rank = torch.empty((2, rows), dtype=torch.int32, device=device)
    chunk_counts = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    bits = logits_RV.view(torch.int16)
    row = bits, bits.stride(0), vocabulary
    settings_R3 = settings_R3.contiguous()
    blocks = block_counts, block_sums
    count_keys[(chunks, rows)](*row, counts, first, CHUNK=CHUNK, KEYS=KEYS)
    sum_blocks[(BLOCKS, rows)](counts, first, settings_R3, *blocks, BLOCK=BLOCK, KEYS=KEYS)
    _choose_kernel[(rows,)](
        counts,
        first,
        settings_R3,
        at_R,
        *blocks,
        chosen,
        rank,
        BLOCKS=BLOCKS,
        BLOCK=BLOCK,
        KEYS=KEYS,
    )
    count_key[(chunks, rows)](*row, chosen, chunk_counts, CHUNK=CHUNK)
    pick_token[(rows,)](
        *row,
        chosen,
        rank,
        first,
        chunk_counts,
        chunks,
        tokens,
        NO_TOKEN,
        CHUNK=CHUNK,
        MOST=power_of_two(chunks),
        KEYS=KEYS,
    )
    return tokens


@jit
def _at(x, i, index):
    """Return x[index]."""
    return tl.sum(tl.where(i == index, x, 0), 0)


@jit
def _within_top_k(count, before, limit):
    """Return how many of each key's tokens are among the `limit` likeliest."""
    return tl.minimum(tl.maximum(limit - before - (tl.cumsum(count, 0) - count), 0), count)


@jit
def _within_top_p(count, weight, before, mass):
    """Return how many of each key's tokens begin below `mass`, and the sum before each key."""
    each = count * weight
    start = before + tl.cumsum(each, 0) - each
    room = tl.ceil((mass - start) / tl.where(weight > 0, weight, 1.0))
    return tl.where(start < mass, tl.minimum(count.to(tl.float64), room), 0.0), start


@jit
def _choose_kernel(
    counts,
    first,
    settings,
    at,
    block_counts,
    block_sums,
    chosen,
    rank,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the key of a row's token, and how many tokens of that key come before it."""
    row, b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    top = number_of(KEYS - 1 - tl.load(first + row))
    temperature = tl.load(settings + row * 3)
    count_B = tl.load(block_counts + row * BLOCKS + b)
    sum_B = tl.load(block_sums + row * BLOCKS + b)
    limit = tl.minimum(tl.load(settings + row * 3 + 1), 1e9).to(tl.int32)
    before_B = tl.cumsum(count_B, 0) - count_B

    # top_k ends in one block: those after it have no weight
    end = tl.max(tl.where((before_B < limit) & (count_B > 0), b, 0), 0)
    count, weight = weights_of(counts, row, end, top, temperature, BLOCK, KEYS)
    count = _within_top_k(count, _at(before_B, b, end), limit)
    sum_B = tl.where(b < end, sum_B, tl.where(b == end, tl.sum(count * weight, 0), 0.0))

    # and so does top_p, at a mass
    start_B = tl.cumsum(sum_B, 0) - sum_B
    mass = tl.load(settings + row * 3 + 2) * tl.sum(sum_B, 0)
    end = tl.max(tl.where((start_B < mass) & (sum_B > 0), b, 0), 0)
    count, weight = weights_of(counts, row, end, top, temperature, BLOCK, KEYS)
    count = _within_top_k(count, _at(before_B, b, end), limit)
    kept, start = _within_top_p(count, weight, _at(start_B, b, end), mass)
    passed = tl.load(at + row) * (_at(start_B, b, end) + tl.sum(kept * weight, 0))

    # the token is where the sum passes a share of what is left
    block = tl.max(tl.where((start_B <= passed) & (sum_B > 0) & (b <= end), b, 0), 0)
    count, weight = weights_of(counts, row, block, top, temperature, BLOCK, KEYS)
    count = _within_top_k(count, _at(before_B, b, block), limit)
    kept, start = _within_top_p(count, weight, _at(start_B, b, block), mass)
    passes = (start + kept * weight > passed) & (kept > 0)
    last = tl.max(tl.where(kept > 0, i, 0), 0)
    key = tl.min(tl.where(passes, i, last), 0)
    weight = _at(weight, i, key)
    place = tl.floor((passed - _at(start, i, key)) / tl.where(weight > 0, weight, 1.0))
    place = tl.minimum(place, _at(kept, i, key) - 1)
    tl.store(chosen + row, block * BLOCK + key)
    tl.store(rank + row, tl.maximum(place, 0.0).to(tl.int32))


_draw = DRAW.bind(by_sort, by_counts)
