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


def test_a_right_folder_has_none(folder):
    assert failures(folder) == []
