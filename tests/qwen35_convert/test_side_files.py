"""Side files are part of the artifact: read as what they are, carried in their folders, proven."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from formats.errors import FormatError
from formats.gguf.file import GgufFile
from qwen35_convert import api
from qwen35_convert.artifact import Conversion
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.planning.side_files import token_notes
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.text.tokens import chat_prompt
from tests.variants import NANO, TOOL, beside, nano, write

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{3:064x}\nsize 258549\n"
TOOLS = "additional_chat_templates/tool_use.jinja"
LISTED = [{"name": "default", "template": TOOL}, {"name": "tool_use", "template": "{{ tools }}"}]
FOLDER, GGUF = ("out", "bf16-split"), ("out.gguf", "gguf-q8_0")
BOTH = pytest.mark.parametrize("form", [FOLDER, GGUF], ids=["folder", "gguf"])


def convert(source: Path, form: tuple[str, str] = FOLDER, *changes: str) -> Conversion:
    out = source.with_name(form[0])
    return api.convert(source, out, read_recipe(form[1], list(changes)))


BROKEN: dict[str, dict[str, str | bytes]] = {
    "pointer-tokenizer": {"tokenizer.json": POINTER},
    "pointer-config": {"tokenizer_config.json": POINTER},
    "pointer-merges": {"merges.txt": POINTER},
    "pointer-template": {"chat_template.jinja": POINTER},
    "pointer-card": {"README.md": POINTER},
    "pointer-licence": {"LICENSE": POINTER},
    "pointer-nested": {TOOLS: POINTER},
    "half-a-tokenizer": {"tokenizer.json": '{"model": {"type": "BPE", "vocab": {'},
    "empty": {"generation_config.json": ""},
    "a-list": {"preprocessor_config.json": "[]"},
    "modules-object": {"modules.json": "{}"},
    "page-json": {"vocab.json": "<!DOCTYPE html><html><body>404</body></html>"},
    "page-jinja": {"chat_template.jinja": "\n<html><body>Entry not found</body></html>"},
    "answer": {"chat_template.jinja": "Entry not found"},
    "answer-json": {"tokenizer_config.json": '{"error":"Repository not found"}'},
    "zeros": {"vocab.json": b"\0" * 4096},
    "utf-16": {"special_tokens_map.json": '{"a": 1}'.encode("utf-16")},
    "merges-latin-1": {"merges.txt": "\u00e9".encode("latin-1")},
    "not-jinja": {"chat_template.jinja": "{% for m in messages %}{{ m.content }}"},
    "not-jinja-nested": {TOOLS: "{% if tools %}"},
    "no-such-filter": {"chat_template.jinja": "{{ messages | embolden }}"},
    "nested-json": {"1_Pooling/config.json": "{"},
}


@BOTH
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_what_its_name_says_is_refused_by_name(tmp_path, name, form):
    source = nano(tmp_path / "in", files=BROKEN[name])
    (file,) = BROKEN[name]
    with pytest.raises(FormatError) as refusal:
        convert(source, form)
    assert str(refusal.value).startswith(file)
    assert "\n  fix   " in str(refusal.value)
    assert refusal.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": '{"eos_token": "<|im_end|>", "eos_token": "<|im_end|>"}'},
        {"special_tokens_map.json": '{"a": NaN}'},
        {"README.md": "caf\u00e9".encode("latin-1")},
        {"LICENSE": b""},
        {"README.md": "<!DOCTYPE html><html>a card</html>"},
    ],
)
def test_what_engines_read_is_no_broken_file(tmp_path, files):
    assert convert(nano(tmp_path / "in", files=files)).report.passed


def test_a_broken_template_in_a_field_is_refused_where_it_counts(tmp_path):
    broken = beside(chat_template="{% for %}")
    with pytest.raises(
        FormatError, match=r"^tokenizer_config\.json is not a Jinja template: line 1"
    ):
        convert(nano(tmp_path / "in", files=broken, without=["chat_template.jinja"]))
    convert(nano(tmp_path / "other", files=broken))


RIGHT = {
    "generation-tag": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "loop-controls": "{% for m in messages %}{{ m.role }}{% if loop.first %}{% break %}{% endif %}"
    "{% endfor %}",
    "globals": "{{ strftime_now('%Y') }}{% if false %}{{ raise_exception('no') }}{% endif %}",
    "tojson": "{{ messages | tojson(indent=2) }}{% set ns = namespace(a=1) %}{{ ns.a }}",
    "empty": "",
}


@BOTH
@pytest.mark.parametrize("name", RIGHT)
def test_what_transformers_renders_is_no_broken_template(tmp_path, name, form):
    source = nano(tmp_path / "in", files={"chat_template.jinja": RIGHT[name]})
    assert convert(source, form).report.passed
    chat = [{"role": "user", "content": "<b> \u00e9"}]
    theirs = AutoTokenizer.from_pretrained(source).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert chat_prompt(open_checkpoint(source), "<b> \u00e9") == theirs


FORMS = {
    "folder": ({TOOLS: "{{ tools }}"}, ()),
    "list": (beside(chat_template=LISTED), ("chat_template.jinja",)),
}


@pytest.mark.parametrize("name", FORMS)
def test_named_templates_are_in_a_gguf_file_under_their_names(tmp_path, name):
    files, without = FORMS[name]
    source = nano(tmp_path / "in", files=files, without=without)
    assert convert(source, GGUF).report.passed
    kv = GgufFile(tmp_path / "out.gguf").kv
    assert kv["tokenizer.chat_template.tool_use"].value == "{{ tools }}"
    assert kv["tokenizer.chat_templates"].value == ["tool_use"]
    assert "im_start" in kv["tokenizer.chat_template"].value
    (tmp_path / "out.gguf.receipt.json").unlink()
    assert api.verify(tmp_path / "out.gguf", source).failures == []
    api.convert(tmp_path / "out.gguf", tmp_path / "again", read_recipe("bf16-split"))
    (tmp_path / "again" / "qwen35-receipt.json").unlink()
    assert api.verify(tmp_path / "again", tmp_path / "out.gguf").failures == []
    for folder in (source, tmp_path / "again"):
        templates = AutoTokenizer.from_pretrained(folder).chat_template
        assert set(templates) == {"default", "tool_use"}


def test_a_folder_keeps_the_folder_of_templates(tmp_path):
    source = nano(tmp_path / "in", files={TOOLS: TOOL})
    assert convert(source).report.passed
    out = tmp_path / "out"
    assert (out / TOOLS).read_text() == TOOL
    receipt = json.loads((out / "qwen35-receipt.json").read_text())
    assert TOOLS in receipt["source"]["files"]
    assert TOOLS in receipt["output"]["files"]
    assert api.verify(out, source).failures == []


@pytest.mark.parametrize("receipt", [True, False])
@pytest.mark.parametrize("change", ["{{ evil }}", None])
def test_verify_names_a_template_of_the_folder_that_is_another_or_gone(tmp_path, receipt, change):
    source = nano(tmp_path / "in", files={TOOLS: TOOL})
    convert(source)
    out = tmp_path / "out"
    (out / TOOLS).unlink()
    if change is not None:
        (out / TOOLS).write_text(change)
    if not receipt:
        (out / "qwen35-receipt.json").unlink()
    failures = [str(failure) for failure in api.verify(out, source).failures]
    assert any(TOOLS in failure for failure in failures), failures


def test_named_templates_may_move_as_transformers_moves_them(tmp_path):
    """It reads a list in tokenizer_config.json and saves files."""
    files = beside(chat_template=LISTED)
    source = nano(tmp_path / "in", files=files, without=["chat_template.jinja"])
    convert(source)
    out = tmp_path / "out"
    (out / "qwen35-receipt.json").unlink()
    saved = tmp_path / "saved"
    AutoTokenizer.from_pretrained(source).save_pretrained(saved)
    assert (saved / TOOLS).is_file()
    for name in ("tokenizer_config.json", "chat_template.jinja", TOOLS):
        write(out, {name: (saved / name).read_bytes()})
    assert api.verify(out, source).failures == []
    (source / "tokenizer_config.json").write_bytes((saved / "tokenizer_config.json").read_bytes())
    write(source, {n: (saved / n).read_bytes() for n in ("chat_template.jinja", TOOLS)})
    write(out, files)
    (out / "chat_template.jinja").unlink()
    (out / TOOLS).unlink()
    assert api.verify(out, source).failures == []


@BOTH
def test_of_two_templates_the_file_wins_and_a_note_says_so(tmp_path, form):
    source = nano(tmp_path / "in", files=beside(chat_template="{{ messages[0].content }}"))
    done = convert(source, form)
    assert any(note.startswith("tokenizer_config.json has another") for note in done.plan.notes)
    expected = (NANO / "chat_template.jinja").read_text()
    assert AutoTokenizer.from_pretrained(source).chat_template == expected
    assert chat_prompt(open_checkpoint(done.out), "x") == chat_prompt(open_checkpoint(NANO), "x")
    if form is GGUF:
        assert GgufFile(done.out).kv["tokenizer.chat_template"].value == expected


def test_a_link_in_a_nested_folder_must_not_lead_out(tmp_path):
    source = nano(tmp_path / "in")
    write(tmp_path, {"secret/id.jinja": "a secret"})
    (source / "additional_chat_templates").symlink_to(tmp_path / "secret")
    with pytest.raises(FormatError, match=r"is a link to .*secret"):
        convert(source)


IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


@pytest.mark.parametrize("receipt", [True, False])
def test_token_ids_beside_the_text_config_are_carried(tmp_path, receipt):
    """As transformers reads them: what stands beside the text config wins over what is inside."""
    root = {"eos_token_id": [1986, 1984], "pad_token_id": 1984, "bos_token_id": 1985}
    inside = {"eos_token_id": 1984, "bos_token_id": None}
    source = nano(tmp_path / "in", root=root, text=inside, without=["generation_config.json"])
    assert convert(source).report.passed
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in IDS} == root
    assert generation(out) == generation(source) == root
    if not receipt:
        (out / "qwen35-receipt.json").unlink()
    assert api.verify(out, source).failures == []


def generation(folder: Path) -> dict:
    from transformers import AutoConfig, GenerationConfig

    read = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    return {key: getattr(read, key) for key in IDS}


def test_token_ids_inside_the_text_config_stay(tmp_path):
    source = nano(tmp_path / "in", text={"eos_token_id": [1986, 1984]})
    convert(source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == [1986, 1984]


PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")
HUB = ("out", "fp8-block-hub")


def test_vision_without_a_preprocessor_gets_a_note(tmp_path):
    done = convert(nano(tmp_path / "in", without=PROCESSORS), HUB)
    assert any("no preprocessor_config.json or processor_config.json" in n for n in done.plan.notes)
    done = convert(nano(tmp_path / "text", without=PROCESSORS), ("text-out", "bf16-split"))
    assert not any("preprocessor" in note for note in done.plan.notes)


def test_the_file_of_transformers_5_is_a_preprocessor(tmp_path):
    image = json.loads((NANO / PROCESSORS[0]).read_text())
    files = {"processor_config.json": {"image_processor": image}}
    done = convert(nano(tmp_path / "in", without=PROCESSORS, files=files), HUB)
    assert not any("preprocessor" in note for note in done.plan.notes)
    assert (tmp_path / "out" / "processor_config.json").is_file()


@pytest.mark.parametrize("more", [0, 1, 3])
def test_tokens_without_a_row_in_the_embedding_are_a_note(tmp_path, more):
    """A fine-tune with tokens of its own, whose embedding was not resized."""
    raw = json.loads((NANO / "tokenizer.json").read_text())
    plain = raw["added_tokens"][0]
    ids = range(2045, 2048 + more)  # the embedding has 2048 rows
    raw["added_tokens"] += [plain | {"id": i, "content": f"<|mine_{i}|>"} for i in ids]
    source = nano(tmp_path / "in", files={"tokenizer.json": raw})
    notes = [note for note in api.plan(source, "fp8-block").notes if "no row" in note]
    assert len(notes) == bool(more)
    if more:
        last = f"'<|mine_{2047 + more}|>' with the id {2047 + more}"
        which = f"{last} has" if more == 1 else f"{more} tokens, up to {last}, have"
        assert f"{which} no row in the embedding of 2048 rows" in notes[0]


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"model": []},
        {"model": {"vocab": [["a", 0.5]]}, "added_tokens": {"a": 1}},
        {"added_tokens": [1, {}, {"id": "9999", "content": "a"}, {"id": None}]},
    ],
    ids=str,
)
def test_a_tokenizer_of_another_form_has_no_such_note(tmp_path, raw):
    source = nano(tmp_path / "in", files={"tokenizer.json": raw})
    assert list(token_notes(open_checkpoint(source))) == []


STRIPS = {"lstrip": "the white space before it", "rstrip": "after it", "single_word": "letters"}


@pytest.mark.parametrize("field", STRIPS)
def test_what_an_added_token_asks_of_its_neighbours_is_a_note(tmp_path, field):
    raw = json.loads((NANO / "tokenizer.json").read_text())
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    entry = plain | {"id": 1991, "content": "<mask_me>", "special": True, field: True}
    raw["added_tokens"].append(entry)
    source = nano(tmp_path / "in", files={"tokenizer.json": raw})
    done = convert(source, GGUF)
    assert done.report.passed
    assert any(f"'<mask_me>' has {field}" in n and STRIPS[field] in n for n in done.plan.notes)
    kv = GgufFile(done.out).kv
    assert kv["tokenizer.ggml.tokens"].value[1991] == "<mask_me>"
    assert kv["tokenizer.ggml.token_type"].value[1991] == 3
    (tmp_path / "out.gguf.receipt.json").unlink()
    assert api.verify(done.out, source).failures == []
