"""A checkpoint folder: the index decides, what it does not name is noted, pickles are refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint import MAX_MAPPED
from formats.errors import FormatError
from formats.safetensors.folder import SIDE_FILES
from formats.safetensors.index import INDEX
from qwen35_convert.containers.registry import open_checkpoint
from tests.checkpoints import Weights, dense, hub_config, make_weights, moe, write_checkpoint

UP = "model.language_model.layers.0.mlp.up_proj.weight"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def weights() -> Weights:
    return make_weights(hub_config())


@pytest.fixture
def sharded(tmp_path: Path, weights: Weights) -> Path:
    return write_checkpoint(tmp_path / "in", hub_config(), weights, shards=2)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refused(path: Path, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        open_checkpoint(path)


def assert_holds(folder: Path, weights: Weights) -> None:
    source = open_checkpoint(folder)
    assert source.infos().keys() == weights.keys()
    assert source.layout.problems == []
    for name, value in weights.items():
        read = source.read(name)
        assert read.dtype == value.dtype, name
        assert torch.equal(read, value), name
        source.release(read.nbytes)


def test_a_single_file_and_a_sharded_folder_hold_the_same(tmp_path, sharded, weights):
    assert_holds(write_checkpoint(tmp_path / "one", hub_config(), weights), weights)
    assert_holds(sharded, weights)
    assert open_checkpoint(sharded).notes == ()


def test_a_safetensors_file_is_opened_beside_its_config(tmp_path):
    folder = dense(tmp_path / "in")
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    source = open_checkpoint(folder / "model.safetensors")
    assert list(source.files) == ["model.safetensors"]
    assert source.layout.problems == []
    assert list(source.notes) == ["other.safetensors is not used"]


def test_the_bundled_model_is_a_checkpoint(nano):
    source = open_checkpoint(nano)
    assert source.layout.problems == []
    assert source.notes == ()
    assert source.layout.kind == "hub"


def test_several_files_without_an_index_are_read_together(sharded, weights):
    (sharded / INDEX).unlink()
    assert_holds(sharded, weights)


def test_a_name_in_two_files_without_an_index_is_refused(sharded, weights):
    (sharded / INDEX).unlink()
    save_file({UP: weights[UP]}, sharded / "zz.safetensors")
    refused(sharded, rf"{UP} is in model-.* and in zz\.safetensors, and no index decides")


def test_a_model_file_alone_wins_over_other_files_without_an_index(tmp_path):
    folder = dense(tmp_path / "in")
    (folder / "consolidated.safetensors").write_bytes(b"not even a file")
    source = open_checkpoint(folder)
    assert list(source.files) == ["model.safetensors"]
    assert list(source.notes) == ["consolidated.safetensors is not used"]


def test_the_index_decides_which_copy_is_used(sharded, weights):
    """An overlay shard supersedes a tensor of a first one; a stray file is left alone."""
    newer = weights[UP] * 2
    save_file({UP: newer}, sharded / "model-overlay.safetensors")
    (sharded / "consolidated.safetensors").write_bytes(b"not even a file")
    first = weight_map(sharded)[UP]
    change_json(sharded / INDEX, weight_map=weight_map(sharded) | {UP: "model-overlay.safetensors"})
    source = open_checkpoint(sharded)
    assert torch.equal(source.read(UP), newer)
    assert source.layout.problems == []
    assert list(source.notes) == [
        f"{first}: {UP} is superseded by the copy in model-overlay.safetensors",
        "consolidated.safetensors is not in the index; it is not used",
    ]
    assert source.strays == source.notes


def test_a_tensor_the_index_forgets_is_noted_and_not_used(sharded):
    where = weight_map(sharded)
    file = where.pop("mtp.fc.weight")
    change_json(sharded / INDEX, weight_map=where)
    source = open_checkpoint(sharded)
    assert list(source.notes) == [f"{file}: mtp.fc.weight is not in the index; it is not used"]
    assert [problem.tensor for problem in source.layout.problems] == ["mtp.fc.weight"]


def test_a_missing_shard_is_refused_by_name(sharded):
    (sharded / TWO).unlink()
    refused(sharded, rf"is in '{TWO}', which does not exist")


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(sharded):
    where = weight_map(sharded)
    change_json(sharded / INDEX, weight_map=where | {UP: ONE if where[UP] == TWO else TWO})
    refused(sharded, rf"{INDEX}: {UP} is not in model-")


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/model.safetensors",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "..\\model.safetensors",
        "model.bin",
        "a\0.safetensors",
        5,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_may_name_files_of_its_folder_only(tmp_path, file):
    folder = dense(tmp_path / "in" / "deep")
    shutil.copy(folder / "model.safetensors", tmp_path / "in" / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {UP: file}}))
    refused(folder, rf"{INDEX}: {UP} is in ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "weight_map is missing or empty"),
        ('{"weight_map": {}}', "weight_map is missing or empty"),
        ('{"weight_map": []}', "weight_map is missing or empty"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is duplicated"),
        ('{"weight_map": {"a\\u0007": "model.safetensors"}}', "not a tensor name"),
        ("[]", "holds list"),
        ("", "not JSON"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, text, message):
    folder = dense(tmp_path / "in")
    (folder / INDEX).write_text(text)
    refused(folder, message)


@pytest.mark.parametrize("metadata", [{}, {"total_size": 0}, {"total_size": 71903645408.0}, None])
def test_the_total_size_of_an_index_is_not_believed(sharded, weights, metadata):
    change_json(sharded / INDEX, metadata=metadata)
    assert_holds(sharded, weights)


def test_files_behind_symlinks_are_read(tmp_path, sharded, weights):
    """The hub's cache: a snapshot of links into a folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(sharded.iterdir())):
        shutil.move(path, blobs / f"{i:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    assert_holds(snapshot, weights)
    assert open_checkpoint(snapshot).side_names == ["tokenizer.json"]


def test_only_known_side_files_are_listed(tmp_path):
    folder = dense(tmp_path / "in")
    for name in (
        *SIDE_FILES,
        "modeling_qwen.py",
        "pytorch_model.bin",
        "optimizer.pt",
        ".env",
        "training_args.bin",
        "tokenizer.json.bak",
    ):
        (folder / name).write_bytes(b"x")
    (folder / "vocab.json").unlink()
    (folder / "vocab.json").mkdir()
    listed = open_checkpoint(folder).side_names
    assert listed == sorted(set(SIDE_FILES) - {"vocab.json"})
    assert not [name for name in listed if name.endswith((".py", ".bin", ".pt", ".safetensors"))]


def test_every_file_that_is_read_is_listed(tmp_path, sharded, weights):
    read = [path.name for path in open_checkpoint(sharded).read_files()]
    assert read == ["config.json", "tokenizer.json", INDEX, ONE, TWO]
    single = write_checkpoint(tmp_path / "one", hub_config(), weights)
    read = [path.name for path in open_checkpoint(single).read_files()]
    assert read == ["config.json", "tokenizer.json", "model.safetensors"]


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_by_name_and_never_opened(tmp_path, pickle):
    (tmp_path / "config.json").write_text(json.dumps(hub_config()))
    (tmp_path / pickle).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(tmp_path, f"{pickle} is a pickle, which can run code")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hub_config()))
    refused(tmp_path, r"there is no \.safetensors file")


def test_a_folder_without_a_config_is_refused(tmp_path):
    folder = dense(tmp_path / "in")
    (folder / "config.json").unlink()
    refused(folder, r"config\.json is missing")
    refused(folder / "model.safetensors", r"config\.json is missing")


@pytest.mark.parametrize("name", ["absent", "config.json", "model.gguf"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path, name):
    folder = dense(tmp_path / "in")
    (folder / "model.gguf").write_bytes(b"GGUF")
    refused(folder / name, rf"{name} (does not exist|is not a folder|has 4 bytes)")


@pytest.mark.parametrize(
    ("block", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "exl3", "bits": 4}, "exl3"),
        ({"quant_method": "quark", "bits": 4, "group_size": 128}, "quark"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt MXFP8"),
        ({"quant_method": ["fp8"]}, "fp8"),
        ({"bits": 4}, "an unnamed method"),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, "mlx"),
    ],
)
@pytest.mark.parametrize("where", ["quantization_config", "quantization", "text_config"])
def test_another_quantiser_is_refused_by_name(tmp_path, block, method, where):
    folder = dense(tmp_path / "in")
    text = hub_config()["text_config"] | {"quantization_config": block}
    change_json(folder / "config.json", **{where: text if where == "text_config" else block})
    refused(folder, rf"quantised by .*{method}")


def test_a_quantization_config_that_is_no_object_is_refused(tmp_path):
    folder = dense(tmp_path / "in")
    change_json(folder / "config.json", quantization_config="fp8")
    refused(folder, "quantization_config is not an object")


def test_another_block_size_is_refused(tmp_path):
    folder = dense(tmp_path / "in")
    block = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    change_json(folder / "config.json", quantization_config=block)
    refused(folder, r"weight_block_size is \[64, 64\], expected \[128, 128\]")


@pytest.mark.parametrize(
    "block",
    [
        {},
        None,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ],
)
def test_fp8_that_we_read_is_not_refused(tmp_path, block):
    folder = dense(tmp_path / "in")
    change_json(folder / "config.json", quantization_config=block)
    assert open_checkpoint(folder).layout.problems == []


def with_stubs(path: Path, stubs: list[str]) -> None:
    """Rewrite a file by hand with empty tensors of no type, as NeMo Automodel leaks them."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header |= {name: {"dtype": "", "shape": [], "data_offsets": [0, 0]} for name in stubs}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_stubs_are_dropped_and_the_held_tensors_renamed(tmp_path, weights):
    a_log = [name for name in weights if name.endswith(".A_log")]
    held = {n.replace(".A_log", "._fp32_params.A_log"): w for n, w in weights.items()}
    folder = write_checkpoint(tmp_path / "in", hub_config(), held)
    with_stubs(folder / "model.safetensors", a_log)
    assert_holds(folder, held)
    notes = open_checkpoint(folder).notes
    assert len(notes) == len(a_log) == 3
    assert all("is an empty stub; it is dropped" in note for note in notes)


@pytest.mark.parametrize("named", [ONE, TWO])
def test_a_stub_in_one_file_does_not_hide_the_tensor_of_another(sharded, weights, named):
    where = weight_map(sharded)
    name = next(n for n, file in where.items() if file == ONE)
    with_stubs(sharded / TWO, [name])
    change_json(sharded / INDEX, weight_map=where | {name: named})
    held = open_checkpoint(sharded).infos()
    assert (name in held) is (named == ONE)
    assert len(held) == len(weights) - (named == TWO)


def test_a_truncated_shard_is_refused_before_anything_is_read(sharded):
    data = (sharded / TWO).read_bytes()
    (sharded / TWO).write_bytes(data[:-7])
    refused(sharded, rf"{TWO} has .* 7 are missing")


def test_an_opened_checkpoint_reads_what_the_library_reads(tmp_path):
    folder = moe(tmp_path / "in", sizes="ragged")
    expected = load_file(folder / "model.safetensors")
    source = open_checkpoint(folder)
    for atom in source.layout.atoms.values():
        assert torch.equal(source.read(atom.stored), expected[atom.stored])


@pytest.mark.all
def test_reading_a_large_checkpoint_keeps_little_of_it_mapped(tmp_path):
    """32 MB and what the kernel maps around; measured, for a promise of constant memory."""
    config = hub_config(vocab_size=3 << 16)
    source = open_checkpoint(write_checkpoint(tmp_path / "in", config, make_weights(config)))
    embed = source.read("model.language_model.embed_tokens.weight")
    peak = 0
    for part in embed.split(4096):
        assert part.isfinite().all()
        source.release(part.nbytes)
        peak = max(peak, mapped_bytes(source.folder))
    assert embed.nbytes > 2 * MAX_MAPPED
    assert 0 < peak < 1.5 * MAX_MAPPED


def mapped_bytes(folder: Path) -> int:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if str(folder) in line]
    sizes = (next(x for x in lines[i:] if x.startswith("Rss:")) for i in starts)
    return sum(int(size.split()[1]) << 10 for size in sizes)
