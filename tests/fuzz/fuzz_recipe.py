"""Fuzzing of recipes: `python -m tests.fuzz.fuzz_recipe --seconds 600`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.recipe import Recipe, build_recipe, read_recipe
from tests.fuzz.loop import main

FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "x.yaml"
MODULES = (
    "qwen35_convert.recipe.recipe",
    "qwen35_convert.recipe.files",
    "qwen35_convert.plain_yaml",
)
WORDS = (
    b"layout: ",
    b"text",
    b"hub",
    b"experts: ",
    b"quantize:",
    b"scheme: ",
    b"rules:",
    b"match: ",
    b"export:",
    b"max_shard_size: ",
    b"5GB",
    b"verify:",
    b"max_kl: ",
    b"bench:",
    b"batch: ",
    b"only: ",
    b"extends: ",
    b"fp8-block",
    b"x.yaml",
    b"!!",
    b"&a ",
    b"*a",
    b"<<: ",
    b"? ",
    b"- ",
    b"[",
    b"]",
    b"{",
    b"}",
    b"|\n",
    b">\n",
    b"'",
    b'"',
    b"---\n",
    b"%YAML 1.1\n",
    b".nan",
    b".inf",
    b"0x",
    b"0o7",
    b"1:30",
    b"2001-01-01",
    b"~",
    b"yes",
    b"\\ud800",
    b"\xe2\x80\xa8",
    b"\t",
    b": ",
    b"#",
)


def TestOneInput(data: bytes) -> None:
    """Read a recipe; what is accepted says the same when it is read again."""
    FILE.write_bytes(data)
    try:
        recipe = read_recipe(str(FILE))
    except RecipeError:
        return
    values = recipe.model_dump(mode="json")
    assert build_recipe(values) == recipe == Recipe.model_validate_json(recipe.model_dump_json())


if __name__ == "__main__":
    main("recipe", MODULES, TestOneInput, WORDS)
