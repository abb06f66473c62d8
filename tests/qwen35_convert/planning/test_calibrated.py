"""A plan whose codes a text chooses says the method, the text, its tokens and the memory."""

from __future__ import annotations

import pytest

import qwen35_convert as q
from formats.family.roles import ROLES
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.planning.calibrated import adds_to_stream, stage_of
from qwen35_convert.report import plan_text
from tests.checkpoints import hub_config, make_weights, write_checkpoint

RECIPES = ("nvfp4a16-gptq", "int4-gptq", "nvfp4-mixed-gptq", "gguf-q4_k_m-gptq")
MORE = ("gguf-q6_k-gptq", "gguf-iq3_xxs-gptq", "gguf-iq2_m-gptq")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_names_method_text_tokens_and_memory(nano, golden, recipe):
    out = "model.gguf" if recipe.startswith("gguf-") else "model"
    golden(f"plan-{recipe}.txt", plan_text(q.plan(nano, recipe, out)) + "\n")


@pytest.mark.parametrize("recipe", [*RECIPES, *MORE])
def test_a_calibrated_recipe_differs_from_its_plain_one_in_the_method_alone(recipe):
    quantize = q.read_recipe(recipe).quantize
    plain = q.read_recipe(recipe.removesuffix("-gptq"))
    method = {"method": "gptq", "calibrate": quantize.calibrate}
    assert plain.quantize.model_copy(update=method) == quantize
    others = {"name", "quantize"}
    assert q.read_recipe(recipe).model_dump(exclude=others) == plain.model_dump(exclude=others)


def test_the_stream_takes_what_comes_out_as_wide_as_it_is(tmp_path):
    config = hub_config(moe=True, sizes="ragged")
    write_checkpoint(tmp_path, config, make_weights(config))
    checkpoint = open_checkpoint(tmp_path)
    wide = checkpoint.config.sizes["H"]
    for name, atom in checkpoint.layout.atoms.items():
        if ROLES[atom.role].linear and stage_of(name):
            assert adds_to_stream(name) == (atom.shape[0] == wide), name
