"""The published JSON Schema takes what the reader takes, and refuses what it can tell is wrong."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from qwen35_convert.recipe.files import bundled_path, bundled_recipes, recipe_folder
from qwen35_convert.recipe.schema import recipe_schema
from qwen35_convert.write.receipt import dump_json
from tests.qwen35_convert.command import called

PUBLISHED = recipe_folder() / "recipe.schema.json"


def valid(text: str) -> bool:
    checker = jsonschema.Draft202012Validator(recipe_schema())
    return not list(checker.iter_errors(yaml.safe_load(text)))


def test_the_published_schema_is_the_model_s(request):
    """`pytest --update-golden` writes it."""
    content = dump_json(recipe_schema())
    if request.config.getoption("--update-golden"):
        PUBLISHED.write_bytes(content)
    assert PUBLISHED.read_bytes() == content


def test_the_command_prints_it():
    done = called("recipes", "--schema")
    assert done.returncode == 0
    assert json.loads(done.stdout) == recipe_schema()


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("name", bundled_recipes())
def test_it_takes_every_bundled_recipe(name):
    assert valid(bundled_path(name).read_text())


@pytest.mark.parametrize(
    "text",
    [
        "extends: fp8-block",
        "extends: base.yaml\nquantize: {scheme: keep}",
        "quantize: {scheme: int4, group: 32, symmetric: false, calibrate: ~}",
        "quantize: {rules: [{match: lm_head, scheme: Q6_K}]}",
        "export: {max_shard_size: 5 GB}",
        "export: {max_shard_size: 1.5GiB}",
        "export: {max_shard_size: 200}",
        "verify: {max_kl: 1e-3, min_top1: 0.97}",
        "bench: {batch: [1, 2]}",
    ],
)
def test_it_takes_what_the_reader_takes(text):
    assert valid(text)


@pytest.mark.parametrize(
    "text",
    [
        "layuot: text",
        "layout: txt",
        "extends: 5",
        "quantize: {scheme: fp9-block}",
        "quantize: {rules: [{match: a}]}",
        "quantize: {rules: [{match: a, scheme: keep, more: 1}]}",
        "quantize: {calibrate: {tokens: 1}}",
        "export: {format: zip}",
        "export: {max_shard_size: five}",
        "export: {max_shard_size: 0}",
        "verify: {min_top1: 2}",
        "mtp: no",
        "bench: {batch: 1}",
    ],
)
def test_it_refuses_what_the_reader_refuses(text):
    assert not valid(text)
