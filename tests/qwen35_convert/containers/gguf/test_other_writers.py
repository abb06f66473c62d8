"""GGUF files of other writers: Ollama spells keys, names and the names of its files its own way.

Each file is the bundled model's as the `gguf` package writes it again with one difference. What is
made of it must be, to the byte, what is made of the plain file, and llama.cpp must load it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from formats.errors import FormatError
from formats.gguf.file import GgufFile
from formats.gguf.header import Kv
from qwen35_convert import api
from qwen35_convert.containers.registry import container_for, open_checkpoint
from qwen35_convert.errors import OutputError
from qwen35_convert.inspection.source import inspect
from qwen35_convert.recipe.recipe import build_recipe
from tests.gguf_reader import read_gguf
from tests.llama_cpp import LlamaCpp

NANO = Path(__file__).parents[3] / "data" / "nano-dense"
SECTIONS, INTERVAL = "qwen35.rope.dimension_sections", "qwen35.full_attention_interval"
RECURRENT, KV_HEADS = "qwen35.attention.recurrent_layers", "qwen35.attention.head_count_kv"
BLOB = "sha256-" + "7" * 64
FILE = {"quantize": {"scheme": "f32"}, "export": {"format": "gguf"}}
FOLDER = {"quantize": {"scheme": "keep"}, "mtp": "drop"}

Pairs = dict[str, Kv]
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "plain.gguf"
    recipe = build_recipe(FILE | {"mtp": "drop"})
    api.convert(NANO, out, recipe, options=api.RunOptions(verify=False))
    return out


def written(path: Path, like: Path, pairs: Pairs, more: Tensors, names=lambda name: name) -> Path:
    """Write a file again with other pairs, other names and more tensors."""
    writer = gguf.GGUFWriter(None, arch="qwen35")
    writer.kv_data[0].clear()
    for kv in pairs.values():
        kind, _, item = kv.kind.removesuffix("]").partition("[")
        inner = gguf.GGUFValueType[item.upper()] if item else None
        writer.add_key_value(kv.key, kv.value, gguf.GGUFValueType[kind.upper()], inner)
    tensors = {t.name: np.array(t.data) for t in read_gguf(like).tensors}
    for name, value in (tensors | more).items():
        writer.add_tensor(names(name), value)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def three_sections(pairs: Pairs) -> Pairs:
    return pairs | {SECTIONS: replace(pairs[SECTIONS], value=pairs[SECTIONS].value[:3])}


def heads_of_each_layer(pairs: Pairs) -> Pairs:
    heads = [0, 0, 0, pairs[KV_HEADS].value]
    return pairs | {KV_HEADS: Kv(KV_HEADS, "array[int32]", heads)}


def without(*keys: str):
    return lambda pairs: {key: kv for key, kv in pairs.items() if key not in keys}


def short_names(name: str) -> str:
    return name.replace("ssm_dt.bias", "ssm_dt")


def towers() -> Tensors:
    """Return tensors of a vision tower and of an MTP head under the names they get there."""
    rng = np.random.default_rng(0)
    names = ("v.blk.0.attn.qkv.weight", "v.merger.norm.bias", "mtp.fc.weight", "mtp.norm.weight")
    return {name: rng.standard_normal((4, 8)).astype(np.float32) for name in names}


DIFFERENCES = {
    "three sections": {"pairs": three_sections},
    "no sections": {"pairs": without(SECTIONS)},
    "no interval": {"pairs": without(INTERVAL, RECURRENT)},
    "heads of each layer": {"pairs": heads_of_each_layer},
    "ssm_dt": {"names": short_names},
    "towers": {"more": towers()},
    "all": {
        "pairs": lambda pairs: heads_of_each_layer(three_sections(without(RECURRENT)(pairs))),
        "names": short_names,
        "more": towers(),
    },
}


def other(path: Path, plain: Path, difference: str) -> Path:
    how = DIFFERENCES[difference]
    pairs = how.get("pairs", lambda pairs: pairs)(dict(GgufFile(plain).kv))
    return written(path, plain, pairs, how.get("more", {}), how.get("names", lambda name: name))


@pytest.fixture(scope="module")
def folder(plain, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("folder") / "plain"
    api.convert(plain, out, build_recipe(FOLDER))
    return out


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_folder_made_of_it_has_the_bytes_of_the_plain_file_s(difference, plain, folder, tmp_path):
    done = api.convert(
        other(tmp_path / "other.gguf", plain, difference), tmp_path / "out", build_recipe(FOLDER)
    )
    assert done.report.passed, done.report.failures
    assert weights(tmp_path / "out") == weights(folder)


def test_llama_cpp_loads_what_is_made_of_it_and_computes_the_same(plain, tmp_path):
    source = other(tmp_path / BLOB, plain, "all")
    with pytest.raises(ValueError, match="dimension_sections"), LlamaCpp(source, 32):
        pass
    done = api.convert(source, tmp_path / "again.gguf", build_recipe(FILE))
    assert done.report.passed, done.report.failures
    ids = list(range(5, 37))
    with LlamaCpp(plain, 32) as one, LlamaCpp(tmp_path / "again.gguf", 32) as two:
        assert np.array_equal(one.logits(ids), two.logits(ids))


def test_towers_that_are_not_read_are_named(plain, tmp_path):
    source = open_checkpoint(other(tmp_path / "other.gguf", plain, "towers"))
    assert not source.layout.problems
    assert [note.split(" (")[0] for note in source.notes] == [
        "2 tensors of a vision tower that is embedded in the file are not read",
        "2 tensors of an MTP head that is embedded in the file are not read",
    ]


@pytest.mark.parametrize(
    ("difference", "says"),
    [
        ("three sections", "has 3 sizes, expected 4: llama.cpp refuses the file"),
        ("no sections", "is missing, expected 4: llama.cpp refuses the file"),
        ("ssm_dt", "is blk.0.ssm_dt.bias for llama.cpp"),
        ("towers", "are not read (mtp.fc.weight ...)"),
    ],
)
def test_as_an_artifact_it_is_not_what_llama_cpp_loads(difference, says, plain, tmp_path):
    report = api.verify(other(tmp_path / "other.gguf", plain, difference), NANO)
    assert any(says in failure.problem for failure in report.failures), report.failures


def test_a_file_is_known_by_its_first_bytes_and_a_folder_is_none(plain, tmp_path):
    shutil.copy(plain, tmp_path / BLOB)
    assert container_for(tmp_path / BLOB).name == "gguf"
    (tmp_path / "v1.5.gguf").mkdir()
    assert container_for(tmp_path / "v1.5.gguf").name == "safetensors"
    assert container_for(tmp_path / "not-there.gguf").name == "gguf"
    assert inspect(tmp_path / BLOB).layout == "gguf"
    (tmp_path / "text").write_text("GGU")
    with pytest.raises(FormatError, match="text is not a folder"):
        inspect(tmp_path / "text")


def test_a_blob_is_no_output(plain, tmp_path):
    shutil.copy(plain, tmp_path / BLOB)
    before = (tmp_path / BLOB).read_bytes()
    with pytest.raises(OutputError, match=f"{BLOB} is a GGUF file, expected a name that ends in"):
        api.convert(NANO, tmp_path / BLOB, build_recipe(FILE))
    assert (tmp_path / BLOB).read_bytes() == before


@pytest.mark.parametrize("kind", ["norm", "conv1d"])
def test_what_is_stored_in_f16_is_read_as_it_is(kind, plain, tmp_path):
    tensors = {t.name: np.array(t.data) for t in read_gguf(plain).tensors}
    halves = {n: v.astype(np.float16) for n, v in tensors.items() if kind in n}
    assert halves
    source = written(tmp_path / "half.gguf", plain, dict(GgufFile(plain).kv), halves)
    done = api.convert(source, tmp_path / "again.gguf", build_recipe(FILE))
    assert done.report.passed, done.report.failures
    again = {t.name: np.array(t.data) for t in read_gguf(tmp_path / "again.gguf").tensors}
    for name, value in halves.items():
        assert np.array_equal(again[name], value.astype(np.float32)), name
        assert torch.isfinite(torch.from_numpy(again[name])).all()
