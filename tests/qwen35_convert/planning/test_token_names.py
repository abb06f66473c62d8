"""A source whose files name tokens that tokenizer.json does not have converts, with a note."""

from __future__ import annotations

import json

from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.planning.token_names import disagreements, merge_lines, merge_pairs
from tests.variants import NANO, nano

SETTINGS = json.loads((NANO / "tokenizer_config.json").read_bytes())
UNKNOWN = {"tokenizer_config.json": SETTINGS | {"eos_token": "<|im_stop|>"}}
SAID = "tokenizer_config.json: eos_token is '<|im_stop|>', which tokenizer.json does not have"


def test_a_plan_says_it(tmp_path):
    source = nano(tmp_path / "in", files=UNKNOWN)
    assert any(note.startswith(SAID) for note in api.plan(source, "bf16-split").notes)
    assert not any("tokenizer.json" in note for note in api.plan(NANO, "bf16-split").notes)


def test_so_does_that_of_a_gguf_file(tmp_path):
    source = nano(tmp_path / "in", files={"vocab.json": {"a": 5}})
    notes = api.plan(source, "gguf-q8_0", tmp_path / "m.gguf").notes
    assert any(note.startswith("vocab.json: lacks ") for note in notes)


def test_a_tokenizer_alone_and_a_file_of_one_disagree_with_nothing(tmp_path):
    bare = nano(tmp_path / "in", without=("tokenizer_config.json", "vocab.json", "merges.txt"))
    assert list(disagreements(open_checkpoint(bare))) == []
    none = nano(tmp_path / "none", files=UNKNOWN, without=("tokenizer.json",))
    assert list(disagreements(open_checkpoint(none))) == []
    made = api.convert(NANO, tmp_path / "m.gguf", "gguf-q8_0", api.RunOptions(verify=False))
    assert list(disagreements(open_checkpoint(made.out))) == []


def test_merges_are_read_in_every_spelling():
    pairs = [["a", "b"], ["ab", "c"]]
    assert merge_pairs(["a b", "ab c"]) == merge_pairs(pairs) == pairs
    for text in (b"#version: 0.2\na b\nab c\n", b"a b\r\nab c", b"a b\n\nab c\n"):
        assert merge_lines(text) == pairs
