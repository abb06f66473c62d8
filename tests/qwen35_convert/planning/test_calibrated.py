"""A plan whose codes a text chooses says the method, the text, its tokens and the memory."""

from __future__ import annotations

import pytest

import qwen35_convert as q
from qwen35_convert.report import plan_text

RECIPES = ("nvfp4a16-gptq", "int4-gptq", "nvfp4-mixed-gptq")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_names_method_text_tokens_and_memory(nano, golden, recipe):
    golden(f"plan-{recipe}.txt", plan_text(q.plan(nano, recipe)) + "\n")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_calibrated_recipe_differs_from_its_plain_one_in_the_method_alone(recipe):
    quantize = q.read_recipe(recipe).quantize
    plain = q.read_recipe(recipe.removesuffix("-gptq"))
    method = {"method": "gptq", "calibrate": quantize.calibrate}
    assert plain.quantize.model_copy(update=method) == quantize
    others = {"name", "quantize"}
    assert q.read_recipe(recipe).model_dump(exclude=others) == plain.model_dump(exclude=others)
