"""The embedding by GPTQ: what its errors come to, whose codes it changes, and how it is proven."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import qwen35_convert as q
from formats.gguf.checkpoint import first_file
from qwen35_convert.calibration.embedding import embedding_sums
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.text.tokens import text_ids
from runtime.compare import compare_logits
from runtime.hessian import Hessians
from runtime.layerwise import Walk, observe_all
from runtime.stream import embedding_gram
from runtime.workers import Workers
from tests.checkpoints import hub_config, make_weights, write_checkpoint

EMBEDDING = "token_embd.weight"
ONLY = ("mtp=drop", "quantize.rules=[{match: embed_tokens, scheme: q4_0}]")
GPTQ = ("quantize.calibrate.tokens=2048", "quantize.method=gptq")


def walk_of(source, texts):
    return Walk.over(source, texts, device="cpu", dtype=torch.float32)


def over_mean(gram):
    return gram / gram.diagonal().mean()


def test_a_tied_head_counts_as_much_as_the_first_readers(nano):
    source, texts = open_checkpoint(nano), [torch.arange(5, 40), torch.arange(300, 320)]
    seen = []
    tokens = sum(map(len, texts))
    observer = Hessians({"embed_tokens"}, tokens, (), seen.append)
    with Workers("cpu") as workers:
        observe_all(source, texts, observer, workers=workers)
    walk = walk_of(source, texts)
    wanted = over_mean(embedding_gram(walk)) + over_mean(seen[0].values)
    found = embedding_sums(walk)
    assert found.names == ("embed_tokens",)
    assert torch.allclose(over_mean(found.values), over_mean(wanted), rtol=1e-4, atol=1e-4)


@pytest.fixture
def walk(tmp_path):
    """A walk through a model whose head is its own."""
    config = hub_config()
    write_checkpoint(tmp_path, config, make_weights(config))
    return walk_of(open_checkpoint(tmp_path), [torch.arange(4)])


def test_an_embedding_alone_is_weighed_by_its_readers(walk):
    assert torch.equal(embedding_sums(walk).values, embedding_gram(walk))


def test_where_nothing_reads_it_all_columns_are_alike(walk, monkeypatch):
    wide = walk.config.sizes["H"]
    monkeypatch.setattr("runtime.stream.embedding_gram", lambda _: torch.zeros(wide, wide))
    assert torch.equal(embedding_sums(walk).values, torch.eye(wide))


def test_means_of_squares_say_nothing_of_it(nano):
    settings = ("quantize.method=sweep", "mtp=drop")
    notes = q.plan(nano, "gguf-q4_k_m", "out.gguf", overrides=settings).notes
    assert any(note.startswith("embed_tokens gets the nearest codes") for note in notes), notes


@pytest.fixture(scope="module")
def made(tmp_path_factory, nano_path):
    """The path of a file whose embedding alone is calibrated."""
    out = tmp_path_factory.mktemp("embedding") / "gptq.gguf"
    done = q.convert(nano_path, out, "gguf-bf16", overrides=(*ONLY, *GPTQ))
    assert done.report.passed, done.report.failures
    assert done.report.calibration == {
        "method": "gptq", "proof": "again", "layers": 1, "layers_again": 1, "why": None,
    }  # fmt: skip
    return out


def receipt_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.receipt.json")


def test_predictions_are_nearer_than_with_nearest_codes(made, nano_path, tmp_path):
    plain = tmp_path / "plain.gguf"
    q.convert(nano_path, plain, "gguf-bf16", q.RunOptions(verify=False), overrides=ONLY)
    source = open_checkpoint(nano_path)
    rows = torch.tensor(text_ids(source, "default")[-1024:]).view(-1, 256)
    ours, theirs = (
        compare_logits(source, open_checkpoint(path), rows, device="cpu").kl_mean
        for path in (made, plain)
    )
    assert ours < 0.85 * theirs


def test_it_is_proven_with_and_without_the_receipt(made, nano_path, tmp_path):
    assert list(json.loads(receipt_of(made).read_text())["calibration"]["layers"]) == [
        "embed_tokens"
    ]
    copy = tmp_path / "out.gguf"
    copy.write_bytes(made.read_bytes())
    alone = q.verify(copy, nano_path)
    assert alone.passed, alone.failures
    judged = q.verify(made, nano_path, by_bounds=True)
    assert judged.passed, judged.failures


def test_a_tampered_row_is_named(made, nano_path, tmp_path):
    copy = tmp_path / made.name
    receipt_of(copy).write_bytes(receipt_of(made).read_bytes())
    data = bytearray(made.read_bytes())
    data[first_file(open_checkpoint(made)).ranges[EMBEDDING][0] + 1] ^= 4  # of a block's scale
    copy.write_bytes(data)
    report = q.verify(copy, nano_path)
    assert {f.tensor for f in report.failures} == {EMBEDDING, made.name}
