"""sentence-transformers' files: modules, pooling, prompts; and llama.cpp's number of a pooling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from formats.embedder import check_modules, embedder_files, modules, pooling, pooling_modes, prompts
from formats.errors import FormatError
from formats.gguf.header import Kv
from formats.gguf.pooling import pooling_files, pooling_notes, pooling_type
from tests.variants import LAST, MODULES, PROMPTS

KIND = "sentence_transformers.models."


def sides(config: Any = LAST, listed: Any = MODULES, more: Any = PROMPTS) -> dict[str, bytes]:
    files = {
        "modules.json": listed,
        "1_Pooling/config.json": config,
        "config_sentence_transformers.json": more,
    }
    return {name: json.dumps(value).encode() for name, value in files.items() if value is not None}


def test_modules_are_read_in_their_order():
    assert [m.kind for m in modules(sides())] == ["Transformer", "Pooling", "Normalize"]
    check_modules(sides())
    assert modules({}) == []
    check_modules({})


@pytest.mark.parametrize("kind", ["Dense", "LayerNorm", "LSTM", "CNN", "Router"])
def test_a_module_with_weights_of_its_own_is_refused(kind):
    listed = [*MODULES, {"idx": 3, "name": "3", "path": f"3_{kind}", "type": KIND + kind}]
    with pytest.raises(FormatError, match=f"3_{kind} is a {kind}, which has weights of its own"):
        check_modules(sides(listed=listed))


def test_a_pooling_without_its_config_is_refused():
    with pytest.raises(FormatError, match=r"names '1_Pooling', which has no config\.json here"):
        check_modules(sides(config=None))


@pytest.mark.parametrize("entry", ["x", {}, {"type": 1}, {"type": "a.Pooling", "path": 4}])
def test_an_entry_that_is_no_module_is_refused(entry):
    with pytest.raises(FormatError, match=r"modules\.json holds .*expected a module's type"):
        check_modules(sides(listed=[entry]))


@pytest.mark.parametrize(
    ("config", "number"),
    [
        (LAST, 3),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, 1),
        ({"pooling_mode_cls_token": True}, 2),
        ({"pooling_mode": "lasttoken"}, 3),
        ({"pooling_mode": ["mean"]}, 1),
    ],
)
def test_a_pooling_has_llama_cpps_number(config, number):
    assert pooling_type(sides(config)) == number
    assert pooling_type({}) is None
    assert pooling_type(sides(listed=MODULES[:1])) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls and mean"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode": "max"}, "max"),
        ({}, "no mode"),
    ],
)
def test_a_pooling_that_llama_cpp_has_not_is_refused(config, said):
    with pytest.raises(FormatError, match=f"asks for {said}, expected one of mean, cls, lasttoken"):
        pooling_type(sides(config))


def test_prompts_that_say_something_are_found():
    assert prompts(sides()) == {"query": "Find: "}
    assert prompts({}) == {}
    assert prompts(sides(more={"prompts": None})) == {}


def test_notes_say_what_a_gguf_file_has_no_place_for():
    (said,) = pooling_notes(sides())
    assert "query 'Find: '" in said
    (said,) = pooling_notes(sides(LAST | {"include_prompt": False}, more={}))
    assert "include_prompt" in said


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_the_files_made_of_a_mode_say_that_mode(mode):
    made = embedder_files(mode, 128)
    check_modules(made)
    assert pooling_modes(pooling(made) or {}) == [mode]
    number = pooling_type(made)
    kv = {
        "general.architecture": Kv("general.architecture", "string", "qwen35"),
        "qwen35.pooling_type": Kv("qwen35.pooling_type", "uint32", number),
        "qwen35.embedding_length": Kv("qwen35.embedding_length", "uint32", 128),
    }
    assert pooling_files(kv) == made
    del kv["qwen35.pooling_type"]
    assert pooling_files(kv) == {}
