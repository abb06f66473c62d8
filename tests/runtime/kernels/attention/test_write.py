from __future__ import annotations

import pytest
import torch

from runtime.kernels.attention.rope import rope_cos_sin
from runtime.kernels.attention.write import norm_rope_write, norm_rope_write_reference

EPS = 1e-6
# Two products and a sum after a norm: a few units of 2^-24.
FLOAT32 = 1e-6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(num_tokens, d=20, heads=3, kv_heads=2, rotated=8):
    """q a view on [q | gate], k and v views on one product, as in the model."""
    q = normal(num_tokens, heads, 2 * d)[..., :d]
    k, v = normal(num_tokens, 2 * kv_heads, d, seed=1).split(kv_heads, 1)
    places = torch.arange(num_tokens) % 4
    angles = rope_cos_sin(places * 50, rotated, 1e4)
    weights = normal(d, seed=2) * 0.1, normal(d, seed=3) * 0.1
    return q, k, v, *weights, *angles, EPS, places


@pytest.mark.parametrize("slots", [[2], [0, 0, -1, 0, 2, 1, 1, -1, 2, 2, 2]])
def test_queries_come_back_and_keys_and_values_enter_their_slots(slots, interpreter):
    """The kernel as the reference; padding rows write nothing, and nothing else changes."""
    *inputs, places = arguments(len(slots))
    before = normal(2, 3, 5, 2, 20, seed=4)
    pools = [tuple(before.clone()) for _ in range(2)]
    got, expected = (
        f(*inputs, *p, torch.tensor(slots), places)
        for f, p in zip((norm_rope_write, norm_rope_write_reference), pools, strict=True)
    )
    assert (got - expected).abs().max() < FLOAT32
    written = {(slot, place) for slot, place in zip(slots, places.tolist(), strict=True)}
    for ours, theirs, old in zip(*pools, before, strict=True):
        assert (ours - theirs).abs().max() < FLOAT32
        for slot in range(3):
            for place in range(5):
                changed = not torch.equal(ours[slot, place], old[slot, place])
                assert changed == ((slot, place) in written)


@pytest.mark.parametrize(("d", "rotated"), [(16, 4), (20, 12), (24, 24)])
def test_any_part_of_a_head_is_rotated(d, rotated, interpreter):
    """Every second head of k and v, and of the pool all but the slot before it: where -1 would be.

    Places are those of one sequence that has come to the end of its slot.
    """
    q, k, v, *rest = arguments(11, d=d, kv_heads=6, rotated=rotated)[:-1]
    k, v = k[:, ::2], v[:, ::2]
    slots, places = torch.arange(11) % 4 - 1, torch.arange(11) + 2
    wholes = [[normal(4, 13, 3, d, seed=seed) for seed in (4, 5)] for _ in range(2)]
    got, expected = (
        f(q, k, v, *rest, *(whole[1:] for whole in pair), slots, places)
        for f, pair in zip((norm_rope_write, norm_rope_write_reference), wholes, strict=True)
    )
    assert (got - expected).abs().max() < FLOAT32
    for ours, theirs, seed in zip(*wholes, (4, 5), strict=True):
        assert (ours - theirs).abs().max() < FLOAT32
        assert torch.equal(ours[0], normal(4, 13, 3, d, seed=seed)[0])


def test_values_are_copied_to_the_bit_by_slots_of_either_size(interpreter):
    for dtype in (torch.int32, torch.int64):
        *inputs, places = arguments(4)
        pools = torch.zeros(2, 3, 5, 2, 20)
        slots = torch.tensor([2, -1, 0, 2], dtype=dtype)
        norm_rope_write(*inputs, *pools, slots, places.to(dtype))
        for t in (0, 2, 3):
            assert torch.equal(pools[1][slots[t], places[t]], inputs[2][t])


def test_pools_of_another_shape_are_refused():
    *inputs, places = arguments(3)
    pools = torch.zeros(2, 3, 5, 2, 24)
    with pytest.raises(AssertionError, match=r"slots, places, m, d"):
        norm_rope_write(*inputs, *pools, places, places)
