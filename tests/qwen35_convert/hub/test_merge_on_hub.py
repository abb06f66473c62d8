"""An adapter on the hub, and its base model there too: fetched, streamed, and from the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import qwen35_convert as q
from tests.adapters import of_matrix, write_adapter
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.qwen35_convert.hub.hub_server import Hub, only_hub

BASE, ADAPTER = "acme/Borealis-4B", "acme/Borealis-4B-poems"
MODULE = "model.language_model.layers.2.mlp.up_proj"
BESIDE = {"README.md": b"# Poems\n", "optimizer.pt": b"\x80", "runs/1/events": b"x"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with only_hub(tmp_path, monkeypatch) as hub:
        yield hub


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def local(tmp_path: Path) -> q.Merge:
    weights = make_weights(hub_config())
    base = write_checkpoint(tmp_path / "base", hub_config(), weights, shards=2)
    factors = of_matrix(MODULE, weights[f"{MODULE}.weight"])
    return q.Merge(write_adapter(tmp_path / "Borealis-4B-poems", factors), base)


@pytest.fixture
def remote(hub: Hub, local: q.Merge) -> q.Merge:
    hub.repo(BASE).commit(files_of(Path(local.base)))
    hub.repo(ADAPTER).commit(files_of(Path(local.adapter)) | BESIDE)
    return q.Merge(ADAPTER, BASE)


def weights_at(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


@pytest.mark.parametrize("stream", [False, True], ids=["copy", "stream"])
def test_both_come_from_the_hub(remote, local, tmp_path, stream):
    options = q.RunOptions(stream=stream, workers=1)
    done = q.convert(remote, tmp_path / "far", "fp8-block", options)
    assert done.report is not None
    assert done.report.passed, done.report.failures
    q.convert(local, tmp_path / "near", "fp8-block")
    assert weights_at(tmp_path / "far") == weights_at(tmp_path / "near")
    receipt = json.loads((tmp_path / "far" / "qwen35-receipt.json").read_text())
    assert receipt["adapter"]["repo"] == ADAPTER
    assert receipt["source"]["repo"] == BASE
    assert set(receipt["adapter"]["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert all(file["sha256"] for file in receipt["adapter"]["files"].values())
    assert q.verify(tmp_path / "far", local).passed


def test_an_adapter_in_the_cache_is_used_offline(remote, tmp_path, monkeypatch):
    q.convert(remote, tmp_path / "one", "bf16-split")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    q.convert(remote, tmp_path / "two", "bf16-split")
    assert weights_at(tmp_path / "one") == weights_at(tmp_path / "two")
    (file,) = (tmp_path / "two").glob("*.safetensors")
    assert f"{MODULE.replace('language_model.', '')}.weight" in load_file(file)


def test_a_model_is_no_adapter(remote, tmp_path):
    with pytest.raises(q.FetchError, match=r"no adapter_config\.json(.|\n)*an adapter") as error:
        q.convert(q.Merge(BASE, BASE), tmp_path / "out", "bf16-split")
    assert error.value.exit_code == 3
