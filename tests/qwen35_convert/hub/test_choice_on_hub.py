"""A repository is read as its folder would be: one copy of the model, adapters named, addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from formats.errors import FormatError, Qwen35Error
from formats.safetensors.index import INDEX, SINGLE, siblings
from qwen35_convert import api
from qwen35_convert.inspection.source import inspect
from qwen35_convert.recipe.recipe import read_recipe
from tests.checkpoints import Weights, hub_config, make_weights, write_checkpoint
from tests.qwen35_convert.hub.hub_server import Hub, only_hub

REPO = "acme/Borealis-4B"
DOWN = "model.language_model.layers.0.mlp.down_proj.weight"
ONE, TWO = siblings("model-00001-of-00002.safetensors")
MODES = pytest.mark.parametrize("stream", [False, True], ids=["copy", "stream"])
ADAPTER = {"base_model_name_or_path": "acme/Borealis-4B", "peft_type": "LORA"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with only_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def weights() -> Weights:
    return make_weights(hub_config())


@pytest.fixture
def files(tmp_path: Path, weights: Weights) -> dict[str, bytes]:
    folder = write_checkpoint(tmp_path / "model", hub_config(), weights, shards=2)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def converted(out: Path, *, stream: bool) -> tuple[Weights, tuple[str, ...]]:
    done = api.convert(
        REPO, out, read_recipe("bf16-split"), options=api.RunOptions(stream=stream, workers=1)
    )
    assert done.report is not None
    assert done.report.passed, done.report.failures
    return load((out / SINGLE).read_bytes()), done.plan.notes


@MODES
def test_two_whole_copies_are_refused(hub, files, weights, tmp_path, stream):
    hub.repo(REPO).commit(files | {SINGLE: save(weights)})
    with pytest.raises(FormatError, match=f"holds the model twice: in {SINGLE}") as error:
        converted(tmp_path / "out", stream=stream)
    assert INDEX in error.value.fix
    assert not (tmp_path / "out").exists()


@MODES
def test_a_file_is_read_where_the_index_names_what_is_not_there(
    hub, files, weights, tmp_path, stream
):
    del files[TWO]
    tuned = weights | {DOWN: weights[DOWN] * 1.25}
    hub.repo(REPO).commit(files | {SINGLE: save(tuned)})
    found, notes = converted(tmp_path / "out", stream=stream)
    assert torch.equal(found[DOWN.replace("language_model.", "")], tuned[DOWN])
    assert any(f"{SINGLE} is complete, and is read" in note for note in notes)


@MODES
def test_the_same_bytes_under_both_names_are_no_second_copy(hub, weights, tmp_path, stream):
    folder = write_checkpoint(tmp_path / "one", hub_config(), weights)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    only = "model.safetensors-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(weights, only)}
    hub.repo(REPO).commit(files | {only: files[SINGLE], INDEX: json.dumps(index).encode()})
    found, notes = converted(tmp_path / "out", stream=stream)
    assert DOWN.replace("language_model.", "") in found
    assert notes == (f"{SINGLE} is not in the index; it is not used",)


@MODES
def test_an_adapter_alone_is_refused_as_one(hub, tmp_path, stream):
    alone = {"adapter_model.safetensors": save({"x": torch.zeros(1)})}
    hub.repo(REPO).commit(alone | {"adapter_config.json": json.dumps(ADAPTER).encode()})
    with pytest.raises(Qwen35Error, match=r"an adapter \(LoRA\)(.|\n)*--base") as error:
        converted(tmp_path / "out", stream=stream)
    assert error.value.exit_code == 3


@MODES
def test_an_adapter_beside_the_model_is_a_note(hub, files, tmp_path, stream):
    beside = {"adapter_model.safetensors": save({"x": torch.zeros(1)})}
    beside["adapter_config.json"] = json.dumps(ADAPTER).encode()
    hub.repo(REPO).commit(files | beside)
    _, notes = converted(tmp_path / "out", stream=stream)
    assert any("an adapter (LoRA) of acme/Borealis-4B" in note for note in notes)


@MODES
@pytest.mark.parametrize("own", [False, True])
def test_copies_beside_mtp_are_compared_over_the_network_too(hub, weights, tmp_path, stream, own):
    embed = weights["model.language_model.embed_tokens.weight"].clone()
    embed[255, 0] += own
    folder = tmp_path / "model"
    write_checkpoint(folder, hub_config(), weights | {"mtp.embed_tokens.weight": embed}, shards=2)
    hub.repo(REPO).commit({path.name: path.read_bytes() for path in folder.iterdir()})
    if not own:
        assert not any(
            "mtp.embed" in name for name in converted(tmp_path / "out", stream=stream)[0]
        )
        return
    with pytest.raises(FormatError, match=r"differ in row 255(.|\n)*--set mtp=drop"):
        converted(tmp_path / "out", stream=stream)


def test_an_address_of_the_repository_is_the_repository(hub, files, tmp_path):
    hub.repo(REPO).commit(files)
    found = inspect(f"{hub.url}/{REPO}/tree/main")
    assert found.problems == []
    assert found.tensors == inspect(REPO).tensors
