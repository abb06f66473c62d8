"""`--metadata FILE` and `--chat-template FILE`: what is said instead, proven like all else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import qwen35_convert as q
from formats.chat_template import read_templates
from qwen35_convert.cli import app
from qwen35_convert.containers.registry import open_checkpoint
from tests.gguf_reader import read_gguf
from tests.qwen35_convert.card.test_card import card_of
from tests.qwen35_convert.card.test_front_matter import CARD
from tests.variants import beside
from tests.variants import nano as nano_with

TEMPLATE = "{%- for m in messages %}[{{ m.role }}] {{ m.content }}\n{%- endfor %}\n"
SAID = {"general.license": "mit", "general.license.name": "mine", "general.tags": ["tuned"],
        "general.name": "Boreas"}  # fmt: skip


def convert(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model whose template stands in two files."""
    files = {"README.md": CARD} | beside(chat_template="{{ messages }}")
    return nano_with(tmp_path / "in", files=files)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SAID))
    return path


@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_a_template_takes_the_place_of_all_others(source, template, tmp_path, name):
    out = tmp_path / name
    done = convert(source, "-o", out, "--chat-template", template)
    assert done.exit_code == 0, done.output
    template.unlink()  # the receipt holds its text
    assert q.verify(out, source).passed
    found = read_templates(open_checkpoint(out).sides)
    assert (found.default or "").rstrip("\n") == TEMPLATE.rstrip("\n")
    if name == "out":
        assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())


def test_another_template_in_the_artifact_is_named(source, template, tmp_path):
    out = tmp_path / "out"
    assert convert(source, "-o", out, "--chat-template", template).exit_code == 0
    (out / "chat_template.jinja").write_bytes((source / "chat_template.jinja").read_bytes())
    report = q.verify(out, source)
    assert "chat_template.jinja" in {failure.tensor for failure in report.failures}


def test_metadata_is_said_instead_of_the_card_s(source, metadata, tmp_path):
    out = tmp_path / "out.gguf"
    assert convert(source, "-o", out, "--metadata", metadata).exit_code == 0
    fields = read_gguf(out).fields
    assert fields["general.license"].contents() == "mit"
    assert fields["general.license.name"].contents() == "mine"
    assert fields["general.tags"].contents() == ["tuned"]
    assert fields["general.name"].contents() == "Boreas"
    assert fields["general.languages"].contents() == ["en", "no", "zh"]  # of the card
    assert q.verify(out, source).passed


def test_a_folder_s_card_says_it_too(source, metadata, tmp_path):
    assert convert(source, "-o", tmp_path / "out", "--metadata", metadata).exit_code == 0
    front, body = card_of(tmp_path / "out")
    assert front["license"] == "mit"
    assert front["tags"] == ["tuned", "qwen35"]
    assert front["language"] == ["en", "no", "zh"]
    assert "# Boreas, fp8-block" in body


@pytest.mark.parametrize(
    ("flag", "content", "said"),
    [
        ("--metadata", '{"general.licence": "mit"}', "licence"),
        ("--metadata", '{"general.tags": "one"}', "tags"),
        ("--metadata", "[1]", "expected an object"),
        ("--chat-template", "x" * 70_000, "at most 65536"),
        ("--chat-template", "{% for m in %}", "chat_template.jinja"),
        ("--chat-template", None, "cannot be read"),
    ],
)
def test_what_cannot_be_said_is_refused(source, tmp_path, flag, content, said):
    path = tmp_path / "given"
    if content is not None:
        path.write_text(content)
    done = convert(source, "-o", tmp_path / "out", flag, path)
    assert isinstance(done.exception, q.Qwen35Error)
    assert said in str(done.exception)
    assert not (tmp_path / "out").exists()
