"""A special token that the embedding has no row for is refused before a byte is written."""

from __future__ import annotations

import json

import pytest

from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.planning.token_ids import check_ids
from qwen35_convert.recipe.recipe import read_recipe
from tests.variants import NANO, nano

ROWS = json.loads((NANO / "config.json").read_bytes())["text_config"]["vocab_size"]
GENERATION = "generation_config.json"
BEYOND = (
    ("config.json text_config.eos_token_id", {"text": {"eos_token_id": ROWS}}),
    ("config.json text_config.eos_token_id", {"text": {"eos_token_id": [1984, ROWS + 5]}}),
    ("config.json text_config.pad_token_id", {"text": {"pad_token_id": 248044}}),
    ("config.json bos_token_id", {"root": {"bos_token_id": ROWS}}),
    ("config.json image_token_id", {"root": {"image_token_id": 248056}}),
    ("config.json video_token_id", {"root": {"video_token_id": ROWS}}),
    (f"{GENERATION} eos_token_id", {"files": {GENERATION: {"eos_token_id": [248046, 1984]}}}),
)
WITHIN = (
    {"text": {"eos_token_id": ROWS - 1}},
    {"text": {"pad_token_id": -1}},
    {"root": {"vision_config": None, "image_token_id": 248056}},
    {"files": {GENERATION: {"eos_token_id": None}}},
    {"files": {GENERATION: '{"eos_token_id": 9999, "eos_token_id": 5}'}},
    {"without": (GENERATION,)},
)


@pytest.mark.parametrize(("subject", "changes"), BEYOND)
def test_an_id_without_a_row_is_refused(tmp_path, subject, changes):
    with pytest.raises(FormatError) as refusal:
        api.plan(nano(tmp_path / "in", **changes), read_recipe("fp8-block", ()), tmp_path / "out")
    assert str(refusal.value).startswith(f"{subject} is ")
    assert f"an id below {ROWS} (text_config.vocab_size)" in str(refusal.value)
    assert refusal.value.exit_code == 3


@pytest.mark.parametrize("changes", WITHIN)
def test_other_ids_are_not(tmp_path, changes):
    check_ids(open_checkpoint(nano(tmp_path / "in", **changes)))
