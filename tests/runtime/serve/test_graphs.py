from __future__ import annotations

import warnings

import pytest
import torch

from runtime.serve.engine import Engine, generate
from runtime.serve.graphs import Arriving, DecodeRows, Recorded, another_stream
from runtime.serve.request import Request
from runtime.serve.sample import GREEDY, Sampling
from runtime.serve.speculation import Speculation
from tests.runtime.models import NANO, load, needs_cuda, served, some_ids, text_ids, write

SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def trained():
    return load(NANO, device="cuda"), text_ids(NANO, 300)


@pytest.fixture
def _as_in_use():
    """Let CUDA choose its kernels as outside of tests."""
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def unsynchronised():
    """Return a function that lets any call fail that makes the host wait for the device."""

    def begin():
        torch.cuda.synchronize()
        with warnings.catch_warnings():  # that this is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


def some_requests(ids, *, sampled):
    """Return four requests of different lengths; two are sampled, if that is wanted."""
    ways = [SAMPLED, GREEDY] if sampled else [GREEDY, GREEDY]
    return [Request(ids[20 * i : 90 + 30 * i], 5 + 9 * i, ways[i % 2]) for i in range(4)]


def test_what_arrives_is_what_was_there_when_it_was_sent():
    numbers = torch.tensor([1, 2, 3])
    arriving = Arriving(numbers)
    numbers.zero_()
    assert arriving.values() == [1, 2, 3]


def test_a_step_that_is_not_recorded_is_called_each_time():
    count = torch.zeros(1)
    step = Recorded(lambda: count.add_(1).clone(), record=False)
    assert [step().item(), step().item()] == [1, 2]


@pytest.mark.gpu
@needs_cuda
def test_recordings_that_take_turns_leave_their_results():
    count, aside = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        another_stream(torch.device("cuda")),
    )
    step = Recorded(lambda: count.add_(1) * 10, record=True, turns=2)
    first, second = step(), step()
    assert [Arriving(x, aside).values() for x in (first, second)] == [[20], [30]]
    assert step() is first
    assert Arriving(first, aside).values() == [40]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_run_before_a_recording_changes_nothing(sampling):
    model, ids = load(NANO), text_ids(NANO, 80)
    expected = list(generate(model, ids, 12, sampling=sampling))
    request = Request(ids, 12, sampling)
    speculation, engine = Speculation(model, Request(ids, 12, sampling), 2), Engine(model, slots=2)
    with torch.inference_mode():
        Recorded(speculation._step, record=False)()
        DecodeRows(
            model, engine.pools, engine.sampler, 4, sampled=not sampling.greedy, record=False
        ).step()
    assert not any(pool.any() for pool in (engine.state.recurrent, engine.state.keys))
    assert list(speculation.run()) == served(engine, [request], [0])[0] == expected


@pytest.mark.gpu
@needs_cuda
def test_a_recorded_step_reads_and_writes_its_tensors_in_place():
    count = torch.zeros(1, device="cuda")
    step = Recorded(lambda: count.add_(1) * 10, record=True)
    assert count.item() == 1
    assert [step().item(), step().item()] == [20, 30]
    count.fill_(6)
    assert step().item() == 70


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("_as_in_use")
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_graphs_decode_what_single_launches_decode(tmp_path, is_moe, sampled):
    """Requests join and leave graphs of one, two and four rows; untouched slots stay."""
    on_gpu = load(write(tmp_path, moe=is_moe), device="cuda")
    ids, answers = some_ids(200, on_gpu), []
    for graphs in (False, True):
        engine = Engine(on_gpu, slots=5, max_len=260, chunk=128, graphs=graphs)
        engine.state.recurrent[4:] = 3
        engine.state.keys[:, 4:] = 3
        answers.append(served(engine, some_requests(ids, sampled=sampled), [0, 3, 1, 4]))
        steps = [bool(rows.step.graphs) for rows in engine.decoding.values()]
        assert steps == [graphs] * len(steps) != []
        assert (engine.state.recurrent[4:] == 3).all()
        assert (engine.state.keys[:, 4:] == 3).all()
    assert [len(tokens) for tokens in answers[0]] == [5, 14, 23, 32]
    assert answers[0] == answers[1]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("_as_in_use")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_graphs_speculate_what_is_decoded(trained, sampling, drafts):
    """The trained head is right often; a prompt of two chunks, and one of a single token."""
    model, ids = trained
    for length in (1, 150):
        plain = list(generate(model, ids[:length], 40, sampling=sampling))
        for graphs in (False, True):
            request = Request(ids[:length], 40, sampling)
            speculation = Speculation(model, request, drafts, chunk=64, graphs=graphs)
            assert list(speculation.run()) == plain
            assert 0 < speculation.accepted < speculation.drafted


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("_as_in_use")
def test_a_stop_token_ends_an_answer_of_graphs(trained):
    model, ids = trained
    tokens = list(generate(model, ids[:100], 20))
    for stop in set(tokens[::4]):
        for speculate in (0, 1, 3):
            got = generate(model, ids[:100], 20, stop=frozenset([stop]), speculate=speculate)
            assert list(got) == tokens[: tokens.index(stop) + 1]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_kernels_that_are_compiled_together_give_the_same_tokens(trained, sampling, monkeypatch):
    model, ids = trained
    together = list(generate(model, ids[:100], 20, sampling=sampling))
    monkeypatch.setattr(Engine, "compile", lambda _: None)
    assert list(generate(model, ids[:100], 20, sampling=sampling)) == together


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("_as_in_use")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_decoding_never_makes_the_host_wait(trained, unsynchronised, sampled):
    """Nor does a change of rows: the first of four requests ends meanwhile."""
    model, ids = trained
    requests = some_requests(ids, sampled=sampled)
    engine = Engine(model, slots=4, max_len=260)
    served(engine, some_requests(ids, sampled=sampled), [0] * 4)
    for request in requests:
        engine.add(request)
    while any(not request.tokens for request in requests):
        engine.step()
    before = [len(request.tokens) for request in requests]
    unsynchronised()
    for _ in range(8):
        engine.step()
    after = [len(request.tokens) for request in requests]
    assert requests[0].finished
    assert [b - a for a, b in zip(before, after, strict=True)][1:] == [8, 8, 8]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("_as_in_use")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_never_makes_the_host_wait(trained, unsynchronised, sampling):
    model, ids = trained
    tokens = Speculation(model, Request(ids[:100], 90, sampling), 3).run()
    begun = [next(tokens) for _ in range(5)]
    unsynchronised()
    got = [next(tokens) for _ in range(30)]
    torch.cuda.set_sync_debug_mode("default")
    assert begun + got == list(generate(model, ids[:100], 35, sampling=sampling))
