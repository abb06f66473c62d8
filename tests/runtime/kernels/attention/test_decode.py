from __future__ import annotations

import pytest
import torch

from runtime.kernels.attention import decode as module
from runtime.kernels.attention import parts
from runtime.kernels.attention.decode import attention_decode, attention_decode_reference
from runtime.kernels.attention.reference import split_query_gate

# Scores, softmax and values in float32: sums of a few hundred terms in another order.
FLOAT32 = 1e-6
SLOTS, PLACES = 5, 400


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def heads(num_tokens, num_heads, head_dim):
    """A query and a gate as q_proj gives them: views of one tensor."""
    return split_query_gate(normal(num_tokens, num_heads * 2 * head_dim), num_heads, head_dim)


def pools(kv_heads, head_dim):
    shape = (SLOTS, PLACES, kv_heads, head_dim)
    return normal(*shape, seed=8), normal(*shape, seed=9)


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "programs"),
    [(6, 2, 32, 24), (3, 3, 24, 24), (17, 1, 16, 264)],
)
def test_the_kernel_puts_the_parts_together(
    num_heads, kv_heads, head_dim, programs, interpreter, monkeypatch
):
    """Up to 64 parts of the context: with one token most are empty, with 400 thirteen have keys."""
    monkeypatch.setattr(parts, "_PROGRAMS", programs)
    q, gate = heads(4, num_heads, head_dim)
    k, v = pools(kv_heads, head_dim)
    args = q, gate, k, v, torch.tensor([3, -1, 0, 2]), torch.tensor([400, 9, 1, 65])
    got, expected = attention_decode(*args), attention_decode_reference(*args)
    assert not got[1].any()
    assert distance(got, expected) < FLOAT32


def test_parts_of_many_tiles_go_through_all_of_them(interpreter, monkeypatch):
    """Each row has its context to itself: from one tile to seven."""
    monkeypatch.setattr(parts, "_PROGRAMS", 1)
    q, gate = heads(9, 2, 8)
    slots, lengths = torch.arange(9) % SLOTS, torch.arange(9) * 49 + 1
    args = q, gate, *pools(2, 8), slots, lengths
    assert distance(attention_decode(*args), attention_decode_reference(*args)) < FLOAT32


@pytest.mark.parametrize("late", [1, 2, 3, 70, 500])
def test_places_may_come_late(late, interpreter, monkeypatch):
    """As many as one row of a slot, as three, or more than there are."""
    monkeypatch.setattr(parts, "_PROGRAMS", 24)
    q, gate = heads(3, 4, 16)
    args = q, gate, *pools(2, 16), torch.tensor([3, 3, -1]), torch.tensor([129, 130, 1])
    expected = attention_decode_reference(*args)
    assert distance(attention_decode(*args, late), expected) < FLOAT32


def test_what_this_step_writes_is_read_only_after_the_wait(interpreter, monkeypatch):
    """Queries and the last two places are not there before it."""
    q, gate = heads(2, 4, 16)
    slots, lengths = torch.tensor([3, 3]), torch.tensor([39, 40])
    written = q, *(pool[3, 38:40] for pool in pools(2, 16))
    early_q, early = q.clone(), pools(2, 16)
    unwritten = early_q, *(pool[3, 38:40] for pool in early)

    def erase():
        for target in unwritten:
            target.fill_(torch.nan)

    def write():
        for target, source in zip(unwritten, written, strict=True):
            target.copy_(source)

    monkeypatch.setattr(parts, "_PROGRAMS", 6)
    monkeypatch.setattr(module, "start_next", erase)
    monkeypatch.setattr(module, "wait_for_inputs", write)
    got = attention_decode(early_q, gate, *early, slots, lengths, 2)
    expected = attention_decode_reference(q, gate, *pools(2, 16), slots, lengths)
    assert distance(got, expected) < FLOAT32


def test_what_lies_beyond_a_context_is_not_seen(interpreter, monkeypatch):
    monkeypatch.setattr(parts, "_PROGRAMS", 24)
    q, gate = heads(2, 4, 24)
    slots, lengths = torch.tensor([3, 0]), torch.tensor([64, 63])
    clean = pools(2, 24)
    dirty = [pool.clone() for pool in clean]
    for pool in dirty:
        pool[3, 64:] = pool[0, 63:] = pool[1] = torch.nan
    expected = attention_decode_reference(q, gate, *clean, slots, lengths)
    assert distance(attention_decode(q, gate, *dirty, slots, lengths), expected) < FLOAT32


def test_large_scores_do_not_overflow(interpreter, monkeypatch):
    """Differences of a few hundred: the softmax is then all on one key."""
    monkeypatch.setattr(parts, "_PROGRAMS", 24)
    (q, gate), (k, v) = heads(3, 2, 16), pools(1, 16)
    args = 100 * q, gate, k, v, torch.tensor([3, 0, 1]), torch.tensor([300, 70, 2])
    assert distance(attention_decode(*args), attention_decode_reference(*args)) < 1e2 * FLOAT32
