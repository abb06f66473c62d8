"""A GGUF file without its receipt: what is seen with a source, and what without any."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from formats.gguf.file import build_header
from formats.gguf.header import Kv
from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.planted.edit import read_file

NANO = Path(__file__).parents[3] / "data" / "nano-dense"
TEXT, VISION = "m.gguf", "mmproj-m.gguf"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A BF16 file and its vision file, without their receipt."""
    folder = tmp_path_factory.mktemp("gguf")
    recipe = read_recipe("gguf-bf16", ("vision=keep",))
    api.convert(NANO, folder / TEXT, recipe, options=api.RunOptions(verify=False))
    (folder / f"{TEXT}.receipt.json").unlink()
    return folder


@pytest.fixture
def files(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "files"))


def said(folder: Path, source: Path | None = None, level: str = "tensors") -> list[str]:
    report = api.verify(folder / TEXT, source, level=level)
    return [f"{failure.tensor} {failure.problem}" for failure in report.failures]


def put(path: Path, *pairs: Kv) -> None:
    file = read_file(path)
    known = {pair.key: pair for pair in file.pairs} | {pair.key: pair for pair in pairs}
    file.pairs = list(known.values())
    path.write_bytes(file.content())


def test_as_they_were_made_nothing_is_wrong(files):
    assert said(files) == []
    assert said(files, NANO) == []


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (Kv("qwen35.logit_scale", "float32", 0.5), "is 0.5, expected absent"),
        (Kv("qwen35.attention.causal", "bool", value=False), "is false, expected absent"),
        (Kv("qwen35.context_length", "uint64", 4096), "is 4096 (uint64), expected uint32"),
        (Kv("qwen35.attention.head_count_kv", "array[uint32]", [0, 0, 0, 1, 1]), "expected 1"),
        (Kv("general.tensor_extra.name", "string", "x"), 'is "x", expected absent'),
    ],
    ids=lambda value: getattr(value, "key", ""),
)
def test_keys_that_no_model_of_the_family_has_are_seen_without_a_source(files, pair, expected):
    put(files / TEXT, pair)
    found = said(files, level="structure")
    assert len(found) == 1
    assert found[0].startswith(f"{TEXT} {pair.key} ")
    assert found[0].endswith(expected)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (Kv("clip.vision.projection_dim", "uint32", 64), "is 64, expected 128"),
        (Kv("clip.vision.attention.head_count", "uint32", 3), "expected a multiple of"),
        (Kv("clip.use_gelu", "bool", value=False), "is false, expected true"),
        (Kv("clip.vision.image_std", "array[float32]", [0.5, 0.0, 0.5]), "other than 0"),
        (Kv("clip.vision.block_count", "uint32", 2), "v.blk.1.ln1.weight is missing"),
        (Kv("general.file_type", "uint32", 15), "expected that of BF16"),
    ],
    ids=lambda value: getattr(value, "key", ""),
)
def test_a_vision_file_is_held_against_itself(files, pair, expected):
    put(files / VISION, pair)
    assert any(expected in line for line in said(files, level="structure"))


def test_values_of_a_vision_file_that_are_not_finite_are_seen_without_a_source(files):
    file = read_file(files / VISION)
    file.entries["v.blk.0.attn_qkv.weight"].view()[3, 5] = float("nan")
    file.entries["v.post_ln.bias"].view()[:] = float("inf")
    file.path.write_bytes(file.content())
    assert set(said(files)) == {
        "v.blk.0.attn_qkv.weight has 1 values that are not finite",
        "v.post_ln.bias has 64 values that are not finite",
    }
    assert said(files, level="structure") == []


def test_a_vision_file_that_is_cut_is_named(files):
    path = files / VISION
    path.write_bytes(path.read_bytes()[:-200])
    assert said(files, level="structure")[0].startswith(VISION)


def test_sizes_are_named_by_keys(files):
    put(files / TEXT, Kv("qwen35.attention.head_count", "uint32", 4))
    found = "\n".join(said(files, NANO))
    assert "the artifact has qwen35.attention.head_count 4 (source: 2)" in found
    assert "from  metadata: qwen35.attention.head_count 4" in found
    assert "config.json" not in found


def test_the_name_is_the_receipt_s_whatever_the_source_is_called_by_then(tmp_path):
    source = Path(shutil.copytree(NANO, tmp_path / "first-name"))
    out = tmp_path / TEXT
    api.convert(source, out, read_recipe("gguf-bf16"), options=api.RunOptions(verify=False))
    moved = source.rename(tmp_path / "second-name")
    assert api.verify(out, moved, level="structure").passed
    put(out, Kv("general.name", "string", "Another Name"))
    report = api.verify(out, moved, level="structure")
    expected = 'general.name is "Another Name", expected "First Name"'
    assert [failure.problem for failure in report.failures] == [expected]


def test_a_key_of_another_kind_is_no_header_of_ours(tmp_path):
    out = tmp_path / TEXT
    api.convert(NANO, out, read_recipe("gguf-bf16"), options=api.RunOptions(verify=False))
    put(out, Kv("qwen35.block_count", "uint64", 5))
    report = api.verify(out, NANO, level="structure")
    expected = 'qwen35.block_count is "uint64", expected "uint32"'
    assert expected in [failure.problem for failure in report.failures]
    file = read_file(out)
    pairs = [replace(p, kind="uint32") if p.key.endswith("block_count") else p for p in file.pairs]
    header, _ = build_header(pairs[::-1], [entry.info for entry in file.entries.values()])
    out.write_bytes(header + file.content()[-sum(map(padded, file.entries.values())) :])
    report = api.verify(out, NANO, level="structure")
    assert ["another order" in failure.problem for failure in report.failures] == [True]


def padded(entry) -> int:
    return -(-len(entry.data) // 32) * 32
