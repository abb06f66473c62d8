from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_convert.containers.registry import open_checkpoint
from runtime import mixers
from runtime import model as model_module
from runtime.kernels.attention import parts as attention_parts
from runtime.kernels.delta_rule.states import gated_delta_prefill
from runtime.kernels.encode.rows import quantize_rows
from runtime.kernels.launch import interpreting
from runtime.kernels.linear import product, row
from runtime.kernels.moe import w8a8
from runtime.kernels.moe.sum import add_pairs_rmsnorm
from runtime.kernels.norm.gated import gated_rmsnorm
from runtime.kernels.norm.rms import add_rmsnorm, rmsnorm
from runtime.model import draft, draft_stream, hidden_states, logits
from runtime.state import Batch, Span
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.formats.layouts import to_fp8
from tests.runtime.models import (
    SHORT,
    distance,
    draft_logits,
    full,
    load,
    mean_kl,
    needs_cuda,
    pools_for,
    run,
    some_ids,
    state_of,
    text_ids,
    transformers_logits,
    write,
)

pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT32 = 1e-5
# a planted fault has to stand out from rounding by this factor, else the comparison proves little
FAULT = 100 * FLOAT32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A dense model, three value heads per key head; ids; what transformers makes of them."""
    folder = write(tmp_path_factory.mktemp("tiny") / "dense")
    model = load(folder)
    ids = some_ids(75, model)
    return folder, model, ids, transformers_logits(folder, ids)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("tiny") / "moe", moe=True, ratio=2)
    model = load(folder)
    ids = some_ids(75, model)
    return folder, model, ids, transformers_logits(folder, ids)


def test_the_trained_model_has_the_logits_of_transformers(nano):
    model = load(nano)
    ids = some_ids(150, model)
    assert distance(full(model, ids), transformers_logits(nano, ids)) < FLOAT32


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_logits_are_those_of_transformers(tmp_path, is_moe, ratio):
    folder = write(tmp_path, moe=is_moe, ratio=ratio, seed=ratio)
    model = load(folder)
    ids = some_ids(75, model)
    assert distance(full(model, ids), transformers_logits(folder, ids)) < FLOAT32


def test_a_tied_head_is_the_embedding(tmp_path):
    config = hub_config(sizes="ragged", tie_word_embeddings=True, **SHORT)
    weights = make_weights(config)
    del weights["lm_head.weight"]
    folder = write_checkpoint(tmp_path, config, weights)
    model = load(folder)
    assert model.head is model.embed
    ids = some_ids(20, model)
    assert distance(full(model, ids), transformers_logits(folder, ids)) < FLOAT32


def test_bfloat16_is_as_close_to_transformers_as_two_of_its_attentions_are(nano, tmp_path):
    """Rounding logits of 20 alone makes 1e-4. A_log is bfloat16, as transformers loads it."""
    checkpoint = open_checkpoint(nano)
    weights = {n: checkpoint.read(n).to(torch.bfloat16) for n in checkpoint.infos()}
    config = json.loads((nano / "config.json").read_text())
    folder = write_checkpoint(tmp_path, config, weights)
    ids = text_ids(nano, 400)
    got = full(load(folder, torch.bfloat16), ids)
    sdpa, eager = (
        transformers_logits(folder, ids, torch.bfloat16, name) for name in ("sdpa", "eager")
    )
    assert mean_kl(sdpa, got) <= mean_kl(sdpa, eager)
    exact = transformers_logits(folder, ids)
    assert mean_kl(exact, got) <= 1.2 * mean_kl(exact, sdpa)


@pytest.mark.parametrize("which", ["tiny", "sparse"])
def test_steps_give_what_prefill_gives(which, request):
    _, model, ids, expected = request.getfixturevalue(which)
    state, whole = pools_for(model), pools_for(model)
    assert distance(run(model, ids, state, decode=30), expected) < FLOAT32
    run(model, ids, whole)
    for got, want in zip(state_of(state, 0, 75), state_of(whole, 0, 75), strict=True):
        assert distance(got, want) < FLOAT32


@settings(max_examples=10)
@given(cuts=st.sets(st.integers(1, 74), max_size=5), decode=st.integers(0, 3))
def test_a_prompt_may_come_in_any_parts(tiny, cuts, decode):
    _, model, ids, expected = tiny
    kept = sorted(cut for cut in cuts if cut < 75 - decode)
    assert distance(run(model, ids, pools_for(model), cuts=kept, decode=decode), expected) < FLOAT32


@torch.no_grad()
def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone(tiny):
    """Two decode rows, a prefill that goes on, a fresh one, and a padding row between them."""
    _, model, ids, _ = tiny
    state = pools_for(model, slots=4)
    for slot, length in ((0, 30), (1, 9), (2, 64)):
        run(model, ids[:length], state, slot=slot)
    one = [Span(ids[30:31], 30, 0, 0), Span([5], 0, -1, -1), Span(ids[9:10], 9, 1, 1)]
    more = [Span(ids[64:75], 64, 2, 2), Span(ids[:17], 0, 3, 3)]
    got = hidden_states(model, state.pools(), Batch.pack(one, more, model.device))
    alone = full(model, ids)
    rows = logits(model, got)
    expected = torch.cat([alone[[30, 30, 9]], alone[64:75], alone[:17]])
    rows[1] = expected[1]
    assert distance(rows, expected) < FLOAT32


@torch.no_grad()
def test_rows_of_a_sequence_leave_a_state_each(tiny):
    """Two sequences of three rows; then each goes on from another one of its states."""
    _, model, ids, expected = tiny
    state, other = pools_for(model, spares=4), pools_for(model)
    for slot, length in ((0, 40), (1, 9)):
        run(model, ids[:length], state, slot=slot)
    first = [Span(ids[n : n + 1], n, 0, s) for n, s in ((40, 0), (41, 2), (42, 3))]
    first += [Span(ids[n : n + 1], n, 1, s) for n, s in ((9, 1), (10, 4), (11, 5))]
    batch = Batch.pack(first, [], model.device, each=3)
    got = hidden_states(model, state.pools(), batch)
    assert distance(logits(model, got), expected[[40, 41, 42, 9, 10, 11]]) < FLOAT32
    for at, length in ((0, 41), (2, 42), (3, 43), (1, 10), (4, 11), (5, 12)):
        run(model, ids[:length], other, slot=1)
        assert distance(state.recurrent[at], other.recurrent[1]) < FLOAT32
        assert distance(state.conv[at], other.conv[1]) < FLOAT32
        other.recurrent[1] = other.conv[1] = 0
    batch.fill(
        [Span([ids[n]], n, s, a) for n, s, a in ((42, 0, 0), (43, 0, 2), (44, 0, 3))] + first[3:]
    )
    batch.sources.copy_(torch.tensor([2, 1]))
    got = hidden_states(model, state.pools(), batch)
    assert distance(logits(model, got)[:3], expected[42:45]) < FLOAT32


def test_280_tokens_pass_through_experts_smaller_than_the_convolution(tmp_path):
    """Anything sized by the feed-forward would be too small here."""
    folder = write(tmp_path, moe=True, moe_intermediate_size=4, shared_expert_intermediate_size=4)
    model = load(folder)
    ids = some_ids(280, model)
    state = pools_for(model)
    assert model.config.sizes["F"] < state.conv.shape[2]
    assert distance(run(model, ids, state), transformers_logits(folder, ids)) < FLOAT32


def test_a_misleading_intermediate_size_changes_nothing(sparse, tmp_path):
    folder, _, ids, expected = sparse
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["intermediate_size"] = 8 * raw["text_config"]["moe_intermediate_size"]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert distance(full(load(tmp_path), ids), expected) < FLOAT32


def with_swapped(folder, tmp_path, one, other):
    """Load the model with two kinds of tensors in each other's place."""
    config = json.loads((folder / "config.json").read_text())
    weights = make_weights(config)
    swapped = {
        name.replace(one, "?").replace(other, one).replace("?", other): value
        for name, value in weights.items()
    }
    return load(write_checkpoint(tmp_path / "swapped", config, swapped))


@pytest.mark.parametrize("pair", [("in_proj_a", "in_proj_b"), ("gate_proj", "up_proj")], ids=str)
def test_swapped_projections_are_seen(tiny, tmp_path, pair):
    folder, _, ids, expected = tiny
    assert distance(full(with_swapped(folder, tmp_path, *pair), ids), expected) > FAULT


def tiled(q, k, *rest):
    repeat = rest[0].shape[1] // k.shape[1]
    return gated_delta_prefill(q.repeat(1, repeat, 1), k.repeat(1, repeat, 1), *rest)


def whole_halves(qg, num_heads, head_dim):
    return qg.reshape(-1, 2, num_heads, head_dim).unbind(1)


PATCHES = {
    "heads tiled": {(mixers, "gated_delta_prefill"): tiled},
    "query and gate as whole halves": {(mixers, "split_query_gate"): whole_halves},
    "norms without + 1": {
        (model_module, "rmsnorm"): lambda x, w, eps, *codes: rmsnorm(x, w - 1, eps, *codes),
        (model_module, "add_rmsnorm"): lambda x, r, w, eps, *codes: add_rmsnorm(
            x, r, w - 1, eps, *codes
        ),
    },
    "delta rule's norm with + 1": {
        (mixers, "gated_rmsnorm"): lambda o, z, w, eps: gated_rmsnorm(o, z, w + 1, eps)
    },
}


@pytest.mark.parametrize("fault", PATCHES)
def test_a_fault_in_the_code_is_seen(tiny, monkeypatch, fault):
    _, model, ids, expected = tiny
    for (module, name), replacement in PATCHES[fault].items():
        monkeypatch.setattr(module, name, replacement)
    assert distance(full(model, ids), expected) > FAULT


def test_rope_over_the_whole_head_is_seen(tiny):
    _, model, ids, expected = tiny
    rope = dataclasses.replace(model.config.rope, partial=1.0)
    wrong = dataclasses.replace(model, config=dataclasses.replace(model.config, rope=rope))
    assert distance(full(wrong, ids), expected) > FAULT


def test_a_history_off_by_one_token_is_seen(tiny):
    _, model, ids, expected = tiny
    state = pools_for(model)
    run(model, ids[:74], state)
    state.conv[0] = state.conv[0].roll(1, -1)
    with torch.no_grad():
        batch = Batch.pack([Span(ids[74:], 74, 0, 0)], [], model.device)
        got = logits(model, hidden_states(model, state.pools(), batch))
    assert distance(got, expected[74:]) > FAULT


def by_hand(folder, hidden, following, *, embedding_first=True):
    """Return the MTP head's logits [T, V] from its formula, for a dense model in float64."""
    checkpoint = open_checkpoint(folder)
    size, eps = checkpoint.config.sizes, checkpoint.config.eps
    dim, heads, kv_heads = size["HD"], size["NH"], size["NKV"]
    mtp = "mtp.layers.0."

    def w(name):
        atom = checkpoint.layout.atoms[name]
        return checkpoint.read(atom.stored).double()

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + w(name))

    def rotated(x):
        pairs = int(dim * checkpoint.config.rope.partial) // 2
        angle = torch.arange(len(x))[:, None] * checkpoint.config.rope.theta ** -(
            torch.arange(pairs) / pairs
        )
        turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)[:, None]
        turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * turn
        return torch.cat([turned.real, turned.imag, x[..., 2 * pairs :]], -1)

    both = [norm(w("embed_tokens")[following], "mtp.pre_fc_norm_embedding")]
    both.append(norm(hidden.double(), "mtp.pre_fc_norm_hidden"))
    x = torch.cat(both if embedding_first else both[::-1], -1) @ w("mtp.fc").T
    y = norm(x, mtp + "input_layernorm")
    query_gate = (y @ w(mtp + "self_attn.q_proj").T).view(-1, heads, 2, dim)
    q = rotated(norm(query_gate[:, :, 0], mtp + "self_attn.q_norm"))
    k = (y @ w(mtp + "self_attn.k_proj").T).view(-1, kv_heads, dim)
    k = rotated(norm(k, mtp + "self_attn.k_norm"))
    v = (y @ w(mtp + "self_attn.v_proj").T).view(-1, kv_heads, dim)
    out = torch.zeros_like(q)
    for t in range(len(x)):
        for h in range(heads):
            m = h // (heads // kv_heads)
            out[t, h] = (k[: t + 1, m] @ q[t, h] / dim**0.5).softmax(0) @ v[: t + 1, m]
    out = out * query_gate[:, :, 1].sigmoid()
    x = x + out.flatten(1) @ w(mtp + "self_attn.o_proj").T
    y = norm(x, mtp + "post_attention_layernorm")
    gate = y @ w(mtp + "mlp.gate_proj").T
    inner = gate * gate.sigmoid() * (y @ w(mtp + "mlp.up_proj").T)
    x = norm(x + inner @ w(mtp + "mlp.down_proj").T, "mtp.norm")
    return x @ w("embed_tokens" if checkpoint.layout.tied else "lm_head").T


@torch.no_grad()
def drafted(model, ids):
    """Return (hidden states, the MTP head's logits) of all tokens but the last."""
    state = pools_for(model, mtp_layers=1)
    batch = Batch.pack([], [Span(ids[:-1], 0, 0, 0)], model.device)
    hidden = hidden_states(model, state.pools(), batch)
    after = Batch.pack([], [Span(ids[1:], 0, 0, 0)], model.device)
    return hidden, draft_logits(model, state.mtp_pools(), after, hidden)


def test_the_mtp_head_follows_its_formula(tiny):
    folder, model, ids, _ = tiny
    hidden, got = drafted(model, ids)
    assert distance(got, by_hand(folder, hidden, ids[1:])) < FLOAT32
    wrong = by_hand(folder, hidden, ids[1:], embedding_first=False)
    assert distance(got, wrong) > FAULT


def test_the_trained_mtp_head_takes_the_embedding_first(nano):
    """What it was trained for, it does better: to predict the token after the next one."""
    model, ids = load(nano), text_ids(nano, 200)
    hidden, got = drafted(model, ids)
    wrong = by_hand(nano, hidden, ids[1:], embedding_first=False)
    loss, wrong_loss = (
        torch.nn.functional.cross_entropy(x[:-1].double(), torch.tensor(ids[2:]))
        for x in (got, wrong)
    )
    assert loss + 1 < wrong_loss


def few_programs(monkeypatch):
    """Leave together what a GPU's multiprocessors would share."""
    monkeypatch.setattr(row, "_FEWEST_PROGRAMS", 4)
    monkeypatch.setattr(attention_parts, "_PROGRAMS", 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
def test_the_kernels_together_compute_the_model(tmp_path, monkeypatch):
    """In the interpreter: strides of views on fused projections, slots, chunks and steps."""
    few_programs(monkeypatch)
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = load(write(tmp_path, moe=True, num_experts=3, **kinds))
    ids = some_ids(5, model)
    expected = full(model, ids)
    with interpreting():
        got = run(model, ids, pools_for(model), cuts=(1,), decode=1)
    assert distance(got, expected) < FLOAT32


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
@pytest.mark.parametrize(
    "short_row", [pytest.param(0, marks=pytest.mark.all), 1024], ids=["parts", "registers"]
)
def test_a_few_rows_pass_through_dense_layers(tmp_path, monkeypatch, thresholds, short_row):
    """Two rows of a prompt, then three tokens of its sequence at once: norms in both ways."""
    few_programs(monkeypatch)
    thresholds(SHORT_ROW=short_row)
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = load(write(tmp_path, moe=False, **kinds))
    ids, state = some_ids(5, model), pools_for(model, spares=2)
    expected = full(model, ids)
    rows = [Span(ids[n : n + 1], n, 0, at) for n, at in ((2, 0), (3, 2), (4, 3))]
    with interpreting(), torch.no_grad():
        first = run(model, ids[:2], state)
        batch = Batch.pack(rows, [], model.device, each=3)
        got = logits(model, hidden_states(model, state.pools(), batch))
    assert distance(torch.cat([first, got]), expected) < FLOAT32


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
def test_two_rows_pass_from_a_layer_of_codes_to_one_of_floats(tmp_path, monkeypatch):
    """The first leaves its last addition to the next norm, which the second has in a product."""
    few_programs(monkeypatch)
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = hub_config(moe=False, hidden_size=256, **kinds)
    weights = make_weights(config)
    first = {name: w for name, w in weights.items() if ".layers.0." in name}
    folder = write_checkpoint(tmp_path, config, weights | to_fp8(first))
    model = load(folder, keep_fp8=True)
    assert [layer.form for layer in model.layers] == ["FP8, block", "float"]
    ids = some_ids(2, model)
    with interpreting():
        got = run(model, ids, pools_for(model))
    assert distance(got, full(load(folder), ids)) < FLOAT32


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
@pytest.mark.parametrize(("moe", "rows"), [(False, 1), (False, 3), (True, 2), (True, 5)])
def test_the_kernels_draft_what_the_references_do(tmp_path, monkeypatch, moe, rows):
    """After a prompt: of the rows of a step the last but one; five are too many for one kernel."""
    few_programs(monkeypatch)
    kinds = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = load(write(tmp_path, moe=moe, **(kinds | ({"num_experts": 3} if moe else {}))))
    ids, last = some_ids(2 + rows, model), None if rows == 1 else torch.tensor([rows - 2])
    prompt = Batch.pack([], [Span(ids[:2], 0, 0, 0)], model.device)
    batch = Batch.pack(
        [Span([id_], 2 + n, 0, n) for n, id_ in enumerate(ids[2:])], [], model.device, each=rows
    )
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(2 + rows, model.config.sizes["H"], generator=generator)
    drafted, tokens = [], torch.zeros(2, 1, dtype=torch.int64)
    for context, token in zip((nullcontext, interpreting), tokens, strict=True):
        pools = pools_for(model, mtp_layers=1).mtp_pools()
        with context(), torch.no_grad():
            draft_stream(model, pools, prompt, hidden[:2], row_1=torch.tensor([1]))
            stream = draft_stream(model, pools, batch, hidden[2:], row_1=last)
            drafted.append([draft(model, model.head, stream, token), *pools])
    assert torch.equal(*tokens)
    for ours, theirs in zip(*drafted, strict=True):
        assert distance(theirs, ours) < FLOAT32


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
def test_the_next_norm_sums_each_tokens_experts(tmp_path, monkeypatch, thresholds):
    """Of the one layer in the final norm, where a chunk has more than a few tokens."""
    seen = []

    def counted(pairs, *rest):
        seen.append(pairs.k)
        return add_pairs_rmsnorm(pairs, *rest)

    few_programs(monkeypatch)
    thresholds(FEW_TOKENS=2)
    monkeypatch.setattr(model_module, "add_pairs_rmsnorm", counted)
    kinds = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    sizes = {"num_experts": 3, "shared_expert_intermediate_size": 40}
    model = load(write(tmp_path, moe=True, **sizes, **kinds))
    ids = some_ids(4, model)
    expected = full(model, ids)
    with interpreting():
        got = run(model, ids, pools_for(model), cuts=(), decode=1)
    assert distance(got, expected) < FLOAT32
    assert seen == [model.config.sizes["TOPK"] + 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
@pytest.mark.parametrize(
    ("kind", "is_moe", "left"),
    [("full_attention", False, [(17, 256)]), ("linear_attention", True, [])],
    ids=["dense attention", "sparse delta rule"],
)
def test_norms_that_quantise_change_no_bit(tmp_path, monkeypatch, kind, is_moe, left):
    """Of a layer only what attention returns is left to be quantised on its own."""
    sizes = {"num_experts": 2} if is_moe else {}
    one = {"num_hidden_layers": 1, "layer_types": [kind]}
    config = hub_config(moe=is_moe, hidden_size=256, **one, **sizes)
    folder = write_checkpoint(tmp_path, config, to_fp8(make_weights(config)))
    model = load(folder, keep_fp8=True, dynamic_fp8=True)
    ids, quantised = some_ids(17, model), []

    def counted(x, *rest):
        quantised.append(x.shape)
        return quantize_rows(x, *rest)

    for module in (product, w8a8):
        monkeypatch.setattr(module, "quantize_rows", counted)
    with interpreting():
        got = full(model, ids)
        assert quantised == left
        monkeypatch.setattr(model_module, "codes_for", lambda weight, x: None)
        monkeypatch.setattr(mixers, "takes_codes", lambda weight, x: False)
        assert torch.equal(full(model, ids), got)
    assert len(quantised) > 2


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("which", ["tiny", "sparse"])
def test_a_gpu_computes_what_the_references_compute(which, request):
    folder, _, ids, expected = request.getfixturevalue(which)
    model = load(folder, device="cuda")
    got = run(model, ids, pools_for(model), cuts=(64,), decode=5)
    assert distance(got.cpu(), expected) < FLOAT32


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_in_bfloat16_is_as_close_to_float32_as_transformers_is(nano):
    ids = text_ids(nano, 400)
    model = load(nano, torch.bfloat16, "cuda")
    exact = transformers_logits(nano, ids)
    theirs = transformers_logits(nano, ids, torch.bfloat16)
    for decode in (0, 20):
        got = run(model, ids, pools_for(model), decode=decode).cpu()
        assert mean_kl(exact, got) <= 1.2 * mean_kl(exact, theirs)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_a_gpu_multiplies_with_fp8_weights(tmp_path, is_moe):
    config = hub_config(moe=is_moe, hidden_size=256, **SHORT)
    folder = write_checkpoint(tmp_path, config, to_fp8(make_weights(config)))
    ids = some_ids(75, load(folder))
    model = load(folder, device="cuda", keep_fp8=True)
    got = run(model, ids, pools_for(model), decode=5)
    assert distance(got.cpu(), full(load(folder), ids)) < FLOAT32
