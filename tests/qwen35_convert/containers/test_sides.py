"""What lies beside the tensors of a folder: what engines obey is the source's, the rest is free."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.containers.safetensors.sides.differences import JUDGES, side_differences
from qwen35_convert.containers.safetensors.sides.engine_files import OTHERS, engine_files
from tests.planted.artifact import Artifact, find_base
from tests.planted.right_sides import FILES
from tests.planted.side_field_faults import JSON

NANO = Path(__file__).parents[2] / "data" / "nano-dense"
ODD = (3, True, "x", [[1]], {"a": 1}, {"type": "Sequence", "processors": [3]}, [{"name": ["x"]}])
# Not of the bundled model, which has images; or slow: `make test-all` tries them.
ELSEWHERE = ("no preprocessors of text", "saved by transformers", "weights alone")
BESIDE = {
    "added_tokens.json": {"<|im_end|>": 1986},
    "chat_template.json": {"chat_template": "x"},
    "processor_config.json": {"image_processor": {"size": {}}, "chat_template": "x"},
    "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["x"]},
}


@pytest.fixture
def folder(tmp_path):
    """The bundled model: its files are links until they are written anew."""
    return shutil.copytree(NANO, tmp_path / "out", copy_function=os.link)


def write(folder, name, content):
    path = folder / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def edit(folder, name, change):
    value = json.loads((folder / name).read_bytes())
    change(value)
    write(folder, name, value)


def said(folder, source=NANO):
    return said_of(open_checkpoint(folder), open_checkpoint(source))


def said_of(artifact, source):
    found = side_differences(artifact, source)
    return [f"{failure.tensor} {failure.problem}" for failure in found]


@pytest.mark.parametrize("name", JSON)
def test_a_field_that_is_obeyed_is_named(name, folder):
    file, change = JSON[name]
    edit(folder, file, change)
    assert [line.split(" ")[0] for line in said(folder)][:1] == [file]


@pytest.mark.parametrize("name", sorted({*FILES} - {*ELSEWHERE}))
def test_the_same_in_other_words_passes(name, folder):
    change = FILES[name][1]
    change(Artifact(find_base("nano-fp8-block-hub"), folder, folder, NANO, None))
    assert said(folder) == []


@pytest.mark.parametrize("pattern", OTHERS)
def test_a_file_that_engines_obey_is_named_unless_the_source_has_it(pattern, folder, tmp_path):
    name = pattern.replace("*", "a")
    write(folder, name, "x")
    assert said(folder) == [f"{name} is not in the source, and {OTHERS[pattern]}"]
    source = shutil.copytree(folder, tmp_path / "source")
    assert said(folder, source) == []
    write(folder, name, "y")
    assert said(folder, source) == [f"{name} is not the source's, and {OTHERS[pattern]}"]


def test_what_no_engine_reads_is_its_owner_s(folder):
    names = (
        "README.md",
        "LICENSE",
        ".gitattributes",
        "notes.txt",
        "a.png",
        "results.json",
        "a.log",
    )
    for name in names:
        write(folder, name, "x")
    assert said(folder) == []
    assert not set(engine_files(folder, OTHERS)) & {*names}


def test_weights_alone_pass_and_part_of_a_tokenizer_does_not(folder):
    for name in JUDGES:
        (folder / name).unlink(missing_ok=True)
    assert said(folder) == []
    shutil.copy(NANO / "tokenizer_config.json", folder)
    missing = ("tokenizer.json", "generation_config.json", "chat_template.jinja")
    images = ("preprocessor_config.json", "video_preprocessor_config.json")
    expected = [f"{name} is missing: the source has it" for name in (*missing, *images)]
    assert said(folder) == expected
    named = [line.split(" ")[0] for line in said(NANO, folder)]
    assert named[0] == "chat_template.jinja"
    assert set(named[1:]) == {"generation_config.json"}


@pytest.mark.parametrize("name", [*BESIDE, "tokenizer_config.json", "generation_config.json"])
def test_odd_values_are_differences_not_crashes(name, folder):
    for other, value in BESIDE.items():
        write(folder, other, value)
    whole = json.loads((folder / name).read_bytes())
    artifact, source = open_checkpoint(folder), open_checkpoint(NANO)
    for key in (*whole, "new"):
        for odd in ODD:
            write(folder, name, whole | {key: odd})
            said_of(artifact, source)
            said_of(source, artifact)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"a": 1, "a": 2}', "version https://git-lfs", "null"]
)
def test_what_holds_no_object_is_named(content, folder):
    for name in JUDGES:
        if name.endswith(".json"):
            write(folder, name, content)
    named = {line.split(" ")[0] for line in said(folder)}
    assert named >= {name for name in JUDGES if name.endswith(".json")}
