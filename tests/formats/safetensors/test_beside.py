"""What lies in the place of weights: adapters, pointers of git-lfs, web pages, links to nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import qwen35_convert as q
from formats.errors import FormatError
from formats.safetensors.index import INDEX, SINGLE
from qwen35_convert.containers.registry import open_checkpoint
from tests.checkpoints import dense, hub_config, make_weights, write_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{:064x}\nsize 1234567\n"
LORA = {"base_model_name_or_path": "acme/Borealis-4B", "peft_type": "LORA", "r": 8}
TENSORS = {
    f"base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_{half}.weight": value
    for half, value in (("A", torch.zeros(8, 128)), ("B", torch.zeros(512, 8)))
}


def refused(path: Path, *said: str) -> None:
    with pytest.raises(FormatError) as error:
        open_checkpoint(path)
    for text in said:
        assert text in str(error.value)
    assert error.value.exit_code == 3


def adapter(folder: Path, file: str = "adapter_model.safetensors", **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(LORA | config))
    save_file(TENSORS, folder / file)
    return folder


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapters.safetensors"])
@pytest.mark.parametrize("config", [False, True])
def test_an_adapter_alone_is_named_with_its_base_and_how_to_merge_it(tmp_path, file, config):
    folder = adapter(tmp_path / "in", file)
    if config:
        (folder / "config.json").write_text(json.dumps(hub_config()))
    way = f"qwen35 convert {folder} --base acme/Borealis-4B -o OUT"
    said = ("is an adapter (LoRA) of acme/Borealis-4B", way)
    refused(folder, *said)
    refused(folder / file, *said)


def test_an_adapter_of_mlx_names_its_base_too(tmp_path):
    folder = adapter(tmp_path / "in", "adapters.safetensors", base_model_name_or_path=None)
    (folder / "adapter_config.json").write_text(json.dumps({"model": "acme/Boreas"}))
    refused(folder, "of acme/Boreas", "merge_and_unload()")
    (folder / "adapter_config.json").write_text("not JSON")
    refused(folder, "of a model that it does not name")


def test_an_adapter_saved_as_a_pickle_is_one(tmp_path):
    folder = adapter(tmp_path / "in")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    (folder / "config.json").write_text(json.dumps(hub_config()))
    refused(folder, "is an adapter (LoRA) of acme/Borealis-4B")


def test_an_adapter_beside_a_whole_model_is_a_note(tmp_path):
    folder = adapter(dense(tmp_path / "in"))
    done = q.convert(folder, tmp_path / "out", "bf16-split")
    assert done.report is not None
    assert done.report.passed
    assert len(done.plan.notes) == 1
    assert (
        "adapter_model.safetensors is an adapter (LoRA) of acme/Borealis-4B" in done.plan.notes[0]
    )
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_shards_without_an_index_are_read_without_the_adapter_beside_them(tmp_path):
    weights = make_weights(hub_config())
    folder = adapter(write_checkpoint(tmp_path / "in", hub_config(), weights, shards=2))
    (folder / INDEX).unlink()
    opened = open_checkpoint(folder)
    assert opened.layout.problems == []
    assert "adapter_model.safetensors" not in opened.files


def test_an_adapter_under_the_model_s_name_is_told_by_its_tensors_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hub_config()))
    save_file(TENSORS, tmp_path / SINGLE)
    with pytest.raises(FormatError) as error:
        q.plan(tmp_path, "bf16-split")
    assert "belongs to an adapter" in str(error.value)
    assert "is missing" not in str(error.value)


@pytest.mark.parametrize("shards", [1, 2])
def test_pointers_of_git_lfs_say_what_to_run(tmp_path, shards):
    folder = write_checkpoint(
        tmp_path / "in", hub_config(), make_weights(hub_config()), shards=shards
    )
    files = sorted(folder.glob("*.safetensors"))
    for i, path in enumerate(files):
        path.write_text(POINTER.format(i))
    others = [f"and   1 more: {files[1].name}"] if shards == 2 else []
    refused(folder, f"{files[0].name} is a git-lfs pointer", "git lfs pull", *others)
    refused(files[0], "is a git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_pointer_in_the_place_of_json_says_so_too(tmp_path, name):
    folder = dense(tmp_path / "in")
    (folder / name).write_text(POINTER.format(1))
    refused(folder, f"{name} is a git-lfs pointer", "git lfs pull")


def test_a_pointer_in_the_place_of_a_gguf_says_so_too(tmp_path):
    (tmp_path / "m.gguf").write_text(POINTER.format(1))
    refused(tmp_path / "m.gguf", "is a git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 bytes"),
        (b"\0" * 4096, "begins with zeros"),
        (b"<!DOCTYPE html>\n<html><head>", "is a web page"),
        (b"\n<html>", "is a web page"),
        (b"Entry not found", "is an answer of the hub"),
        (b'{"error":"Invalid username or password."}', "is an answer of the hub"),
        (b"PK\x03\x04" + bytes(60), "is a pickle of torch.save"),
        (b"\x80\x02}q\x00" + bytes(60), "is a pickle of torch.save"),
        (b"GGUF\x03\0\0\0" + bytes(60), "is a GGUF file"),
        (b"\x1f\x8b\x08\0" + bytes(60), "is compressed"),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path, content, said):
    folder = dense(tmp_path / "in")
    (folder / SINGLE).write_bytes(content)
    refused(folder, f"{SINGLE} {said}", "  fix   ")


@pytest.mark.parametrize("left", [4, 100, -7])
def test_a_file_that_was_cut_is_to_be_downloaded_again(tmp_path, left):
    folder = dense(tmp_path / "in")
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:left])
    refused(folder, SINGLE, "download it again")


def test_a_file_that_is_too_long_is_not(tmp_path):
    folder = dense(tmp_path / "in")
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes() + b"more")
    with pytest.raises(FormatError, match="4 too many") as error:
        open_checkpoint(folder)
    assert "download" not in str(error.value)


def test_a_file_that_aria2_has_not_finished_is_refused(tmp_path):
    """It has its full size, and zeros where bytes are still to come."""
    folder = dense(tmp_path / "in")
    (folder / f"{SINGLE}.aria2").write_bytes(b"\0\1")
    refused(folder, f"{SINGLE}.aria2 beside it", "not finished")


@pytest.mark.parametrize("name", ["config.json", "pytorch_model.bin", "README.md"])
def test_a_file_that_is_no_model_says_which_folder_is_meant(tmp_path, name):
    folder = dense(tmp_path / "in")
    (folder / name).touch()
    refused(folder / name, f"{name} is ", f"give its folder: {folder}")


COMMIT = "5" * 40


def hub_cache(folder: Path, home: Path) -> Path:
    """Move a folder into a cache of the hub; return its snapshot."""
    repo = home / "models--acme--Borealis-4B"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for i, path in enumerate(sorted(folder.iterdir())):
        blob = repo / "blobs" / f"{i:064x}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_snapshot_is_called_by_its_repository(tmp_path):
    snapshot = hub_cache(dense(tmp_path / "in"), tmp_path)
    assert open_checkpoint(snapshot).name == "Borealis-4B"
    (tmp_path / "link").symlink_to(snapshot)
    assert open_checkpoint(tmp_path / "link").name == "Borealis-4B"
    assert open_checkpoint(snapshot / SINGLE).name == "Borealis-4B"


def test_the_folder_of_a_repository_in_the_cache_is_its_snapshot(tmp_path):
    snapshot = hub_cache(dense(tmp_path / "in"), tmp_path)
    repo = snapshot.parents[1]
    assert open_checkpoint(repo).folder == snapshot
    (snapshot.parent / ("6" * 40)).mkdir()
    assert open_checkpoint(repo).folder == snapshot
    (repo / "refs" / "main").unlink()
    refused(repo, "has 2 snapshots", str(snapshot))


def test_a_snapshot_without_all_its_files_says_how_to_fetch_them(tmp_path):
    weights = make_weights(hub_config())
    folder = write_checkpoint(tmp_path / "in", hub_config(), weights, shards=2)
    snapshot = hub_cache(folder, tmp_path)
    lost = sorted(snapshot.glob("*.safetensors"))[1]
    lost.unlink()
    again = f"hf download acme/Borealis-4B --revision {COMMIT}"
    refused(snapshot, f"{lost.name!r}, which does not exist", again)


def test_a_dangling_link_to_a_gguf_says_so(tmp_path):
    snapshot = hub_cache(dense(tmp_path / "in"), tmp_path)
    (snapshot / "m.gguf").symlink_to("../../blobs/0")
    refused(snapshot / "m.gguf", f"hf download acme/Borealis-4B m.gguf --revision {COMMIT}")


@pytest.mark.parametrize("name", [SINGLE, "config.json", "tokenizer.json"])
def test_a_dangling_link_of_the_cache_says_how_to_fetch_the_file(tmp_path, name):
    snapshot = hub_cache(dense(tmp_path / "in"), tmp_path)
    (snapshot / name).resolve().unlink()
    again = f"hf download acme/Borealis-4B {name} --revision {COMMIT}"
    refused(snapshot, f"{name} is a link to", "which does not exist", again)
    refused(snapshot / name, f"{name} is a link to", again)


def test_a_dangling_link_elsewhere_says_what_to_do(tmp_path):
    folder = dense(tmp_path / "in")
    (folder / SINGLE).rename(tmp_path / "gone")
    (folder / SINGLE).symlink_to(tmp_path / "not" / "here")
    refused(
        folder, f"{SINGLE} is a link to {tmp_path}/not/here, which does not exist", "copy the file"
    )


def test_a_folder_without_a_config_says_what_is_near(tmp_path):
    folder = dense(tmp_path / "in" / "checkpoint-500").parent
    meant = "give the one that is meant: "
    refused(folder, "config.json is missing", f"{meant}{folder / 'checkpoint-500'}")
    other = tmp_path / "other"
    other.mkdir()
    (other / "m.gguf").write_bytes(b"GGUF")
    refused(other, "config.json is missing", f"{meant}{other / 'm.gguf'}")


def test_shards_of_zero_are_to_be_gathered(tmp_path):
    folder = dense(tmp_path / "in")
    (folder / SINGLE).unlink()
    (folder / "zero_to_fp32.py").touch()
    refused(folder, "there is no .safetensors file", "python zero_to_fp32.py . OUT")


def test_a_folder_without_a_model_says_so(tmp_path):
    refused(tmp_path, "config.json is missing, and so are .safetensors files", "or a .gguf file")


def test_a_folder_whose_name_ends_in_gguf_is_read_and_none_is_written(tmp_path):
    folder = dense(tmp_path / "v1.5.gguf")
    assert open_checkpoint(folder).name == "v1.5.gguf"
    out = tmp_path / "out.gguf"
    out.mkdir()
    for recipe in (None, "bf16-split", "gguf-bf16"):
        with pytest.raises(q.OutputError, match="is a folder, named as a GGUF file"):
            q.convert(folder, out, recipe, q.RunOptions(overwrite=True))
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", ["out", "m.gguf"])
def test_the_folders_above_out_are_made(nano, tmp_path, monkeypatch, name):
    recipe = "gguf-bf16" if name == "m.gguf" else "bf16-split"
    monkeypatch.chdir(tmp_path)
    out = Path("not there") / "yet" / name
    assert q.convert(nano, out, recipe).report.passed
    assert (tmp_path / out).exists()


@pytest.mark.parametrize("name", ["out", "m.gguf"])
def test_an_out_inside_a_file_is_refused(nano, tmp_path, name):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(
        q.Qwen35Error, match="file is a file, expected the folder that OUT"
    ) as error:
        q.convert(nano, tmp_path / "file" / "in" / name, "gguf-bf16" if name != "out" else None)
    assert error.value.exit_code == 4
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_folders_that_were_made_for_what_is_refused_are_removed(tmp_path):
    folder = dense(tmp_path / "in")
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "there").mkdir()
    with pytest.raises(q.Qwen35Error, match="NaN"):
        q.convert(folder, tmp_path / "there" / "not" / "yet" / "out")
    assert list((tmp_path / "there").iterdir()) == []
