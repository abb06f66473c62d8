"""Which files of a folder are the model: one copy is read, two are refused, with what to type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import qwen35_convert as q
from formats.errors import FormatError
from formats.safetensors.index import INDEX, SINGLE, siblings
from qwen35_convert.containers.registry import open_checkpoint
from tests.checkpoints import Weights, hub_config, make_weights, write_checkpoint
from tests.formats.layouts import without

DOWN = "model.language_model.layers.0.mlp.down_proj.weight"
ONE, TWO = siblings("model-00001-of-00002.safetensors")


@pytest.fixture(scope="module")
def base() -> Weights:
    return make_weights(hub_config())


@pytest.fixture(scope="module")
def tuned(base: Weights) -> Weights:
    """What a trainer made of it; MTP is lost, as transformers loses it."""
    return without(base | {DOWN: base[DOWN] * 1.25}, "mtp.")


@pytest.fixture
def folder(tmp_path: Path, base: Weights, tuned: Weights) -> Path:
    """Shards and index of the base, and the tuned model as one file beside them."""
    path = write_checkpoint(tmp_path / "in", hub_config(), base, shards=2)
    save_file(tuned, path / SINGLE, metadata={"format": "pt"})
    return path


def down(path: Path) -> torch.Tensor:
    return open_checkpoint(path).read(DOWN).clone()


def refused(path: Path, *said: str) -> None:
    with pytest.raises(FormatError) as error:
        open_checkpoint(path)
    for text in said:
        assert text in str(error.value)
    assert error.value.exit_code == 3


def test_two_whole_copies_are_refused_and_both_are_named(folder):
    refused(folder, SINGLE, f"{ONE} ... ({INDEX})", f"{folder / SINGLE} or {folder / INDEX}")


def test_either_copy_can_be_named(folder, base, tuned):
    assert torch.equal(down(folder / SINGLE), tuned[DOWN])
    for name in (INDEX, ONE, TWO):
        assert torch.equal(down(folder / name), base[DOWN])
    assert open_checkpoint(folder / INDEX).strays == (
        f"{SINGLE} is not in the index; it is not used",
    )


def test_the_artifact_is_that_of_the_copy_alone(folder, tmp_path, tuned):
    alone = write_checkpoint(tmp_path / "alone", hub_config(), tuned)
    outs = [
        q.convert(source, tmp_path / out, "fp8-block").out / SINGLE
        for source, out in ((folder / SINGLE, "a"), (alone, "b"))
    ]
    assert outs[0].read_bytes() == outs[1].read_bytes()


def gone(folder: Path) -> None:
    for name in (ONE, TWO):
        (folder / name).unlink()


def one_is_gone(folder: Path) -> None:
    (folder / TWO).unlink()


def one_is_cut(folder: Path) -> None:
    (folder / TWO).write_bytes((folder / TWO).read_bytes()[:-7])


def pointers(folder: Path) -> None:
    (folder / ONE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def a_link_to_nothing(folder: Path) -> None:
    (folder / ONE).unlink()
    (folder / ONE).symlink_to("../../blobs/0")


def another_model(folder: Path) -> None:
    save_file({"x": torch.zeros(2)}, folder / ONE)


@pytest.mark.parametrize(
    "harm", [gone, one_is_gone, one_is_cut, pointers, a_link_to_nothing, another_model]
)
def test_the_single_file_is_read_where_only_it_is_whole(folder, harm, tuned):
    harm(folder)
    opened = open_checkpoint(folder)
    assert torch.equal(opened.read(DOWN), tuned[DOWN])
    assert f"({INDEX}) is not used" in opened.notes[0]
    assert f"{SINGLE} is complete, and is read" in opened.notes[0]
    assert opened.strays


def cut(file: Path, _: Weights) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def empty(file: Path, _: Weights) -> None:
    file.write_bytes(b"")


def a_web_page(file: Path, _: Weights) -> None:
    file.write_text("<!DOCTYPE html><html></html>")


def half(file: Path, tuned: Weights) -> None:
    save_file(dict(list(tuned.items())[::2]), file)


@pytest.mark.parametrize("harm", [cut, empty, a_web_page, half])
def test_the_shards_are_read_where_only_they_are_whole(folder, harm, base, tuned):
    harm(folder / SINGLE, tuned)
    opened = open_checkpoint(folder)
    assert torch.equal(opened.read(DOWN), base[DOWN])
    assert opened.notes == (f"{SINGLE} is not in the index; it is not used",)


def test_where_neither_is_whole_the_shards_are_asked_for(folder, tuned):
    cut(folder / SINGLE, tuned)
    one_is_gone(folder)
    refused(folder, f"is in {TWO!r}, which does not exist", "download it again")


def test_a_second_name_of_the_same_file_is_no_second_copy(tmp_path, base):
    """What people do for tools that want this name."""
    path = write_checkpoint(tmp_path / "in", hub_config(), base)
    only = "model.safetensors-00001-of-00001.safetensors"
    (path / SINGLE).rename(path / only)
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(base, only)}))
    (path / SINGLE).symlink_to(only)
    assert list(open_checkpoint(path).files) == [only]


def test_shards_without_an_index_beside_a_single_file(folder, base, tuned):
    (folder / INDEX).unlink()
    refused(folder, SINGLE, ONE, str(folder / ONE))
    assert torch.equal(down(folder / ONE), base[DOWN])
    one_is_gone(folder)
    assert torch.equal(down(folder), tuned[DOWN])
    refused(folder / ONE, f"{TWO}, one of 2 files with {ONE} does not exist", "download it again")


def test_shards_that_an_old_index_does_not_know_are_read(tmp_path, base):
    """Saved again in three files; the index of the two is left."""
    path = write_checkpoint(tmp_path / "in", hub_config(), base, shards=3)
    old = {"weight_map": dict.fromkeys(base, ONE)}
    (path / INDEX).write_text(json.dumps(old))
    opened = open_checkpoint(path)
    assert len(opened.files) == 3
    assert f"{ONE} ({INDEX}) is not used" in opened.notes[0]
    assert opened.layout.problems == []


def test_an_index_of_another_saving_says_that_it_is_to_go(tmp_path, base):
    path = write_checkpoint(tmp_path / "in", hub_config(), base, shards=2)
    index = json.loads((path / INDEX).read_text())
    swap = {ONE: TWO, TWO: ONE}
    index["weight_map"] = {name: swap[file] for name, file in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))
    refused(path, f"{INDEX}: ", "remove the index")


def as_variants(path: Path) -> None:
    (path / SINGLE).rename(path / "model.fp16.safetensors")
    shutil.copy(path / "model.fp16.safetensors", path / "model.fp32.safetensors")


def test_two_variants_are_refused_and_either_can_be_named(tmp_path, base):
    path = write_checkpoint(tmp_path / "in", hub_config(), base)
    as_variants(path)
    refused(path, "model.fp16.safetensors", "model.fp32.safetensors", "as the source")
    assert torch.equal(down(path / "model.fp32.safetensors"), base[DOWN])
    (path / "model.fp32.safetensors").unlink()
    assert torch.equal(down(path), base[DOWN])


def test_a_variant_beside_the_model_is_not_used(tmp_path, base):
    path = write_checkpoint(tmp_path / "in", hub_config(), base)
    shutil.copy(path / SINGLE, path / "model.fp16.safetensors")
    assert open_checkpoint(path).notes == ("model.fp16.safetensors is not used",)


def test_the_index_of_a_variant_is_read_where_it_is_alone(tmp_path, base):
    path = write_checkpoint(tmp_path / "in", hub_config(), base, shards=2)
    (path / INDEX).rename(path / "model.safetensors.index.fp16.json")
    assert torch.equal(down(path), base[DOWN])
    shutil.copy(path / "model.safetensors.index.fp16.json", path / "x.safetensors.index.json")
    refused(path, "has 2 indexes", "model.safetensors.index.fp16.json, x.safetensors.index.json")
    shutil.copy(path / "x.safetensors.index.json", path / INDEX)
    assert torch.equal(down(path), base[DOWN])


STRAYS: dict[str, Callable[[Path], object]] = {
    "consolidated.safetensors": lambda path: shutil.copy(path.with_name(SINGLE), path),
    "pytorch_model.bin": lambda path: path.write_bytes(b"PK"),
    "pytorch_model-00001-of-00002.bin": lambda path: path.write_bytes(b"PK"),
    "training_args.bin": lambda path: path.write_bytes(b"PK"),
    "original": lambda path: shutil.copytree(path.parent, path),
}


@pytest.mark.parametrize("name", STRAYS)
def test_what_no_engine_reads_is_left_alone(tmp_path, name, base):
    path = write_checkpoint(tmp_path / "in", hub_config(), base)
    STRAYS[name](path / name)
    opened = open_checkpoint(path)
    assert list(opened.files) == [SINGLE]
    assert len(opened.notes) == name.startswith(("consolidated", "pytorch"))
    assert not any("twice" in note for note in opened.notes)


def test_one_of_several_files_stands_for_all(tmp_path, base):
    path = write_checkpoint(tmp_path / "in", hub_config(), base, shards=2)
    opened = open_checkpoint(path / TWO)
    assert opened.infos().keys() == base.keys()
    assert opened.notes == (f"{TWO} is one of the 2 files of the model; all are read",)
    done = q.convert(path / TWO, tmp_path / "out", "bf16-split")
    assert done.report is not None
    assert done.report.passed


def test_a_missing_file_of_a_set_without_an_index_is_named(tmp_path, base):
    path = write_checkpoint(tmp_path / "in", hub_config(), base, shards=3)
    (path / INDEX).unlink()
    lost = siblings("model-00001-of-00003.safetensors")[1]
    (path / lost).unlink()
    refused(path, f"{lost}, one of 3 files", "does not exist", "download it again")
