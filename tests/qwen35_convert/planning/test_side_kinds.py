"""A field of another kind than engines need is refused before a byte is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.planning.side_files import check_sides
from qwen35_convert.planning.side_kinds import check_config, check_kinds
from qwen35_convert.recipe.recipe import read_recipe
from tests.variants import NANO, nano

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
SETTINGS = "tokenizer_config.json"
TEXT = ("text_config",)
TOKEN = {"content": "<|im_end|>", "lstrip": False, "special": True}
SPOILT: tuple[tuple[str, str, Any], ...] = (
    (GENERATION, "eos_token_id", "1984"),
    (GENERATION, "eos_token_id", [[1984]]),
    (GENERATION, "eos_token_id", True),
    (GENERATION, "pad_token_id", 1.5),
    (GENERATION, "temperature", "0.6"),
    (GENERATION, "temperature", float("nan")),
    (GENERATION, "top_k", 1.5),
    (GENERATION, "do_sample", "yes"),
    (GENERATION, "stop_strings", 5),
    (IMAGES, "patch_size", 0),
    (IMAGES, "image_mean", [0.5]),
    (IMAGES, "image_std", [0.5, 0.5, 0]),
    (IMAGES, "image_std", [0.5, -0.5, 0.5]),
    (IMAGES, "size", "large"),
    (IMAGES, "size", 448),
    (IMAGES, "size", [448, 448]),
    (IMAGES, "size", {"longest_edge": "16777216", "shortest_edge": 65536}),
    (IMAGES, "size", {"longest_edge": 0, "shortest_edge": 65536}),
    (IMAGES, "max_pixels", "16777216"),
    ("video_preprocessor_config.json", "merge_size", "2"),
    (GENERATION, "temperature", -1),
    (GENERATION, "top_p", 5),
    (GENERATION, "top_k", -5),
    (GENERATION, "min_p", -0.1),
    (GENERATION, "repetition_penalty", 0),
    (PROCESSOR, "image_processor", "x"),
    (PROCESSOR, "video_processor", [1]),
    (GENERATION, "pad_token_id", [1984]),
    (IMAGES, "image_processor_type", 5),
    (SETTINGS, "added_tokens_decoder", None),
    (SETTINGS, "split_special_tokens", None),
    (SETTINGS, "split_special_tokens", 0),
    (SETTINGS, "add_prefix_space", "no"),
    (SETTINGS, "eos_token", 1986),
    (SETTINGS, "pad_token", {"lstrip": False}),
    ("special_tokens_map.json", "eos_token", ["<|im_end|>"]),
    (SETTINGS, "tokenizer_class", ["Qwen2Tokenizer"]),
    (SETTINGS, "model_max_length", "262144"),
    (SETTINGS, "added_tokens_decoder", []),
    (SETTINGS, "added_tokens_decoder", "x"),
    (SETTINGS, "added_tokens_decoder", {"1986": "<|im_end|>"}),
    (SETTINGS, "added_tokens_decoder", {"1986": TOKEN | {"lstrip": None}}),
    (SETTINGS, "added_tokens_decoder", {"1986": TOKEN | {"special": 1}}),
    (SETTINGS, "added_tokens_decoder", {"1986": {"special": True}}),
)
NESTED = [(field, value) for name, field, value in SPOILT if name == IMAGES]
FINE: tuple[tuple[str, str, Any], ...] = (
    (GENERATION, "eos_token_id", 1984),
    (GENERATION, "eos_token_id", None),
    (GENERATION, "temperature", 1),
    (GENERATION, "do_sample", None),
    (GENERATION, "stop_strings", ["a"]),
    (GENERATION, "a_field_of_tomorrow", "x"),
    (IMAGES, "size", {"longest_edge": 5}),
    (IMAGES, "size", {"longest_edge": 16777216, "shortest_edge": 65536, "height": None}),
    (IMAGES, "image_std", [1, 1, 1]),
    (IMAGES, "min_pixels", 3136),
    ("README.json", "eos_token_id", "x"),
    (GENERATION, "temperature", 0),
    (GENERATION, "top_k", -1),
    (GENERATION, "top_p", 1.0),
    (PROCESSOR, "image_processor", None),
    (PROCESSOR, "image_processor", {"image_std": [1, 1, 1], "size": {"longest_edge": 5}}),
    (SETTINGS, "added_tokens_decoder", {"1986": TOKEN}),
    (SETTINGS, "eos_token", TOKEN | {"__type": "AddedToken"}),
    (SETTINGS, "bos_token", None),
    (SETTINGS, "model_max_length", 1e30),
    (SETTINGS, "tokenizer_class", None),
    (SETTINGS, "added_tokens_decoder", {}),
)
CONFIG: tuple[tuple[str, str, Any], ...] = (
    ("text", "eos_token_id", "x"),
    ("text", "eos_token_id", [1, "x"]),
    ("text", "pad_token_id", {}),
    ("text", "dtype", "float99"),
    ("root", "torch_dtype", "foo"),
    ("text", "max_position_embeddings", 0),
    ("text", "max_position_embeddings", "4096"),
    ("text", "use_cache", "no"),
    ("text", "initializer_range", "x"),
    ("root", "image_token_id", -1),
    ("text", "mamba_ssm_dtype", "x"),
    ("text", "mamba_ssm_dtype", 1),
    ("text", "full_attention_interval", 0),
    ("text", "full_attention_interval", "4"),
)
# By the part that holds the field: what is no null, and what is of another kind.
IN_PARTS: tuple[tuple[tuple[str, ...], str, Any], ...] = (
    ((), "image_token_id", None),
    ((), "vision_end_token_id", None),
    (TEXT, "hidden_act", None),
    (TEXT, "rms_norm_eps", None),
    (TEXT, "linear_conv_kernel_dim", None),
    (TEXT, "max_position_embeddings", None),
    (TEXT, "attn_output_gate", None),
    (TEXT, "initializer_range", None),
    ((*TEXT, "rope_parameters"), "rope_type", None),
    ((*TEXT, "rope_parameters"), "mrope_interleaved", "yes"),
    (("vision_config",), "in_channels", None),
    (("vision_config",), "hidden_act", None),
    (("vision_config",), "hidden_act", 5),
    (("vision_config",), "deepstack_visual_indexes", "all"),
    (("vision_config",), "temporal_patch_size", None),
)
CONFIG_FINE: tuple[tuple[str, str, Any], ...] = (
    ("text", "eos_token_id", [1984, 1986]),
    ("root", "torch_dtype", "torch.bfloat16"),
    ("root", "dtype", {"text_config": "bfloat16", "vision_config": "float32"}),
    ("text", "attention_dropout", 0),
    ("text", "use_cache", 1),
    ("text", "full_attention_interval", None),
    ("text", "mamba_ssm_dtype", "bfloat16"),
)


@pytest.mark.parametrize(("name", "field", "value"), SPOILT)
def test_a_field_of_another_kind_is_refused(name, field, value):
    with pytest.raises(FormatError) as refusal:
        check_kinds(name, {field: value})
    assert str(refusal.value).startswith(f"{name} {field} is ")
    assert "\n  fix   " in str(refusal.value)


@pytest.mark.parametrize("part", ["image_processor", "video_processor"])
@pytest.mark.parametrize(("field", "value"), NESTED)
def test_so_is_a_nested_one(part, field, value):
    with pytest.raises(FormatError) as refusal:
        check_kinds(PROCESSOR, {part: {field: value}})
    assert str(refusal.value).startswith(f"{PROCESSOR} {part}.{field} is ")


@pytest.mark.parametrize(("name", "field", "value"), FINE)
def test_what_engines_read_is_not(name, field, value):
    check_kinds(name, {field: value})


@pytest.mark.parametrize(("part", "field", "value"), CONFIG)
def test_so_it_is_in_the_config(tmp_path, part, field, value):
    source = open_checkpoint(nano(tmp_path / "in", **{part: {field: value}}))
    with pytest.raises(FormatError, match=rf"^config\.json .*{field} is "):
        check_config(source)


@pytest.mark.parametrize(("part", "field", "value"), CONFIG_FINE)
def test_what_a_config_may_say_is_not(tmp_path, part, field, value):
    check_config(open_checkpoint(nano(tmp_path / "in", **{part: {field: value}})))


@pytest.mark.parametrize(("part", "field", "value"), IN_PARTS)
def test_a_field_of_a_part_is_refused_and_an_absent_one_is_not(tmp_path, part, field, value):
    config = json.loads((NANO / "config.json").read_bytes())
    inner = reduce(getitem, part, config)
    inner[field] = value
    where = re.escape(".".join((*part, field)))
    with pytest.raises(FormatError, match=rf"^config\.json {where} is "):
        check_config(open_checkpoint(nano(tmp_path / "null", files={"config.json": config})))
    del inner[field]
    check_config(open_checkpoint(nano(tmp_path / "absent", files={"config.json": config})))


def _first(vocab: dict[str, Any], number: Any) -> None:
    vocab[next(iter(vocab))] = number


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


TOKENIZERS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "no-model": ("Model missing", lambda t: t.pop("model")),
    "no-vocab": ("vocab/merges", lambda t: t["model"].pop("vocab")),
    "no-merges": ("vocab/merges", lambda t: t["model"].pop("merges")),
    "vocab-of-pairs": ("expected a map", lambda t: t["model"].update(vocab=[])),
    "id-of-text": ('string "5"', lambda t: _first(t["model"]["vocab"], "5")),
    "id-below-0": ("integer `-1`", lambda t: _first(t["model"]["vocab"], -1)),
    "merge-of-three": ("MergeType", lambda t: t["model"]["merges"].insert(3, ["a", "b", "c"])),
    "merge-of-nothing": ("`qqq`", lambda t: t["model"]["merges"].insert(3, ["qqq", "z"])),
    "added-without-id": ("`id`", lambda t: t["added_tokens"][0].pop("id")),
    "pre-tokenizer-of-tomorrow": ("PreTok", lambda t: t.update(pre_tokenizer={"type": "New"})),
    "normalizer-of-tomorrow": ("Normalizer", lambda t: t.update(normalizer={"type": "New"})),
    "decoder-of-tomorrow": ("Decoder", lambda t: t.update(decoder={"type": "New"})),
    "post-processor-of-tomorrow": ("PostPro", lambda t: t.update(post_processor={"type": "New"})),
    "regex-half-open": ("parenthesis", lambda t: t.update(pre_tokenizer=_split("(("))),
    "regex-of-an-empty-range": ("char class", lambda t: t.update(pre_tokenizer=_split("[z-a]"))),
    "version-of-tomorrow": ("version", lambda t: t.update(version="2.0")),
    "truncation-without-length": ("max_length", lambda t: t.update(truncation={"x": 1})),
}


def _beside(folder: Path, tokenizer: dict[str, Any]) -> Checkpoint:
    return open_checkpoint(nano(folder, files={TOKENIZER: tokenizer}))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_loaded_is_refused(tmp_path, name):
    wanted, change = TOKENIZERS[name]
    tokenizer = json.loads((NANO / TOKENIZER).read_bytes())
    check_sides(_beside(tmp_path / "right", tokenizer))
    change(tokenizer)
    with pytest.raises(FormatError, match=rf"(?s)^tokenizer\.json is not a .*{wanted}.*\n  fix "):
        check_sides(_beside(tmp_path / "wrong", tokenizer))


def test_a_tokenizer_of_another_model_is_nobodys_mistake(tmp_path):
    unigram = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}
    check_sides(_beside(tmp_path / "unigram", {"model": unigram}))
    words = {"vocab": {"a": 0, "##b": 1, "ab": 2}, "continuing_subword_prefix": "##"}
    merges = ["#version: 0.2", "a ##b"]
    check_sides(_beside(tmp_path / "words", {"model": words | {"type": "BPE", "merges": merges}}))


def test_a_folder_is_refused_before_a_byte_is_written(tmp_path):
    source = nano(tmp_path / "in", files={GENERATION: {"eos_token_id": "1984"}})
    with pytest.raises(FormatError, match="the id of a token") as refusal:
        api.convert(source, tmp_path / "out", read_recipe("fp8-block", ()))
    assert refusal.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
