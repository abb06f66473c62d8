from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from runtime.kernels.attention import prefill
from runtime.kernels.attention.decode import attention_decode
from runtime.kernels.attention.prefill import attention_prefill
from runtime.kernels.attention.reference import (
    attention_prefill_reference,
    kv_write_reference,
    split_query_gate,
)

# Scores, softmax and values in float32: sums of a few hundred terms in another order.
FLOAT32 = 1e-6
SLOTS, PLACES = 5, 400


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def heads(num_tokens, num_heads, head_dim, seed=0):
    """A query and a gate as q_proj gives them: views of one tensor."""
    return split_query_gate(
        normal(num_tokens, num_heads * 2 * head_dim, seed=seed), num_heads, head_dim
    )


def pools(kv_heads, head_dim, places=PLACES):
    shape = (SLOTS, places, kv_heads, head_dim)
    return normal(*shape, seed=8), normal(*shape, seed=9)


def torch_attention(q, gate, k, v):
    """The whole of a sequence at once, by another implementation."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    before = k.shape[2] - q.shape[2]
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(before)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return o[0].transpose(0, 1) * torch.sigmoid(gate)


class Layer:
    """One attention layer of transformers, and what it does between its projections."""

    def __init__(self, num_heads=6, kv_heads=2, head_dim=32, hidden=40):
        self.sizes = num_heads, head_dim
        config = Qwen3_5TextConfig(
            hidden_size=hidden,
            num_attention_heads=num_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            attn_implementation="eager",
        )
        torch.manual_seed(0)
        self.part = qwen.Qwen3_5Attention(config, 0).requires_grad_(requires_grad=False)
        self.rope = qwen.Qwen3_5TextRotaryEmbedding(config)

    def expected(self, x):
        mask = torch.full((x.shape[0],) * 2, -torch.inf).triu(1)[None, None]
        places = torch.arange(x.shape[0])[None]
        return self.part(x[None], self.rope(x[None], places), mask)[0][0]

    def ours(self, x, split=split_query_gate, *, tile=False):
        part, length = self.part, x.shape[0]
        q, gate = split(part.q_proj(x), *self.sizes)
        k = part.k_norm(part.k_proj(x).view(length, -1, q.shape[2]))
        v = part.v_proj(x).view(length, -1, q.shape[2])
        cos, sin = self.rope(x[None], torch.arange(length)[None])
        q, k = qwen.apply_rotary_pos_emb(part.q_norm(q)[None], k[None], cos, sin, unsqueeze_dim=2)
        k, v = k[0], v
        if tile:
            k, v = (y.repeat(1, self.sizes[0] // y.shape[1], 1) for y in (k, v))
        pool_k, pool_v = k[None].contiguous(), v[None].contiguous()
        bounds = torch.tensor([0, length])
        y = attention_prefill(
            q[0], gate, pool_k, pool_v, torch.tensor([0]), bounds, torch.tensor([0])
        )
        return part.o_proj(y.flatten(1))


def test_the_layer_is_that_of_transformers():
    layer, x = Layer(), normal(37, 40)
    assert distance(layer.ours(x), layer.expected(x)) < FLOAT32


def test_a_split_into_whole_halves_is_seen():
    def halves(qg, num_heads, head_dim):
        return (half.view(-1, num_heads, head_dim) for half in qg.chunk(2, -1))

    layer, x = Layer(), normal(37, 40)
    assert distance(layer.ours(x, split=halves), layer.expected(x)) > 1e5 * FLOAT32


def test_tiled_key_heads_are_seen():
    layer, x = Layer(), normal(37, 40)
    assert distance(layer.ours(x, tile=True), layer.expected(x)) > 1e5 * FLOAT32


def test_the_split_gives_views_of_each_head():
    qg = torch.arange(2 * 12).view(2, 12)
    q, gate = split_query_gate(qg, 3, 2)
    assert q[1].tolist() == [[12, 13], [16, 17], [20, 21]]
    assert gate[0].tolist() == [[2, 3], [6, 7], [10, 11]]
    assert q.data_ptr() == qg.data_ptr()


def test_long_prompts_are_the_same_in_blocks_of_queries():
    """300 queries are more than the reference takes at a time."""
    q, gate = heads(300, 6, 16)
    k, v = pools(2, 16)
    zero = torch.tensor([0])
    got = attention_prefill(q, gate, k, v, zero + 3, torch.tensor([0, 300]), zero)
    assert distance(got, torch_attention(q, gate, k[3, :300], v[3, :300])) < FLOAT32


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    starts=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    empty=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_each_sequence_sees_its_slot_up_to_itself(lengths, starts, empty, seed):
    (q, gate), (k, v) = heads(sum(lengths), 4, 8, seed=seed), pools(2, 8, places=80)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[: len(lengths)]
    slots[empty:][:1] = -1
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    got = attention_prefill(q, gate, k, v, slots, bounds, torch.tensor(starts[: len(lengths)]))
    for n, slot in enumerate(slots.tolist()):
        part = slice(bounds[n], bounds[n + 1])
        if slot < 0:
            assert not got[part].any()
        elif lengths[n]:
            known = slice(0, starts[n] + lengths[n])
            expected = torch_attention(q[part], gate[part], k[slot, known], v[slot, known])
            assert distance(got[part], expected) < FLOAT32


def test_chunks_and_single_tokens_continue_a_prompt():
    q, gate = heads(50, 6, 16)
    k, v = normal(50, 2, 16, seed=1), normal(50, 2, 16, seed=2)
    pool_k, pool_v = (torch.full((3, 60, 2, 16), torch.nan) for _ in range(2))
    slot, pieces = torch.tensor([1]), []
    for first, end in ((0, 20), (20, 47), (47, 48), (48, 49), (49, 50)):
        places = torch.arange(first, end)
        kv_write_reference(
            k[first:end], v[first:end], pool_k, pool_v, slot.expand(end - first), places
        )
        args = q[first:end], gate[first:end], pool_k, pool_v, slot
        if end - first > 1:
            bounds = torch.tensor([0, end - first])
            pieces.append(attention_prefill(*args, bounds, torch.tensor([first])))
        else:
            pieces.append(attention_decode(*args, torch.tensor([end])))
    assert distance(torch.cat(pieces), torch_attention(q, gate, k, v)) < FLOAT32


def test_bfloat16_rounds_three_times():
    """The output, the sigmoid and their product, each by at most 2^-8 of itself."""
    (q, gate), (k, v) = heads(40, 6, 32), pools(2, 32)
    q, gate, k, v = (x.bfloat16() for x in (q, gate, k, v))
    args = torch.tensor([2]), torch.tensor([0, 40]), torch.tensor([7])
    got = attention_prefill(q, gate, k, v, *args).float()
    exact = attention_prefill(*(x.float() for x in (q, gate, k, v)), *args)
    assert ((got - exact).abs() <= exact.abs() * (3 * 2**-8 + 2**-14)).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_writing_touches_the_places_named_and_no_others(dtype):
    k, v = normal(4, 2, 8, seed=1), normal(4, 2, 8, seed=2)
    pool_k, pool_v = pools(2, 8)
    before_k, before_v = pool_k.clone(), pool_v.clone()
    slots = torch.tensor([3, -1, 0, 3], dtype=dtype)
    places = torch.tensor([7, 1, 0, 399], dtype=dtype)
    kv_write_reference(k, v, pool_k, pool_v, slots, places)
    for pool, before, new in ((pool_k, before_k, k), (pool_v, before_v, v)):
        for t in (0, 2, 3):
            before[slots[t].item(), places[t].item()] = new[t]
        assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"), [(6, 2, 32), (3, 3, 24), (4, 1, 8), (2, 1, 256)]
)
def test_the_prefill_kernel_sees_what_the_reference_sees(
    num_heads, kv_heads, head_dim, interpreter
):
    """Ragged, with an empty sequence, a padded one, prefixes on and off the edge of a tile."""
    lengths, starts = [1, 70, 0, 20, 66], [40, 128, 3, 0, 63]
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    q, gate = heads(sum(lengths), num_heads, head_dim)
    k, v = pools(kv_heads, head_dim)
    args = q, gate, k, v, torch.tensor([3, 0, 1, -1, 4]), bounds, torch.tensor(starts)
    got, expected = attention_prefill(*args), attention_prefill_reference(*args)
    assert not got[71:91].any()
    assert distance(got, expected) < FLOAT32


@pytest.mark.parametrize("places", [132, 4])
def test_the_prefill_kernel_takes_larger_blocks_of_long_prompts(places, monkeypatch, interpreter):
    """Where a GPU has not enough places for smaller ones."""
    monkeypatch.setattr(prefill, "_PLACES", places)
    (q, gate), (k, v) = heads(150, 2, 16), pools(1, 16)
    args = q, gate, k, v, torch.tensor([3]), torch.tensor([0, 150]), torch.tensor([10])
    assert distance(attention_prefill(*args), attention_prefill_reference(*args)) < FLOAT32
