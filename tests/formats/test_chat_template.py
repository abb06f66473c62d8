"""Which chat template counts, where several files hold one: the choice of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from formats.chat_template import read_templates
from formats.errors import FormatError
from tests.variants import NANO, nano

LISTED = [
    {"name": "default", "template": "in the list"},
    {"name": "rag", "template": "of the list"},
]
JINJA, TOOLS = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
CONFIG, LEGACY = "tokenizer_config.json", "chat_template.json"


def sides(**files: object) -> dict[str, bytes]:
    names = {"jinja": JINJA, "tools": TOOLS, "config": CONFIG, "legacy": LEGACY}
    content = {key: {"chat_template": value} for key, value in files.items()}
    return {
        names[key]: value.encode()
        if key in ("jinja", "tools")
        else json.dumps(content[key]).encode()
        for key, value in files.items()
    }


CASES = {
    "file": ({"jinja": "J"}, {"default": "J"}),
    "file-and-tools": ({"jinja": "J", "tools": "T"}, {"default": "J", "tool_use": "T"}),
    "tools-alone": ({"tools": "T"}, {"tool_use": "T"}),
    "config": ({"config": "C"}, {"default": "C"}),
    "list": ({"config": LISTED}, {"default": "in the list", "rag": "of the list"}),
    "file-beside-a-text": ({"jinja": "J", "config": "C"}, {"default": "J"}),
    "file-beside-a-list": ({"jinja": "J", "config": LISTED}, {"default": "J"}),
    "tools-beside-a-text": ({"tools": "T", "config": "C"}, {"tool_use": "T"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_templates_are_those_of_transformers(tmp_path, case):
    files, expected = CASES[case]
    named = {k: v.decode() for k, v in sides(**files).items()}
    if CONFIG in named:
        config = json.loads((NANO / CONFIG).read_text()) | json.loads(named[CONFIG])
        named[CONFIG] = json.dumps(config)
    folder = nano(tmp_path / "in", without=[JINJA], files=named)
    found = AutoTokenizer.from_pretrained(folder).chat_template
    theirs = {"default": found} if isinstance(found, str) else found
    read = read_templates({n: (folder / n).read_bytes() for n in (*named, CONFIG)})
    assert read.texts == expected == theirs


def test_where_each_is_written_is_told():
    read = read_templates(sides(jinja="J", tools="T"))
    assert read.where == {"default": JINJA, "tool_use": TOOLS}
    assert read_templates(sides(config=LISTED)).where["rag"] == CONFIG


def test_the_oldest_file_counts_where_no_other_has_one():
    assert read_templates(sides(legacy="L")).default == "L"
    assert read_templates(sides(legacy="L", config=None)).default == "L"
    assert read_templates(sides(legacy="L", config="C")).default == "C"
    assert read_templates({}).default is None


@pytest.mark.parametrize(
    ("files", "noted"),
    [
        ({"jinja": "J", "config": "J", "legacy": "J"}, []),
        ({"jinja": "J", "config": "C"}, [CONFIG]),
        ({"jinja": "J", "config": LISTED, "legacy": "L"}, [CONFIG, LEGACY]),
        ({"config": "C", "legacy": "L"}, [LEGACY]),
        ({"jinja": "J"}, []),
    ],
)
def test_a_note_names_each_file_that_says_otherwise(files, noted):
    notes = read_templates(sides(**files)).notes
    assert [note.split(" ", 1)[0] for note in notes] == noted
    assert all("is used, as transformers does" in note for note in notes)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "chat_template is int, expected text or a list"),
        (["x"], "chat_template holds 'x', expected a name and a template"),
        ([{"name": "a", "template": None}], "expected a name and a template"),
        ([LISTED[0]] * 2, "has two templates named 'default'"),
        ({"default": 1}, "expected a name and a template"),
    ],
)
def test_a_field_that_is_no_template_is_refused(value, reason):
    with pytest.raises(FormatError, match=rf"tokenizer_config\.json: .*{reason}"):
        read_templates(sides(config=value))


def test_templates_may_be_an_object():
    assert read_templates(sides(config={"default": "D", "rag": "R"})).texts["rag"] == "R"


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(FormatError, match=r"additional_chat_templates/x\.jinja is not UTF-8"):
        read_templates({"additional_chat_templates/x.jinja": b"\xff"})


def test_the_bundled_model_has_one():
    folder = Path(NANO)
    read = read_templates({JINJA: (folder / JINJA).read_bytes()})
    assert read.default == (folder / JINJA).read_text()
