from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from runtime.kernels.delta_rule import halves
from runtime.kernels.delta_rule import prefill as prefill_kernel
from runtime.kernels.delta_rule import solve as chunked
from runtime.kernels.delta_rule import step as step_kernel
from runtime.kernels.delta_rule.conv1d import conv1d_prefill
from runtime.kernels.delta_rule.conv1d_step import conv1d_step
from runtime.kernels.delta_rule.rule import CHUNK, chunks, gates, heads_first, recurrence
from runtime.kernels.delta_rule.states import (
    gated_delta_prefill,
    gated_delta_prefill_reference,
    gated_delta_step,
    gated_delta_step_reference,
)
from runtime.kernels.norm.gated import Gate, gated_rmsnorm

# The running sum of 64 decays reaches 100 and rounds at 2^-18: e^(G_i - G_j) inherits it.
FLOAT32 = 2**-18


def distance(got, expected):
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def inputs(num_tokens, heads=(2, 6), sizes=(16, 24), seed=0, dtype=torch.float32):
    """Return (q, k, v, a, b, A_log, dt_bias): decays from almost none to almost all."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (num_tokens, heads[0], sizes[0]),
        (num_tokens, heads[0], sizes[0]),
        (num_tokens, heads[1], sizes[1]),
        (num_tokens, heads[1]),
        (num_tokens, heads[1]),
    ]
    A_log = torch.empty(heads[1]).uniform_(0.01, 2, generator=generator).log()
    x = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*x, A_log, torch.randn(heads[1], generator=generator).to(dtype) - 1]


def states(slots=3, heads=6, sizes=(16, 24), seed=9):
    return torch.randn(slots, heads, *sizes, generator=torch.Generator().manual_seed(seed))


def double(tensors):
    return [x.double() for x in tensors]


def prefill(x, pool, slots=(0,), lengths=None, function=gated_delta_prefill):
    bounds = torch.tensor([0, *(lengths or [len(x[0])])]).cumsum(0).int()
    return function(*x, pool, torch.tensor(slots, dtype=torch.int32), bounds)


def tokens(x, start, end):
    return [*(part[start:end] for part in x[:5]), *x[5:]]


def theirs(function, x, state):
    q, k, v, a, b, A_log, dt_bias = x
    g, _ = gates(a, b, A_log, dt_bias)
    o, state = function(
        *(part[None] for part in (q, k, v, g, b.sigmoid())),
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return o[0], state[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 150, 300])
def test_prefill_is_that_of_transformers(num_tokens, dtype):
    """bfloat16 outputs are float32 ones rounded: one step apart, 2^-7, if they straddle a tie."""
    x, pool = inputs(num_tokens, dtype=dtype), states()
    bound = 2**-7 if dtype == torch.bfloat16 else FLOAT32
    for function in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        expected, state = theirs(function, x, pool[1])
        for rule in (gated_delta_prefill, gated_delta_prefill_reference):
            ours = pool.clone()
            o = prefill(x, ours, [1], function=rule)
            assert o.dtype == dtype
            assert distance(o, expected) < bound
            assert distance(ours[1], state) < FLOAT32


@pytest.mark.parametrize("num_tokens", [200, 260])
def test_float32_is_close_to_float64_and_the_chunks_are_the_recurrence(num_tokens):
    x, pool = inputs(num_tokens), states()
    exact_pool, chunk_pool, pool32 = pool.double(), pool.double(), pool.clone()
    exact = prefill(double(x), exact_pool, function=gated_delta_prefill_reference)
    assert exact.dtype == torch.float64
    assert distance(prefill(double(x), chunk_pool), exact) < 1e-12
    assert distance(chunk_pool, exact_pool) < 1e-12
    assert distance(prefill(x, pool32), exact) < FLOAT32
    assert distance(pool32, exact_pool) < FLOAT32


def test_steps_are_the_prefill():
    x, pool = inputs(70), states()
    step_pool = pool.clone()
    slot = torch.tensor([2])
    steps = [gated_delta_step(*tokens(x, t, t + 1), step_pool, slot) for t in range(70)]
    assert distance(torch.cat(steps), prefill(x, pool, [2])) < FLOAT32
    assert distance(step_pool, pool) < FLOAT32


@given(lengths=st.lists(st.integers(0, 80), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_every_way_to_cut_a_prompt_gives_the_same_result(lengths, seed):
    x = inputs(sum(lengths) + 1, seed=seed)
    pool, cut_pool, exact_pool = states(), states(), states().double()
    cuts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    parts = [
        prefill(tokens(x, start, end), cut_pool)
        for start, end in zip(cuts, [*cuts[1:], None], strict=True)
    ]
    exact = prefill(double(x), exact_pool, function=gated_delta_prefill_reference)
    for o, state in ((torch.cat(parts), cut_pool), (prefill(x, pool), pool)):
        assert distance(o, exact) < FLOAT32
        assert distance(state, exact_pool) < FLOAT32


def test_a_cut_at_a_whole_chunk_changes_no_bit():
    x, pool, cut_pool = inputs(2 * CHUNK + 30), states(), states()
    whole = prefill(x, pool)
    parts = [prefill(tokens(x, 0, CHUNK), cut_pool), prefill(tokens(x, CHUNK, None), cut_pool)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(cut_pool, pool)


def test_packed_sequences_do_not_see_one_another():
    lengths, slots = [5, 0, 70, 30], [3, 4, -1, 0]
    x, pool = inputs(105), states(6)
    before, alone_pool = pool.clone(), pool.clone()
    got = prefill(x, pool, slots, lengths)
    start = 0
    for length, slot in zip(lengths, slots, strict=True):
        part, own = tokens(x, start, start + length), alone_pool if slot >= 0 else 0 * before
        if length:
            assert (
                distance(got[start : start + length], prefill(part, own, [max(slot, 0)])) < FLOAT32
            )
        start += length
    assert distance(pool, alone_pool) < FLOAT32
    untouched = [1, 2, 4, 5]  # slot 4 belongs to an empty sequence
    assert torch.equal(pool[untouched], before[untouched])


def test_padding_rows_write_nothing_and_give_zeros():
    x, pool = inputs(3), states(4)
    before = pool.clone()
    o = gated_delta_step(*x, pool, torch.tensor([-1, 2, -1]))
    assert not o[[0, 2]].any()
    assert o[1].any()
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])
    assert not torch.equal(pool[2], before[2])


def test_the_strongest_decays_and_equal_keys_stay_finite_and_right():
    """exp(A_log) = 16 and a of 30 forget all; equal keys with beta 1 make I + L worst to invert."""
    x = inputs(100)
    x[3][::7] += 30
    x[5][:] = torch.tensor(16.0).log()
    same = inputs(100)
    same[1][:] = same[1][:1]
    same[3][:], same[4][:] = -30, 30
    for case in (x, same):
        largest = gates(*case[3:])[0][:CHUNK].sum(0).abs().max()
        bound = max(FLOAT32, 2**-23 * largest.item())  # e^(G_i - G_j) inherits the rounding of G
        pool, exact_pool = states(), states().double()
        exact = prefill(double(case), exact_pool, function=gated_delta_prefill_reference)
        assert distance(prefill(case, pool), exact) < bound
        assert distance(pool, exact_pool) < bound


def wrong_order(S, q, k, v, g, beta, *, decay_late=False, read_early=False):
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        decay = g[:, t, None, None].exp()
        old = S
        S = S if decay_late else S * decay
        d = (v[:, t] - (S * k[:, t, :, None]).sum(1)) * beta[:, t, None]
        S = (S * decay if decay_late else S) + k[:, t, :, None] * d[:, None]
        o[:, t] = ((old if read_early else S) * q[:, t, :, None]).sum(1)
    return o, S


def test_a_wrong_order_of_decay_retrieval_and_read_is_seen():
    x, state = heads_first(*inputs(20)), states()[0]
    right = recurrence(state, *x)[0]
    assert distance(wrong_order(state, *x)[0], right) < FLOAT32
    assert distance(chunks(state, *x)[0], right) < FLOAT32
    assert distance(wrong_order(state, *x, decay_late=True)[0], right) > 0.05
    assert distance(wrong_order(state, *x, read_early=True)[0], right) > 0.05


def test_swapped_gates_and_tiled_heads_are_seen():
    x, pool = inputs(20), states()
    right = prefill(x, pool.clone())
    q, k, v, a, b, A_log, dt_bias = x
    assert distance(prefill([q, k, v, b, a, A_log, dt_bias], pool.clone()), right) > 0.05
    repeat = v.shape[1] // k.shape[1]
    tiled = [q.repeat(1, repeat, 1), k.repeat(1, repeat, 1), *x[2:]]
    assert distance(prefill(tiled, pool.clone()), right) > 0.05
    repeated = [q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1), *x[2:]]
    assert torch.equal(prefill(repeated, pool.clone()), right)


def test_a_whole_layer_computes_what_transformers_computes():
    """Projections, convolution, rule and gated norm, in prefill and in two cached steps."""
    config = Qwen3_5TextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
    )
    torch.manual_seed(0)
    layer = qwen.Qwen3_5GatedDeltaNet(config, 0).eval()
    x, cache = torch.randn(1, 72, 32), DynamicCache(config=config)
    with torch.no_grad():
        parts = [layer(part, cache=cache) for part in x.split([70, 1, 1], 1)]
        expected = torch.cat(parts, 1)[0]
        conv_pool, pool = torch.zeros(1, 208, 3), torch.zeros(1, 6, 16, 24)
        ours = [our_layer(layer, part, conv_pool, pool) for part in x[0].split([70, 1, 1])]
    assert distance(torch.cat(ours), expected) < FLOAT32


def our_layer(layer, x, conv_pool, pool):
    slot, bounds = torch.tensor([0]), torch.tensor([0, len(x)])
    u, weight = layer.in_proj_qkv(x), layer.conv1d.weight
    gating = layer.in_proj_a(x), layer.in_proj_b(x), layer.A_log, layer.dt_bias
    if len(x) == 1:
        u = conv1d_step(u, weight, conv_pool, slot)
    else:
        u = conv1d_prefill(u, weight, conv_pool, slot, bounds)
    q, k, v = u.split([32, 32, 144], 1)
    heads = q.unflatten(1, (2, 16)), k.unflatten(1, (2, 16)), v.unflatten(1, (6, 24))
    if len(x) == 1:
        o = gated_delta_step(*heads, *gating, pool, slot)
    else:
        o = gated_delta_prefill(*heads, *gating, pool, slot, bounds)
    z = layer.in_proj_z(x).unflatten(1, (6, 24))
    return layer.out_proj(gated_rmsnorm(o, z, layer.norm.weight, 1e-6).flatten(1))


def test_gates_in_bfloat16_round_beta_and_nothing_else():
    _, _, _, a, b, A_log, dt_bias = inputs(50, dtype=torch.bfloat16)
    g, beta = gates(a, b, A_log, dt_bias)
    assert torch.equal(beta, beta.bfloat16().float())
    assert torch.equal(g, -A_log.exp() * F.softplus(a.float() + dt_bias.float()))


@pytest.mark.parametrize(
    ("lengths", "slots", "heads", "sizes"),
    [
        ([5], [1], (1, 1), (16, 16)),
        ([67, 0, 33], [2, 1, 0], (2, 4), (16, 24)),
        ([64, 1], [-1, 2], (1, 3), (32, 80)),
    ],
)
@pytest.mark.usefixtures("interpreter")
def test_the_prefill_kernels_agree_with_the_reference(lengths, slots, heads, sizes):
    x = inputs(sum(lengths), heads, sizes)
    pool, expected_pool = states(3, heads[1], sizes), states(3, heads[1], sizes)
    got = prefill(x, pool, slots, lengths)
    expected = prefill(x, expected_pool, slots, lengths, gated_delta_prefill_reference)
    assert distance(got, expected) < FLOAT32
    assert distance(pool, expected_pool) < FLOAT32
    untouched = [slot for slot in range(3) if slot not in slots]
    assert torch.equal(pool[untouched], expected_pool[untouched])


@pytest.mark.usefixtures("interpreter")
def test_value_heads_solved_together_are_those_solved_alone(monkeypatch):
    x, pool, together_pool = inputs(70, (2, 6)), states(), states()
    alone = prefill(x, pool)
    monkeypatch.setattr(chunked, "_FULL", 1)
    assert torch.equal(prefill(x, together_pool), alone)
    assert torch.equal(together_pool, pool)


@pytest.mark.parametrize(
    ("num_tokens", "slot", "heads", "size"),
    [(5, 1, (1, 1), 16), (64, 0, (1, 1), 16), (150, 2, (1, 2), 16), (256, -1, (1, 1), 32),
     (193, 1, (2, 2), 128)],
)  # fmt: skip
@pytest.mark.usefixtures("interpreter")
def test_halves_walked_at_once_are_the_whole(num_tokens, slot, heads, size, monkeypatch):
    monkeypatch.setattr(halves, "_LONG", 1)
    launched, launch = [], prefill_kernel.launch_halves
    monkeypatch.setattr(
        prefill_kernel, "launch_halves", lambda *args: launched.append(1) or launch(*args)
    )
    x = inputs(num_tokens, heads, (size, size))
    pool, expected_pool = (states(3, heads[1], (size, size)) for _ in range(2))
    got = prefill(x, pool, [slot])
    expected = prefill(x, expected_pool, [slot], function=gated_delta_prefill_reference)
    assert launched
    assert distance(got, expected) < FLOAT32
    assert distance(pool, expected_pool) < FLOAT32
    untouched = [i for i in range(3) if i != slot]
    assert torch.equal(pool[untouched], expected_pool[untouched])


@pytest.mark.usefixtures("interpreter")
def test_the_prefill_kernels_do_not_see_what_follows_a_sequence():
    """Tiles of 64 tokens reach into the next sequence, whose NaNs must not come through."""
    x, pool = inputs(75, (1, 2)), states(heads=2)
    expected_pool = pool.clone()
    expected = prefill(tokens(x, 0, 70), expected_pool)
    for part in x[:5]:
        part[70:] = torch.nan
    got = prefill(x, pool, [0, 1], [70, 5])
    assert torch.equal(got[:70], expected)
    assert torch.equal(pool[0], expected_pool[0])
    assert got[70:].isnan().all()


@pytest.mark.usefixtures("interpreter")
def test_no_token_at_all_changes_nothing():
    x, pool = inputs(0, (1, 2)), states(heads=2)
    before = pool.clone()
    assert prefill(x, pool, [0, 1], [0, 0]).shape == (0, 2, 24)
    assert torch.equal(pool, before)


@pytest.mark.usefixtures("interpreter")
def test_the_prefill_kernels_invert_equal_keys():
    """Powers of L would reach 10^17 here; doubled blocks stay as small as the inverse."""
    x = inputs(64, (1, 1), (16, 16))
    x[1][:] = x[1][:1]
    x[3][:], x[4][:] = -30, 30
    pool, exact_pool = states(1, 1, (16, 16)), states(1, 1, (16, 16)).double()
    exact = prefill(double(x), exact_pool, function=gated_delta_prefill_reference)
    assert distance(prefill(x, pool), exact) < FLOAT32
    assert distance(pool, exact_pool) < FLOAT32


@pytest.mark.parametrize(("heads", "sizes"), [((1, 1), (16, 16)), ((2, 6), (12, 40))])
@pytest.mark.usefixtures("interpreter")
def test_the_step_kernel_agrees_with_its_reference(heads, sizes):
    x = inputs(3, heads, sizes)
    pool, expected_pool = states(4, heads[1], sizes), states(4, heads[1], sizes)
    slots = torch.tensor([3, -1, 0])
    got = gated_delta_step(*x, pool, slots)
    expected = gated_delta_step_reference(*x, expected_pool, slots)
    assert distance(got, expected) < FLOAT32
    assert not got[1].any()
    assert distance(pool, expected_pool) < FLOAT32
    assert torch.equal(pool[1:3], expected_pool[1:3])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("columns", [32, 16])
def test_the_step_kernel_norms_and_gates_a_whole_head(columns, monkeypatch):
    """24 columns at once, and in two tiles of which the second is not full."""
    monkeypatch.setattr(step_kernel, "_shape", lambda *_, **__: (columns, 1))
    x, z = inputs(3), torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(4))[:, 1:]
    gate, slots = Gate(z, torch.linspace(0.5, 2, 24), 1e-6), torch.tensor([2, -1, 0])
    pool, expected_pool = states(), states()
    got = gated_delta_step(*x, pool, slots, gate)
    expected = gated_delta_step_reference(*x, expected_pool, slots, gate)
    assert distance(got, expected) < 4 * FLOAT32  # the norm of a small output magnifies its error
    assert not got[1].any()
    assert distance(pool, expected_pool) < FLOAT32


@pytest.mark.usefixtures("interpreter")
def test_kernels_keep_a_bfloat16_state():
    """The interpreter truncates to bfloat16, which is within one step, 2^-7, of rounding."""
    x = inputs(3, (1, 2), (16, 16))
    for function, reference in (
        (gated_delta_step, gated_delta_step_reference),
        (gated_delta_prefill, gated_delta_prefill_reference),
    ):
        pool = states(3, 2, (16, 16)).bfloat16()
        expected_pool = pool.clone()
        rest = [torch.tensor([0, 1, 2])]
        rest += [torch.tensor([0, 1, 2, 3])] if function is gated_delta_prefill else []
        o = function(*x, pool, *rest)
        assert distance(o, reference(*x, expected_pool, *rest)) < FLOAT32
        apart = (pool.float() - expected_pool.float()).abs()
        assert (apart <= expected_pool.float().abs() * 2**-7 + FLOAT32).all()


@pytest.mark.usefixtures("interpreter")
def test_kernels_take_views_on_the_output_of_the_convolution():
    x = inputs(9, (2, 4), (16, 16))
    packed = torch.cat([part.flatten(1) for part in x[:3]], 1)
    views = [
        part.unflatten(1, shape)
        for part, shape in zip(
            packed.split([32, 32, 64], 1), [(2, 16), (2, 16), (4, 16)], strict=True
        )
    ]
    pool, expected_pool = states(9, 4, (16, 16)), states(9, 4, (16, 16))
    slots = torch.arange(9)
    got = gated_delta_step(*views, *x[3:], pool, slots)
    assert torch.equal(got, gated_delta_step(*x, expected_pool, slots))
    assert torch.equal(pool, expected_pool)
    assert distance(prefill(views + x[3:], pool), prefill(x, expected_pool)) < FLOAT32
