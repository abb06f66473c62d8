from __future__ import annotations

import dataclasses
import gc
import json
import math
import weakref

import pytest
import torch
import torch.nn.functional as F

import runtime.compare as compare_module
import runtime.layer_pass as layer_module
from formats.errors import FormatError
from qwen35_convert.containers.registry import open_checkpoint
from runtime.compare import _relative_error, compare_logits, streamed_logits
from runtime.errors import RequestError
from runtime.load import Loader
from runtime.logits_report import _mean_error
from runtime.softmax import Divergence
from tests.checkpoints import hub_config, make_weights, split_experts, write_checkpoint
from tests.formats.layouts import to_fp8
from tests.runtime.models import (
    SHORT,
    distance,
    full,
    load,
    mean_kl,
    needs_cuda,
    some_ids,
    text_ids,
    write,
)

ON_CPU = {"device": "cpu"}
P = "model.language_model."


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def pair(request, tmp_path_factory):
    """A source, the same in FP8, and three sequences of 30 tokens."""
    config = hub_config(moe=request.param, hidden_size=256, **SHORT)
    weights = make_weights(config)
    folder = tmp_path_factory.mktemp("stream")
    source = write_checkpoint(folder / "source", config, weights)
    artifact = write_checkpoint(folder / "fp8", config, to_fp8(weights))
    ids = torch.tensor(some_ids(90, load(source))).view(3, 30)
    return source, artifact, ids


def opened(*folders):
    return [open_checkpoint(folder) for folder in folders]


def compared(source, artifact, ids):
    return compare_logits(*opened(source, artifact), ids, **ON_CPU)


def logits_of(folder, ids):
    model = load(folder)
    return torch.cat([full(model, row.tolist()) for row in ids])


def test_streamed_logits_are_those_of_the_whole_model(pair):
    source, _, ids = pair
    got = torch.cat(list(streamed_logits(*opened(source), ids, **ON_CPU)), -1)
    assert distance(got, logits_of(source, ids)) < 1e-5


def test_a_checkpoint_compared_with_itself_shows_nothing(pair):
    source, _, ids = pair
    report = compared(source, source, ids)
    assert report.kl_mean <= 1e-9
    assert report.kl_p999 <= 1e-9
    assert report.top1 == 1
    assert report.ppl_source == report.ppl_artifact
    assert report.tokens == 90
    assert [(layer.layer, layer.kind, layer.relative_error) for layer in report.layers] == [
        (0, "linear_attention", 0),
        (1, "full_attention", 0),
        (2, "linear_attention", 0),
    ]


def test_another_layout_of_the_same_weights_shows_nothing(tmp_path):
    config = hub_config(moe=True, sizes="ragged", **SHORT)
    weights = make_weights(config)
    fused = write_checkpoint(tmp_path / "fused", config, weights)
    split = write_checkpoint(tmp_path / "split", config, split_experts(weights))
    report = compared(fused, split, torch.tensor([some_ids(40, load(fused))]))
    assert report.kl_mean <= 1e-9
    assert all(layer.relative_error == 0 for layer in report.layers)


def test_the_report_is_what_whole_logits_give(pair):
    source, artifact, ids = pair
    report = compared(source, artifact, ids)
    p, q = logits_of(source, ids), logits_of(artifact, ids)
    assert report.kl_mean == pytest.approx(mean_kl(p, q), rel=1e-3)
    assert report.kl_mean > 0
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert report.kl_p999 == pytest.approx(kl.quantile(0.999).item(), rel=1e-2)
    assert report.kl_median == pytest.approx(kl.quantile(0.5).item(), rel=1e-2)
    error = kl.view(3, 30).mean(1).std() / 3**0.5  # each sequence is a block
    assert report.kl_stderr == pytest.approx(error.item(), rel=1e-2)
    assert report.top1 == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    for logits, ppl in ((p, report.ppl_source), (q, report.ppl_artifact)):
        steps = logits.view(3, 30, -1)[:, :-1].flatten(0, 1).double()
        loss = F.cross_entropy(steps, ids[:, 1:].flatten())
        assert ppl == pytest.approx(loss.exp().item(), rel=1e-6)


def test_errors_grow_from_the_layer_that_has_them(tmp_path):
    """gate and up of layer 1 in each other's place: right shapes, wrong from there on."""
    config = hub_config(sizes="ragged", **SHORT)
    weights = make_weights(config)
    source = write_checkpoint(tmp_path / "source", config, weights)
    gate, up = (f"{P}layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    swapped = weights | {gate: weights[up], up: weights[gate]}
    wrong = write_checkpoint(tmp_path / "wrong", config, swapped)
    report = compared(source, wrong, torch.tensor([some_ids(40, load(source))]))
    errors = [layer.relative_error for layer in report.layers]
    assert errors[0] == 0
    assert min(errors[1:]) > 1e-3


@pytest.mark.parametrize(
    ("module", "limit", "small"),
    [
        (compare_module, "STRIP_CELLS", 40 * 512),
        (layer_module, "GROUP_TOKENS", 40),
        (layer_module, "MLP_CELLS", 40 * 2 * 256),
    ],
)
def test_the_size_of_the_pieces_does_not_matter(pair, monkeypatch, module, limit, small):
    source, artifact, ids = pair
    expected = compared(source, artifact, ids)
    monkeypatch.setattr(module, limit, small)
    report = compared(source, artifact, ids)
    assert report.kl_mean == pytest.approx(expected.kl_mean, rel=1e-3)
    assert report.ppl_artifact == pytest.approx(expected.ppl_artifact, rel=1e-6)
    for ours, theirs in zip(report.layers, expected.layers, strict=True):
        assert ours.relative_error == pytest.approx(theirs.relative_error, rel=1e-3)


def test_the_number_of_cores_does_not_matter(pair):
    """The digits are the same, and torch has its threads back."""
    source, artifact, ids = pair
    expected = compared(source, artifact, ids)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert compared(source, artifact, ids) == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_one_layer_of_each_is_in_memory_at_a_time(pair, monkeypatch):
    source, artifact, ids = pair
    loaded, most = [], 0
    original = Loader.layer

    def spy(self, i):
        nonlocal most
        layer = original(self, i)
        loaded.append(weakref.ref(layer))
        gc.collect()
        most = max(most, sum(ref() is not None for ref in loaded))
        return layer

    monkeypatch.setattr(Loader, "layer", spy)
    compared(source, artifact, ids)
    assert len(loaded) == 6
    assert most <= 2


def test_embedding_and_head_are_never_whole(pair, monkeypatch):
    source, artifact, ids = pair
    monkeypatch.setattr(compare_module, "STRIP_CELLS", 512 * 10)
    whole, widest = [], 0
    tensor, strip = Loader.tensor, Loader.strip

    def count_rows(self, value, start, stop):
        nonlocal widest
        part = strip(self, value, start, stop)
        widest = max(widest, len(part))
        return part

    monkeypatch.setattr(Loader, "strip", count_rows)
    monkeypatch.setattr(Loader, "tensor", lambda self, *n: whole.extend(n) or tensor(self, *n))
    compared(source, artifact, ids)
    assert widest == 10
    assert not {"embed_tokens", "lm_head"} & set(whole)


def test_the_trained_model_predicts_its_text(nano):
    ids = torch.tensor(text_ids(nano, 256)).view(2, 128)
    report = compared(nano, nano, ids)
    assert report.kl_mean <= 1e-9
    assert report.ppl_source < 100
    logits = logits_of(nano, ids).view(2, 128, -1)[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits.double(), ids[:, 1:].flatten())
    assert report.ppl_source == pytest.approx(loss.exp().item(), rel=1e-5)


def test_the_report_is_plain_json(pair):
    source, artifact, ids = pair
    report = compared(source, artifact, ids)
    read = json.loads(json.dumps(report.as_dict()))
    assert read.keys() == {field.name for field in dataclasses.fields(report)}
    assert read["layers"][1].keys() == {"layer", "kind", "relative_error", "shared"}


def test_progress_names_every_layer(pair):
    source, artifact, ids = pair
    messages = []
    compare_logits(*opened(source, artifact), ids, **ON_CPU, progress=messages.append)
    assert messages == ["layer 1 of 3", "layer 2 of 3", "layer 3 of 3"]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[1], [2]], r"shape \[2, 1\], expected rows of at least 2"),
        ([1, 2, 3], r"shape \[3\]"),
        ([[1, 256]], "reach from 1 to 256, expected 0 to 255"),
        ([[-1, 5]], "reach from -1 to 5"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(pair, ids, says):
    source, _, _ = pair
    with pytest.raises(RequestError, match=says):
        compared(source, source, torch.tensor(ids))


def test_models_of_different_shapes_are_refused(tmp_path):
    ids = torch.tensor([[1, 2, 3]])
    one = write(tmp_path / "one")
    with pytest.raises(FormatError, match="hidden_size is 64, expected the source's 96"):
        compared(one, write(tmp_path / "narrow", hidden_size=64), ids)
    kinds = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    with pytest.raises(FormatError, match="layer_types are not those of the source"):
        compared(one, write(tmp_path / "short", **kinds), ids)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_reports_what_a_cpu_reports(pair):
    source, artifact, ids = pair
    expected = compared(source, artifact, ids)
    on_gpu = {"device": "cuda"}
    report = compare_logits(*opened(source, artifact), ids, **on_gpu)
    assert report.kl_mean == pytest.approx(expected.kl_mean, rel=1e-3)
    assert report.ppl_artifact == pytest.approx(expected.ppl_artifact, rel=1e-5)
    for ours, theirs in zip(report.layers, expected.layers, strict=True):
        assert ours.relative_error == pytest.approx(theirs.relative_error, rel=1e-3)
    assert compare_logits(*opened(source, source), ids, **on_gpu).kl_mean <= 1e-9


def test_nan_and_a_source_of_zeros_are_never_no_error():
    ones, zeros = torch.ones(2, 3), torch.zeros(2, 3)
    assert _relative_error(zeros, zeros) == 0
    assert _relative_error(zeros, ones) == math.inf
    assert math.isnan(_relative_error(ones, ones * torch.nan))
    assert math.isnan(_relative_error(ones * torch.nan, ones))
    assert math.isnan(_relative_error(zeros, ones * torch.nan))


def test_the_error_of_the_mean_is_that_of_blocks_of_tokens():
    """Tokens that are alike within blocks of 128 count as one draw each."""
    draws = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alike = draws.repeat_interleave(128, 1)
    assert _mean_error(alike) == pytest.approx(float(draws.std()) / 12**0.5)
    shorter = alike[:, :400]
    blocks, sizes = draws, torch.tensor([128.0, 128, 128, 16]).double()
    terms = (sizes * (blocks - shorter.mean())).square().sum()
    assert _mean_error(shorter) == pytest.approx((12 / 11 * float(terms)) ** 0.5 / 1200)
    assert _mean_error(draws[:1]) is None


def test_rows_with_nan_agree_with_nothing():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    broken = logits.clone()
    broken[1, 8] = torch.nan
    broken[2] = torch.nan
    for pair in ((logits, broken), (broken, logits), (broken, broken)):
        divergence = Divergence(torch.zeros(4, dtype=torch.int64))
        for strip in (slice(0, 4), slice(4, 9)):
            divergence.take(*(side[:, strip] for side in pair))
        assert divergence.agrees.tolist() == [True, False, False, True]
        assert divergence.kl.isnan().tolist() == [False, True, True, False]
