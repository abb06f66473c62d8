"""The front matter of a README.md: what is read of it, in a GGUF file beside gguf-py's reading."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from gguf.metadata import Metadata

import qwen35_convert as q
from qwen35_convert.card.front_matter import read_front_matter, words
from tests.gguf_reader import read_gguf
from tests.variants import nano as nano_with

CARD = """---
license: other
license_name: borealis
license_link: https://example.org/LICENSE
language:
- en
- no
- zh
base_model:
- acme/Borealis-4B-Base
pipeline_tag: image-text-to-text
tags: [chat, "qwen3.5"]
---

# Borealis
"""


def read(text: str) -> dict:
    return read_front_matter({"README.md": text.encode()})


def test_fields_are_texts_or_lists_of_them():
    card = read(CARD)
    assert words(card, "tags", "pipeline_tag") == ["chat", "qwen3.5", "image-text-to-text"]
    assert words(card, "language") == ["en", "no", "zh"]
    assert words(card, "base_model") == ["acme/Borealis-4B-Base"]
    assert words({"tags": ["a", 3, None, "a", "b\nc"]}, "tags") == ["a"]


UNREADABLE = {
    "nothing": "",
    "no-block": "# Borealis",
    "no-end": "---\nlicense: mit\n",
    "no-yaml": "---\n[\n---\n",
    "a-list": "---\n- a\n---\n",
    "no-text": "--- \xff",
    "aliases": "---\na: &x 1\nb: *x\n---\n",
    "deep": "---\n" + "[" * 900 + "\n---\n",
    "long": "---\n" + "a: 1\n" * 20000 + "---",
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_says_nothing(case):
    assert read(UNREADABLE[case]) == {}


def text_of(reader: GGUFReader, key: str) -> list[str] | str | None:
    field = reader.fields.get(f"general.{key}")
    return None if field is None else field.contents()


def test_a_gguf_file_says_what_gguf_py_reads_of_the_card(tmp_path):
    source = nano_with(tmp_path / "in", files={"README.md": CARD})
    done = q.convert(source, tmp_path / "out.gguf", "gguf-q8_0")
    assert done.report is not None
    assert done.report.passed, done.report.failures
    theirs = Metadata.load(model_path=Path(source))
    ours = read_gguf(tmp_path / "out.gguf")
    assert text_of(ours, "license") == theirs.license == "other"
    assert text_of(ours, "license.name") == theirs.license_name
    assert text_of(ours, "license.link") == theirs.license_link
    assert text_of(ours, "tags") == theirs.tags
    assert text_of(ours, "languages") == theirs.languages
    assert text_of(ours, "base_model.count") == 1
    assert theirs.base_models is not None
    for key in ("name", "organization", "repo_url"):
        assert text_of(ours, f"base_model.0.{key}") == theirs.base_models[0][key]
    assert q.verify(tmp_path / "out.gguf", source).passed


def test_without_a_card_no_licence_is_made_up(nano, tmp_path):
    q.convert(nano, tmp_path / "out.gguf", "gguf-q8_0")
    reader = read_gguf(tmp_path / "out.gguf")
    assert not any(key.startswith(("general.license", "general.tags")) for key in reader.fields)
