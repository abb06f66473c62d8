from __future__ import annotations

import pytest
import torch

from formats.family.config import read_config
from runtime.state import Batch, Room, Span, State, conv_channels
from tests.checkpoints import hub_config
from tests.runtime.models import full, load, pools_for, run, some_ids, state_of, write


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("state")))


def config(**changes):
    return read_config(hub_config(moe=True, sizes="ragged", **changes))


def allocate(its_config, recurrent_dtype=torch.float32, **more):
    return State.allocate(
        its_config,
        Room(3, 70, **more),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        recurrent_dtype=recurrent_dtype,
    )


def test_each_layer_sees_its_pools_with_slots_first():
    its_config = config()
    state = allocate(its_config)
    pools = state.pools()
    assert [[tuple(pool.shape) for pool in pair] for pair in pools] == [
        [(3, 208, 3), (3, 6, 16, 24)],
    ] * 3 + [[(3, 70, 2, 32)] * 2]
    assert conv_channels(its_config) == 2 * 2 * 16 + 6 * 24
    for layer, pair in enumerate(pools):
        for pool in pair:
            pool[1] = layer + 1
    assert state.conv[1].unique().tolist() == [1, 2, 3]
    assert state.recurrent[1].unique().tolist() == [1, 2, 3]
    assert not state.recurrent[[0, 2]].any()


def test_only_attention_layers_and_the_mtp_head_have_keys():
    its_config = config()
    assert allocate(its_config).keys.shape[0] == 1
    state = allocate(its_config, mtp_layers=1)
    assert state.keys.shape[0] == 2
    assert state.mtp_pools()[0].data_ptr() == state.keys[1].data_ptr()


def test_states_are_float32_unless_asked_otherwise():
    state = allocate(config())
    assert (state.recurrent.dtype, state.conv.dtype) == (torch.float32, torch.bfloat16)
    assert allocate(config(), recurrent_dtype=torch.bfloat16).recurrent.dtype == torch.bfloat16


def test_nothing_is_sized_by_the_feed_forward():
    small, large = (
        allocate(config(moe_intermediate_size=f, shared_expert_intermediate_size=f))
        for f in (2, 4096)
    )
    for name in ("recurrent", "conv", "keys", "values"):
        assert getattr(small, name).shape == getattr(large, name).shape


def test_a_slot_is_empty_when_it_is_taken():
    state = allocate(config())
    assert [state.take_slot() for _ in range(3)] == [0, 1, 2]
    state.recurrent.fill_(7)
    state.conv.fill_(7)
    state.give_slot(1)
    assert state.take_slot() == 1
    assert not state.recurrent[1].any()
    assert not state.conv[1].any()
    assert (state.recurrent[[0, 2]] == 7).all()


def test_spare_states_are_not_handed_out():
    state = allocate(config(), spares=2)
    assert state.recurrent.shape[0] == state.conv.shape[0] == 5
    assert state.keys.shape[1] == 3
    assert state.free_slots == [0, 1, 2]


def test_a_slot_cannot_be_given_back_twice():
    state = allocate(config())
    with pytest.raises(AssertionError, match="given back twice"):
        state.give_slot(0)


@pytest.mark.parametrize("decode", [0, 1, 5])
def test_padding_slots_write_nothing(model, decode):
    state = pools_for(model)
    for pool in (state.recurrent, state.conv, state.keys, state.values):
        pool.fill_(3)
    run(model, some_ids(20, model), state, slot=-1, decode=decode)
    for pool in (state.recurrent, state.conv, state.keys, state.values):
        assert (pool == 3).all()


def test_other_slots_stay_bit_equal(model):
    state = pools_for(model, slots=3)
    ids = some_ids(30, model)
    for slot in range(3):
        run(model, ids[slot:], state, slot=slot)
    before = [x.clone() for slot in (0, 2) for x in state_of(state, slot, 512)]
    run(model, ids[::-1], state, slot=1, cuts=(11,), decode=3)
    after = [x for slot in (0, 2) for x in state_of(state, slot, 512)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_keys_of_a_former_sequence_are_never_read(model):
    """A slot's keys are not cleared: what a longer sequence left there must not matter."""
    state = pools_for(model)
    state.keys.fill_(torch.nan)
    state.values.fill_(torch.nan)
    ids = some_ids(25, model)
    assert torch.equal(run(model, ids, state, decode=4)[:21], full(model, ids[:21]))


def test_a_batch_puts_decodes_first_and_counts_prefills_from_zero():
    decodes = [Span([7], 4, 0, 0), Span([8], 5, 0, 2), Span([9], 9, 3, 3), Span([6], 10, 3, 5)]
    prefills = [Span([1, 2, 3], 64, 1, 1), Span([4, 5], 0, 4, 4)]
    batch = Batch.pack(decodes, prefills, torch.device("cpu"), each=2)
    assert batch.ids.tolist() == [7, 8, 9, 6, 1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [4, 5, 9, 10, 64, 65, 66, 0, 1]
    assert batch.token_slots.tolist() == [0, 0, 3, 3, 1, 1, 1, 4, 4]
    assert batch.slots.tolist() == [0, 0, 3, 3, 1, 4]
    assert batch.states.tolist() == [0, 2, 3, 5, 1, 4]
    assert batch.sources.tolist() == [0, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.starts.tolist() == [64, 0]
    assert batch.lengths.tolist() == [5, 6, 10, 11]
    assert (batch.num_decodes, batch.num_prefills) == (4, 2)
