"""Without a source, verification names the side files and fields that no engine loads."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.variants import NANO

TOKENIZER, IMAGES = "tokenizer.json", "preprocessor_config.json"
FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (TOKENIZER, {"pre_tokenizer": {"type": "New"}}),
    (TOKENIZER, {"decoder": {"type": "New"}}),
    (TOKENIZER, {"model": None}),
    (IMAGES, {"image_std": [0, 0, 0]}),
    (IMAGES, {"size": "large"}),
    ("generation_config.json", {"eos_token_id": 1 << 20}),
    ("config.json", {"image_token_id": 1 << 20}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("right") / "out"
    recipe = read_recipe("fp8-block", ["layout=hub", "vision=keep"])
    api.convert(NANO, out, recipe, options=api.RunOptions(verify=False))
    return out


def failures(folder, level="structure"):
    report = api.verify(folder, level=level)
    return [f"{failure.tensor} {failure.problem}" for failure in report.failures]


@pytest.mark.parametrize(("name", "changes"), FAULTS)
def test_it_is_named(tmp_path, folder, name, changes):
    out = shutil.copytree(folder, tmp_path / "out")
    fields = json.loads((out / name).read_bytes())
    (out / name).write_text(json.dumps(fields | changes))
    (only,) = failures(out)
    assert only.startswith(f"{name} {'is not a' if name == TOKENIZER else next(iter(changes))}")


def changed(folder, out, **fields):
    """Return a copy whose text config has other fields; those of rope_parameters go there."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_bytes())
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    for key, value in fields.items():
        (rope if key in rope else text)[key] = value
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"mrope_section": [11, 11, 11]},
            "mrope_section is [11, 11, 11], together 33, expected 32, half of what is rotated of a "
            "head",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "mrope_section is [11, 11, 10], together 32, expected 64, half of what is rotated of a "
            "head",
        ),
        (
            {"full_attention_interval": 2},
            "full_attention_interval is 2, expected 4: see layer_types",
        ),
        (
            {"full_attention_interval": "4"},
            "text_config.full_attention_interval is '4', expected a whole number from 1",
        ),
    ],
)
def test_fields_that_disagree_are_named(tmp_path, folder, fields, said):
    assert failures(changed(folder, tmp_path / "out", **fields)) == [f"config.json {said}"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mrope_section": None},
        {"mrope_section": [0, 0, 0]},
        {"full_attention_interval": None},
    ],
)
def test_fields_that_mean_nothing_are_not(tmp_path, folder, fields):
    assert failures(changed(folder, tmp_path / "out", **fields)) == []


def test_a_right_folder_has_none(folder):
    assert failures(folder) == []
